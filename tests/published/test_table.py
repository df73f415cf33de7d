# SPDX-License-Identifier: Apache-2.0
"""The table of memory in the documentation is what is computed."""

import pytest

from tests.published.plans import ROOT, as_markdown, compute_plans

pytestmark = pytest.mark.slow


def test_the_documentation_has_what_is_computed() -> None:
    assert as_markdown(compute_plans()) in (ROOT / "docs" / "models.md").read_text(), (
        "replace the table of docs/models.md by the output of: python -m tests.published.plans --markdown"
    )
