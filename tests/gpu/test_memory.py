# SPDX-License-Identifier: Apache-2.0
"""Memory of this process on its devices."""

import pytest
import torch

from vllm_omni.metrics.memory import device_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SIZE = 256 << 20


def test_device_memory_grows_with_what_is_held():
    before = device_bytes()
    held = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    assert SIZE <= device_bytes() - before < 2 * SIZE
    del held
    torch.cuda.empty_cache()
    assert device_bytes() - before < SIZE
