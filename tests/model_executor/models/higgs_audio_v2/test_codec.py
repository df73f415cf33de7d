# SPDX-License-Identifier: Apache-2.0
"""The frames that the codec's samples depend on, in double precision, where nothing else differs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni.model_executor.models.higgs_audio_v2.codec import OmniHiggsAudioCodec
from vllm_omni.testing.oracles.higgs_audio_v2 import HiggsAudioReference


@pytest.fixture
def codec(reference: HiggsAudioReference) -> OmniHiggsAudioCodec:
    theirs = reference.processor.audio_tokenizer
    config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=theirs.config))
    codec = OmniHiggsAudioCodec(vllm_config=config)
    loaded = codec.load_weights(theirs.state_dict().items())
    assert loaded == {name for name, _ in codec.named_parameters()}
    return codec.double()


def decode(codec: OmniHiggsAudioCodec, codes: torch.Tensor, size: int) -> torch.Tensor:
    """The wave of delayed rows, in windows of this size."""
    state: dict[str, Any] = {}
    waves = []
    for start in range(0, len(codes), size):
        window = {"codes": codes[start : start + size], "state": state, "is_last": start + size >= len(codes)}
        waves.append(codec(torch.empty(0), torch.empty(0), runtime_additional_information=[window])[0]["audio"])
    return torch.cat(waves)


@torch.no_grad()
def test_the_context_is_all_that_a_sample_depends_on_and_no_more(codec: OmniHiggsAudioCodec) -> None:
    assert codec.num_context == 10 and codec.hop == 960
    codes = torch.randint(64, (50, 4), generator=torch.Generator().manual_seed(0))
    frames = codec.align(codes)
    whole = codec.model.decode(frames.T[None]).audio_values[0, 0]
    for size in (1, 7, 24):
        torch.testing.assert_close(decode(codec, codes, size), whole, rtol=0, atol=1e-12)
    codec.num_context = 9
    assert (decode(codec, codes, 7) - whole).abs().max() > 1e-9
