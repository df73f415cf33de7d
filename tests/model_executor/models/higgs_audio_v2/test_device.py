# SPDX-License-Identifier: Apache-2.0
"""Higgs Audio's feedback and codec on a simulated device: nothing mixes devices, and the results are those of a CPU."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.speech import decode_in_windows, speak_frames
from tests.simulated_device import DEVICE, SimulatedDevice, on_cpu
from vllm_omni.model_executor.feedback import RequestInput
from vllm_omni.model_executor.layers.delay_pattern import DelayPattern
from vllm_omni.model_executor.models.higgs_audio_v2.backbone import OmniHiggsAudio
from vllm_omni.model_executor.models.higgs_audio_v2.codec import HiggsAudioEncoder, OmniHiggsAudioCodec
from vllm_omni.testing.oracles.higgs_audio_v2 import HiggsAudioReference

CPU = torch.device("cpu")
SAMPLED = SamplingParams(seed=3, top_k=9, extra_args={"ras_win_len": 7, "ras_win_max_num_repeat": 1})


class Layers(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embed_input_ids = embedding
        self.register_buffer("is_sound", torch.zeros(8, dtype=torch.bool))


class Backbone(OmniHiggsAudio):
    """What the strategy reads, with the reference's weights."""

    def __init__(self, reference: HiggsAudioReference) -> None:
        nn.Module.__init__(self)
        theirs, self.config = reference.model, reference.model.config
        self.model = Layers(theirs.model.embed_tokens)
        self.embed_audio_tokens = theirs.model.embed_audio_tokens.embed_audio_tokens
        self.audio_lm_head = theirs.audio_lm_head
        self.offsets: torch.Tensor
        self.register_buffer("offsets", theirs.model.embed_audio_tokens.audio_tokens_offsets)
        self.pattern = DelayPattern(
            self.config.num_codebooks, self.config.audio_stream_bos_id, self.config.audio_stream_eos_id
        )
        codec = reference.processor.audio_tokenizer
        self.codec = HiggsAudioEncoder(codec.config)
        self.codec.load(codec.state_dict())
        self.max_model_len = 80


@pytest.fixture(scope="module")
def backbone(reference: HiggsAudioReference) -> Backbone:
    return Backbone(reference)


@torch.no_grad()
def speak(backbone: Backbone, device: torch.device) -> list[torch.Tensor]:
    """Inputs and outputs of a request with a sound, sampled, and one without, greedy."""
    model: Any = copy.deepcopy(backbone).to(device)
    config = model.config
    strategy = model.make_feedback_strategy(1)
    num_rows = model.pattern.num_rows(2)
    torch.manual_seed(1)
    prompts = [
        {
            "text_ids": torch.tensor([5, *[config.audio_token_id] * (num_rows - 1), config.audio_delay_token_id, 7]),
            "sound": torch.randn(2000),
        },
        {"text_ids": torch.tensor([3, 4]), "sound": torch.empty(0)},
    ]
    for slot, params in enumerate((SAMPLED, SamplingParams(temperature=0))):
        strategy.begin(slot, RequestInput([], prompts[slot], params, True))
    made = [strategy.prompt_rows(0, 1, 8), strategy.prompt_mask(0, 0, 9), strategy.prompt_rows(1, 0, 2)]
    return made + speak_frames(strategy, config.hidden_size, device, num_frames=6)


def test_inputs_and_outputs_of_the_backbone(backbone: Backbone, device: SimulatedDevice) -> None:
    torch.testing.assert_close(on_cpu(speak(backbone, DEVICE)), speak(backbone, CPU))


def decode(reference: HiggsAudioReference, device: torch.device) -> list[torch.Tensor]:
    """The waves of two requests in windows."""
    theirs = reference.processor.audio_tokenizer
    config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=theirs.config))
    codec = OmniHiggsAudioCodec(vllm_config=config)
    codec.load_weights(theirs.state_dict().items())
    codec.to(device)
    codes = torch.randint(60, (2, 30, theirs.config.num_quantizers), generator=torch.Generator().manual_seed(0))
    return decode_in_windows(codec, codes, (4, 22, 30))


def test_sound_in_windows(reference: HiggsAudioReference, device: SimulatedDevice) -> None:
    torch.testing.assert_close(on_cpu(decode(reference, DEVICE)), decode(reference, CPU))
