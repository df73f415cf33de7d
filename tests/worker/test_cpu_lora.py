# SPDX-License-Identifier: Apache-2.0
"""Rows without an adapter stay as they are, which vLLM's CPU kernels alone do not see to."""

import pytest
import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from vllm_omni.worker.cpu_lora import OmniPunicaWrapperCPU

INDICES = torch.tensor([0, -1, 1, -1])
WITHOUT = INDICES < 0


def add(is_ours: bool, is_prefill: bool) -> torch.Tensor:
    """What two adapters of rank 2 add to four rows of 3."""
    wrapper = PunicaWrapperCPU(8, 8, "cpu")
    wrapper.indices_len[:2] = [4, 4]
    wrapper._token_lora_indices[:4] = INDICES
    wrapper._sampler_indices[:4] = INDICES
    wrapper.is_prefill = is_prefill
    if is_prefill:
        wrapper._update_prefill_metadata(INDICES)
    if is_ours:
        OmniPunicaWrapperCPU.adopt(wrapper)
    torch.manual_seed(0)
    y, x, a, b = torch.zeros(4, 3), torch.randn(4, 5), torch.randn(2, 1, 2, 5), torch.randn(2, 1, 3, 2)
    wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (3,))
    logits = torch.zeros(4, 3)
    wrapper.add_lora_logits(logits, x, a, b, 1.0)
    torch.testing.assert_close(logits, y)
    return y


@pytest.mark.parametrize("is_prefill", [True, False])
def test_only_rows_with_an_adapter_get_one(is_prefill: bool) -> None:
    ours, theirs = add(True, is_prefill), add(False, is_prefill)
    assert ours[WITHOUT].eq(0).all()
    torch.testing.assert_close(ours[~WITHOUT], theirs[~WITHOUT])
    assert theirs[WITHOUT].ne(0).any(), "vLLM leaves them out now: cpu_lora.py is not needed any more"
