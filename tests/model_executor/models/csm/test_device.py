# SPDX-License-Identifier: Apache-2.0
"""CSM's feedback and codec on a simulated device: nothing mixes devices, and the results are those of a CPU."""

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
from vllm_omni.model_executor.layers.depth_decoder import DepthDecoder
from vllm_omni.model_executor.layers.frame_loop import FrameLoop
from vllm_omni.model_executor.layers.mimi import MimiEncoder
from vllm_omni.model_executor.models.csm.backbone import CsmFeedback
from vllm_omni.model_executor.models.csm.codec import OmniCsmCodec
from vllm_omni.testing.oracles.csm import CsmReference

CPU = torch.device("cpu")


class Backbone(nn.Module):
    """What the strategy reads of `OmniCsm`, with random weights."""

    def __init__(self, reference: CsmReference) -> None:
        super().__init__()
        config = reference.model.config
        self.config = config
        self.embed_text_tokens = nn.Embedding(config.text_vocab_size, config.hidden_size)
        self.frames = nn.Embedding(config.num_codebooks * config.vocab_size, config.hidden_size)
        self.first_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.depth_decoder = DepthDecoder(
            config.depth_decoder_config, config.num_codebooks, 4, input_size=config.hidden_size, has_qk_norm=False
        )
        for parameter in self.depth_decoder.parameters():
            parameter.data.normal_(std=0.3)
        self.codec = MimiEncoder(config.codec_config)
        self.codec.load(reference.model.codec_model.state_dict())
        self.register_buffer("offsets", torch.arange(config.num_codebooks) * config.vocab_size)

    def embed_frames(self, codes: torch.Tensor) -> torch.Tensor:
        return self.frames(codes + self.offsets).sum(1)


@pytest.fixture(scope="module")
def backbone(reference: CsmReference) -> Backbone:
    torch.manual_seed(0)
    return Backbone(reference)


@torch.no_grad()
def speak(backbone: Backbone, device: torch.device) -> list[torch.Tensor]:
    """Inputs and outputs of a request with two sounds, sampled, and one without, greedy."""
    model: Any = copy.deepcopy(backbone).to(device)
    strategy = CsmFeedback(model, FrameLoop(model.depth_decoder, 1, max_frames=80))
    audio, end = model.config.audio_token_id, model.config.audio_eos_token_id
    torch.manual_seed(1)
    prompts = [
        {
            "text_ids": torch.tensor([5, audio, audio, end, 9, audio, end, 7]),
            "sounds": torch.randn(1920 + 2000),
            "sound_sizes": torch.tensor([2000, 1920]),
        },
        {"text_ids": torch.tensor([3, 4]), "sounds": torch.empty(0), "sound_sizes": torch.empty(0, dtype=torch.int64)},
    ]
    for slot, params in enumerate((SamplingParams(seed=3, top_k=9), SamplingParams(temperature=0))):
        strategy.begin(slot, RequestInput([], prompts[slot], params, True))
    made = [strategy.prompt_rows(0, 1, 8), strategy.prompt_rows(1, 0, 2)]
    return made + speak_frames(strategy, model.config.hidden_size, device)


def test_inputs_and_outputs_of_the_backbone(backbone: Backbone, device: SimulatedDevice) -> None:
    torch.testing.assert_close(on_cpu(speak(backbone, DEVICE)), speak(backbone, CPU))


def decode(reference: CsmReference, device: torch.device) -> list[torch.Tensor]:
    """The waves of two requests in windows."""
    model_config = SimpleNamespace(hf_config=reference.model.config.codec_config)
    codec = OmniCsmCodec(vllm_config=SimpleNamespace(model_config=model_config))  # type: ignore[arg-type]
    weights = reference.model.codec_model.state_dict()
    codec.load_weights((f"codec_model.{name}", tensor) for name, tensor in weights.items())
    codec.to(device)
    codes = torch.randint(100, (2, 9, reference.model.config.num_codebooks), generator=torch.Generator().manual_seed(0))
    return decode_in_windows(codec, codes, (4, 9))


def test_sound_in_windows(reference: CsmReference, device: SimulatedDevice) -> None:
    torch.testing.assert_close(on_cpu(decode(reference, DEVICE)), decode(reference, CPU))
