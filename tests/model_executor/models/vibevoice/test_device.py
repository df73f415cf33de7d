# SPDX-License-Identifier: Apache-2.0
"""VibeVoice's feedback on a simulated device: nothing mixes devices, and the results are those of a CPU."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from vllm.sampling_params import SamplingParams

from tests.simulated_device import DEVICE, SimulatedDevice, on_cpu
from vllm_omni.model_executor.feedback import FedBackRows, RequestInput
from vllm_omni.model_executor.models.vibevoice.language_model import OmniVibeVoice
from vllm_omni.testing.oracles.vibevoice import VibeVoiceReference

CPU = torch.device("cpu")


class Model(OmniVibeVoice):
    """What the strategy reads, with the reference's weights."""

    def __init__(self, reference: VibeVoiceReference) -> None:
        nn.Module.__init__(self)
        theirs = reference.model
        self.config = theirs.config
        self.max_model_len = 80
        self.embedding = theirs.model.language_model.embed_tokens
        for name in (
            *("audio_tower", "semantic_tokenizer_encoder", "multi_modal_projector", "semantic_connector"),
            *("diffusion_head", "latent_scaling_factor", "latent_bias_factor"),
        ):
            setattr(self, name, getattr(theirs.model, name))
        self.head = nn.Parameter(theirs.lm_head.weight[:3])
        self.num_steps = 3
        self.solver = theirs._build_default_noise_scheduler(theirs.generation_config)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(input_ids)


@pytest.fixture(scope="module")
def model(reference: VibeVoiceReference) -> Model:
    return Model(reference)


@torch.no_grad()
def speak(model: Model, device: torch.device) -> list[torch.Tensor]:
    """Inputs and outputs of a request with two voices, guided, and one without."""
    moved: Any = copy.deepcopy(model).to(device)
    config = moved.config
    strategy = moved.make_feedback_strategy(1)
    torch.manual_seed(1)
    frame = config.audio_token_id
    prompts = [
        {
            "text_ids": torch.tensor([5, frame, frame, 7, frame]),
            "sounds": torch.randn(8000),
            "sound_sizes": torch.tensor([5000, 3000]),
            "scale": 1.3,
        },
        {
            "text_ids": torch.tensor([3, 4]),
            "sounds": torch.zeros(0),
            "sound_sizes": torch.zeros(0, dtype=torch.int64),
            "scale": 1.0,
        },
    ]
    for slot, information in enumerate(prompts):
        params = SamplingParams(temperature=0, seed=slot)
        strategy.begin(slot, RequestInput([], information, params, True))
    made = [strategy.prompt_rows(0, 1, 5), strategy.prompt_rows(1, 0, 2), strategy.twin_rows(0, 1)]
    slots = torch.tensor([1, 0], device=device)
    for number in range(3):
        states = torch.randn(3, config.text_config.hidden_size).to(device)
        strategy.save_hidden_states(slots, states[:2])
        strategy.save_twin_states(slots[1:], states[2:])
        rows = FedBackRows(torch.tensor([frame, frame], device=device), slots, torch.full((2,), number, device=device))
        fed_back, again = strategy.feed_back(rows), strategy.replay(rows)
        made += [fed_back.embeds, fed_back.outputs["audio"], again.embeds, again.outputs["audio"]]
    strategy.end(0)
    return made


def test_inputs_and_outputs(model: Model, device: SimulatedDevice) -> None:
    made = on_cpu(speak(model, DEVICE))
    torch.testing.assert_close(made, speak(model, CPU))
    assert torch.equal(made[-4], made[-2]) and torch.equal(made[-3], made[-1])
