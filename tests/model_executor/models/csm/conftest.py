# SPDX-License-Identifier: Apache-2.0
"""CSM's reference on the tiny checkpoint."""

from pathlib import Path

import pytest

from vllm_omni.testing.oracles.csm import CsmReference


@pytest.fixture(scope="session")
def reference(tiny_csm: Path) -> CsmReference:
    return CsmReference(tiny_csm)
