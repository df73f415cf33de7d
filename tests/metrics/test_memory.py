# SPDX-License-Identifier: Apache-2.0
"""Memory of this process."""

import psutil
import torch

from vllm_omni.metrics.memory import device_bytes, resident_bytes

SIZE = 256 << 20


def test_resident_memory_grows_with_what_is_held():
    before = resident_bytes()
    held = torch.ones(SIZE, dtype=torch.uint8)
    assert SIZE * 0.9 < resident_bytes() - before < SIZE * 1.5
    assert abs(resident_bytes() - psutil.Process().memory_info().rss) < SIZE // 4
    del held
    assert resident_bytes() - before < SIZE // 2


def test_no_device_has_no_memory():
    if not torch.accelerator.is_available():
        assert device_bytes() == 0
