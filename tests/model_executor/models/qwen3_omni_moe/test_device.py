# SPDX-License-Identifier: Apache-2.0
"""The models' code on a device that is not the CPU: nothing is mixed, and results are those of the CPU."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.engines import read_weights
from tests.simulated_device import DEVICE, SimulatedDevice, on_cpu, simulate_device
from vllm_omni.model_executor.feedback import FedBackRows, InputPiece, RequestInput
from vllm_omni.model_executor.layers.depth_decoder import DepthDecoder
from vllm_omni.model_executor.layers.frame_loop import FrameLoop
from vllm_omni.model_executor.layers.residual_codes import Frame, FrameGraphs, ResidualSampling
from vllm_omni.model_executor.models.qwen3_omni_moe.code2wav import OmniQwen3OmniMoeCode2Wav
from vllm_omni.model_executor.models.qwen3_omni_moe.talker import RESIDUAL_FILTER, TalkerFeedback
from vllm_omni.model_executor.models.qwen3_omni_moe.talker_prompt import TalkerPromptBuilder, ThinkerRows

CPU = torch.device("cpu")
NO_IDS = torch.empty(0)
GREEDY, DRAWN, SEEDED = SamplingParams(temperature=0), SamplingParams(), SamplingParams(seed=3)


@pytest.fixture(scope="module")
def talker(config: PretrainedConfig) -> nn.ModuleDict:
    """The modules of a talker's feedback, on the CPU, with random weights."""
    torch.manual_seed(0)
    talker_config = config.talker_config
    num_codes = talker_config.num_code_groups
    predictor = DepthDecoder(talker_config.code_predictor_config, num_codes, max_batch_size=4)
    for parameter in predictor.parameters():
        parameter.data.normal_(std=0.3)
    builder = TalkerPromptBuilder(talker_config)
    builder.set_control_embeds(torch.randn(3, talker_config.thinker_hidden_size))
    embedding = nn.Embedding(talker_config.text_config.vocab_size, builder.control.shape[1])
    return nn.ModuleDict({"predictor": predictor, "builder": builder, "embedding": embedding})


@torch.no_grad()
def speak(talker: nn.ModuleDict, device: torch.device) -> list[torch.Tensor]:
    """Inputs and outputs of three requests: greedy, sampled, and sampled with a seed."""
    parts: Any = copy.deepcopy(talker).to(device)
    frames = FrameLoop(parts["predictor"], 2, max_frames=80)
    strategy = TalkerFeedback(parts["embedding"], parts["builder"], frames, 2)
    torch.manual_seed(1)
    width = talker["builder"].config.thinker_hidden_size
    users, replies = torch.randn(3, 5, width), torch.randn(3, 6, width)  # of stage input processors: on the CPU
    is_media = torch.tensor([False, True, True, False, False])
    for slot, params in enumerate((GREEDY, DRAWN, SEEDED)):
        information = ThinkerRows(users[slot], is_media, replies[slot], speaker_id=2).to_information()
        strategy.begin(slot, RequestInput([], information, params, slot == 0))
    strategy.extend([InputPiece(1, {"reply_rows": users[0]}, True), InputPiece(2, {}, True)])
    slots = torch.tensor([2, 0, 1], device=device)
    made = [strategy.prompt_rows(slot, 0, 9) for slot in range(3)]
    for frame in range(3):
        hidden = torch.randn(3, talker["builder"].control.shape[1]).to(device)
        strategy.save_hidden_states(slots, hidden)
        rows = FedBackRows(
            torch.tensor([4, 5, 6 + frame], device=device), slots, torch.full((3,), frame, device=device)
        )
        fed_back, again = strategy.feed_back(rows), strategy.replay(rows)
        made += [fed_back.embeds, fed_back.outputs["codes"], again.embeds]
    strategy.end(2)
    return made


def test_inputs_and_outputs_of_the_talker(talker: nn.ModuleDict, device: SimulatedDevice) -> None:
    torch.testing.assert_close(on_cpu(speak(talker, DEVICE)), speak(talker, CPU))


class Recording:
    """Does on replay what a CUDA graph does: the same work on the same memory, results included."""

    def __init__(self, work: Callable[[], Frame]) -> None:
        self.work = work
        self.frame = work()

    def replay(self) -> None:
        for target, source in zip(self.frame, self.work(), strict=True):
            target.copy_(source)


@torch.no_grad()
def predict_with_graphs(talker: nn.ModuleDict, device: torch.device) -> list[torch.Tensor]:
    predictor: Any = copy.deepcopy(talker["predictor"]).to(device)

    def capture(work: Callable[[], Frame]) -> tuple[Recording, Frame]:
        recording = Recording(work)
        return recording, recording.frame

    noise_shape = (predictor.num_steps, 50)
    graphs = FrameGraphs(predictor, 4, predictor.norm.data, noise_shape, capture)
    torch.manual_seed(2)
    made: list[torch.Tensor] = []
    for batch_size, is_sampled in ((3, False), (1, True), (3, True), (2, False)):
        hidden, first = torch.randn(2, batch_size, predictor.config.hidden_size).to(device)
        noise = torch.empty(batch_size, *noise_shape).exponential_().to(device)
        filters = torch.tensor([RESIDUAL_FILTER] * batch_size, device=device)
        sampling = ResidualSampling(filters, noise) if is_sampled else None
        made += graphs(hidden, first, sampling)
    return made


def test_frames_as_graphs(talker: nn.ModuleDict, device: SimulatedDevice) -> None:
    torch.testing.assert_close(on_cpu(predict_with_graphs(talker, DEVICE)), predict_with_graphs(talker, CPU))


@pytest.fixture(scope="module")
def vocoder(tiny_qwen3_omni_moe: Path, config: PretrainedConfig) -> OmniQwen3OmniMoeCode2Wav:
    vllm_config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=config.code2wav_config))
    vocoder = OmniQwen3OmniMoeCode2Wav(vllm_config=vllm_config)
    vocoder.load_weights(read_weights(tiny_qwen3_omni_moe, "code2wav.").items())
    return vocoder


@torch.no_grad()
def vocode(vocoder: OmniQwen3OmniMoeCode2Wav, config: PretrainedConfig) -> list[torch.Tensor]:
    """The waves of two requests in windows and of a whole one, step by step."""
    sizes = config.code2wav_config
    generator = torch.Generator().manual_seed(0)
    codes = [torch.randint(sizes.codebook_size, (n, sizes.num_quantizers), generator=generator) for n in (12, 9, 3)]
    states: list[dict[str, Any]] = [{}, {}, {}]
    waves = []
    for step in (((0, 5), (0, 0), (0, 3)), ((5, 9), (0, 4), None), ((9, 12), (4, 9), None)):
        infos = [
            {"codes": codes[i][slice(*part)], "state": states[i], "is_last": part[1] == len(codes[i])}
            for i, part in enumerate(step)
            if part is not None
        ]
        waves += [output["audio"] for output in vocoder(NO_IDS, NO_IDS, runtime_additional_information=infos)]
    return waves


def test_speech_whole_and_in_windows(vocoder: OmniQwen3OmniMoeCode2Wav, config: PretrainedConfig) -> None:
    expected = vocode(vocoder, config)
    with simulate_device():
        torch.testing.assert_close(
            on_cpu(vocode(copy.deepcopy(vocoder).to(DEVICE), config)), expected, rtol=0, atol=1e-4
        )
    assert expected[0].abs().max() > 1e-3, "silence would prove nothing"
