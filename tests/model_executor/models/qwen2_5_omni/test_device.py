# SPDX-License-Identifier: Apache-2.0
"""The models' code on a device that is not the CPU: nothing is mixed, and results are those of the CPU."""

import copy
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
from vllm_omni.model_executor.models.qwen2_5_omni import token2wav_dit
from vllm_omni.model_executor.models.qwen2_5_omni.talker import TalkerFeedback
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav import OmniQwen2_5OmniToken2Wav

pytestmark = pytest.mark.slow

NO_IDS = torch.empty(0)

Info = dict[str, Any]


@pytest.fixture(scope="module")
def vocoder(tiny_qwen2_5_omni: Path, config: PretrainedConfig) -> OmniQwen2_5OmniToken2Wav:
    """On the CPU; nothing has been computed of its weights."""
    model_config = SimpleNamespace(hf_config=config.token2wav_config, model=str(tiny_qwen2_5_omni), revision=None)
    vllm_config: Any = SimpleNamespace(model_config=model_config)
    vocoder = OmniQwen2_5OmniToken2Wav(vllm_config=vllm_config)
    vocoder.load_state_dict(read_weights(tiny_qwen2_5_omni, "token2wav."))
    return vocoder


def make_codes(length: int) -> torch.Tensor:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(length))


def windows(length: int, sizes: list[int], speaker: str) -> list[Info]:
    """One request's windows, `sizes` codes each."""
    state: Info = {}
    infos = [{"codes": part, "speaker": speaker, "seed": length} for part in make_codes(length).split(sizes)]
    return [info | {"state": state, "is_last": info is infos[-1]} for info in infos]


STEPS = [(5, [5], "chelsie"), (30, [4, 22, 4], "ethan"), (26, [25, 1, 0], "aiden")]


@torch.no_grad()
def vocode(vocoder: OmniQwen2_5OmniToken2Wav) -> list[list[torch.Tensor]]:
    """The waves of a whole request and of two in windows, step by step."""
    requests = [windows(*step) for step in STEPS]
    waves = []
    for step in range(3):
        infos = [request[step] for request in requests if step < len(request)]
        waves.append([output["audio"] for output in vocoder(NO_IDS, NO_IDS, runtime_additional_information=infos)])
    return waves


def test_speech_whole_and_in_windows(vocoder: OmniQwen2_5OmniToken2Wav, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token2wav_dit, "NUM_TIME_POINTS", 3)  # Further steps of the solver would repeat the same code.
    expected = vocode(copy.deepcopy(vocoder))
    with simulate_device():
        made = vocode(copy.deepcopy(vocoder).to(DEVICE))
        for waves, others in zip(on_cpu(made), expected, strict=True):
            for wave, other in zip(waves, others, strict=True):
                torch.testing.assert_close(wave, other, rtol=0, atol=1e-5)
    assert expected[-1][-1].abs().max() > 0.01, "silence would prove nothing"


def feed_back(device: torch.device) -> list[torch.Tensor]:
    """A talker's inputs: two prompts, later text, tokens that are fed back, the end and padding."""
    torch.manual_seed(0)
    projection = nn.Linear(12, 8).requires_grad_(False)
    codec, end, pad, voice = torch.randn(20, 12), torch.randn(12), torch.randn(12), torch.randn(12)
    rows = [torch.randn(count, 12) for count in (3, 2, 4, 1)]  # of stage input processors: on the CPU
    strategy = TalkerFeedback(
        projection.to(device), codec.to(device), (16, 17), end.to(device), pad.to(device), {"a": voice.to(device)}, 1
    )
    for slot in range(2):  # more than the initial capacity
        information = {"prompt_rows": rows[slot], "reply_rows": rows[2 + slot], "speaker": "a"}
        strategy.begin(slot, RequestInput([], information, SamplingParams(), slot == 0))
    strategy.extend([InputPiece(1, {"reply_rows": rows[2]}, False), InputPiece(1, {}, True)])
    slots = torch.tensor([1, 0], device=device)
    strategy.save_hidden_states(slots, torch.zeros(2, 8, device=device))
    made = [strategy.prompt_rows(0, 0, 5), strategy.prompt_rows(1, 1, 3)]
    for frame in range(7):
        frames = torch.full((2,), frame, device=device)
        made.append(strategy.feed_back(FedBackRows(torch.tensor([3, frame], device=device), slots, frames)).embeds)
    return made


def test_inputs_of_the_talker(device: SimulatedDevice) -> None:
    torch.testing.assert_close(on_cpu(feed_back(DEVICE)), feed_back(torch.device("cpu")))
