# SPDX-License-Identifier: Apache-2.0
"""The memory table in the documentation is up to date."""

import pytest

from tests.published.plans import ROOT, as_markdown, compute_plans

pytestmark = pytest.mark.slow


def test_the_memory_table_is_up_to_date() -> None:
    assert as_markdown(compute_plans()) in (ROOT / "docs" / "models.md").read_text(), (
        "replace the table of docs/models.md by the output of: python -m tests.published.plans --markdown"
    )
