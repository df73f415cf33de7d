# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS's feedback on a simulated device: nothing mixes devices, and the results are those of a CPU."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.speech import load_prompts, speak_frames
from tests.simulated_device import DEVICE, SimulatedDevice, on_cpu
from vllm_omni.metrics.stats import CacheCounts
from vllm_omni.model_executor.feedback import InputPiece, RequestInput
from vllm_omni.model_executor.layers.depth_decoder import DepthDecoder
from vllm_omni.model_executor.layers.frame_loop import FrameLoop
from vllm_omni.model_executor.models.qwen3_tts.configuration import Qwen3TTSConfig
from vllm_omni.model_executor.models.qwen3_tts.talker import OmniQwen3TTSTalker, Qwen3TTSFeedback, TextProjection

from .prompts import sound
from .test_codec import load_encoders

CPU = torch.device("cpu")
GREEDY, SEEDED = SamplingParams(temperature=0), SamplingParams(seed=3, top_k=9)


class Layers(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(ids)


class Talker(nn.Module):
    """What the strategy reads of `OmniQwen3TTSTalker`, with random weights but for the encoders."""

    embed_input_ids = OmniQwen3TTSTalker.embed_input_ids
    embed_text = OmniQwen3TTSTalker.embed_text
    embed_prompt = OmniQwen3TTSTalker.embed_prompt

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.config: Any = Qwen3TTSConfig.from_pretrained(folder)
        config = self.config.talker_config
        self.model = Layers(config.vocab_size, config.hidden_size)
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)
        self.text_projection = TextProjection(config.text_hidden_size, config.hidden_size)
        self.code_predictor = DepthDecoder(
            config.code_predictor_config, config.num_code_groups, 4, input_size=config.hidden_size, projection_bias=True
        )
        for parameter in self.code_predictor.parameters():
            parameter.data.normal_(std=0.3)
        self.codec_encoder, self.speaker_encoder = load_encoders(folder)
        self.register_buffer("suppressed", torch.zeros(1, dtype=torch.bool))


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str, str], Path]) -> Path:
    return checkpoint("qwen3_tts_base", "default")


@torch.no_grad()
def speak(talker: Talker, folder: Path, device: torch.device) -> list[torch.Tensor]:
    """Inputs and outputs of a request that continues a reference, and of one whose text arrives in pieces."""
    model: Any = copy.deepcopy(talker).to(device)
    strategy = Qwen3TTSFeedback(model, FrameLoop(model.code_predictor, 1, max_frames=80), max_batch_size=1)
    prompts, reference = load_prompts("qwen3_tts", folder), {"ref_audio": sound(0.5, 1)}
    prompt: Any = {"prompt": "hello there", "additional_information": {**reference, "ref_text": "the sea"}}
    stream = prompts.stream({"prompt": "", "additional_information": reference})
    first, last = stream.add("hello there ", is_last=False), stream.add("you", is_last=True)
    assert first is not None and last is not None
    whole = prompts(prompt)
    for slot, (given, params) in enumerate(((whole, SEEDED), (first, GREEDY))):
        strategy.begin(slot, RequestInput([], dict(given.additional_information), params, slot == 0))
    strategy.extend([InputPiece(1, last.additional_information, True)])
    made = [strategy.prompt_rows(0, 0, len(whole.prompt_token_ids)), strategy.prompt_rows(1, 1, 4)]
    assert strategy.first_outputs(1) == {}
    made.append(strategy.first_outputs(0)["ref_codes"])
    torch.manual_seed(1)
    return made + speak_frames(strategy, model.config.talker_config.hidden_size, device)


@torch.no_grad()
def test_a_reference_is_encoded_once(folder: Path) -> None:
    torch.manual_seed(0)
    model: Any = Talker(folder)
    strategy = Qwen3TTSFeedback(model, FrameLoop(model.code_predictor, 3, max_frames=80), max_batch_size=3)
    prompts, voice = load_prompts("qwen3_tts", folder), sound(0.5, 1)
    continued = {"ref_audio": voice, "ref_text": "the sea"}
    for slot, information in enumerate((continued, continued, {"ref_audio": voice})):
        given: Any = prompts({"prompt": "hello there", "additional_information": information})
        strategy.begin(slot, RequestInput([], dict(given.additional_information), GREEDY, True))
    assert strategy.sound_cache is not None
    assert strategy.sound_cache.counts == CacheCounts(queries=5, hits=3)
    num_rows = len(prompts({"prompt": "hello there", "additional_information": continued}).prompt_token_ids)
    assert torch.equal(strategy.prompt_rows(0, 0, num_rows), strategy.prompt_rows(1, 0, num_rows))
    frames, again = (strategy.first_outputs(slot)["ref_codes"] for slot in (0, 1))
    assert torch.equal(frames, again) and len(frames) > 5 and strategy.first_outputs(2) == {}


def test_inputs_and_outputs_of_the_talker(folder: Path, device: SimulatedDevice) -> None:
    torch.manual_seed(0)
    talker = Talker(folder)
    torch.testing.assert_close(on_cpu(speak(talker, folder, DEVICE)), speak(talker, folder, CPU))
