# SPDX-License-Identifier: Apache-2.0
"""GLM-Image's feedback on a simulated device: nothing mixes devices, and the results are those of a CPU."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from vllm.sampling_params import SamplingParams

from tests.simulated_device import DEVICE, SimulatedDevice, on_cpu
from vllm_omni.model_executor.feedback import FedBackRows, RequestInput
from vllm_omni.model_executor.models.glm_image.prior import GlmImageFeedback, OmniGlmImage
from vllm_omni.testing.oracles.glm_image import GlmImageReference

CPU = torch.device("cpu")


class Prior(nn.Module):
    """What the strategy reads of `OmniGlmImage`."""

    encode_images = OmniGlmImage.encode_images

    def __init__(self, reference: GlmImageReference) -> None:
        super().__init__()
        model = reference.pipe.vision_language_encoder
        self.config = model.config
        self.embed_input_ids = model.model.language_model.embed_tokens
        self.visual, self.vqmodel = model.model.visual, model.model.vqmodel


@pytest.fixture(scope="module")
def prior(reference: GlmImageReference) -> Prior:
    return Prior(reference)


@torch.no_grad()
def read(prior: Prior, device: torch.device) -> list[torch.Tensor]:
    """Inputs and outputs of a request with two images, and of one without."""
    model: Any = copy.deepcopy(prior).to(device)
    strategy = GlmImageFeedback(model)
    pixels = torch.randn(10, 3 * 16 * 16, generator=torch.Generator().manual_seed(0))
    images = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 3], [1, 2, 2]])}
    token_ids = [100, *[model.config.image_token_id] * 10, 101]
    strategy.begin(0, RequestInput(token_ids, images, SamplingParams(), True))
    strategy.begin(1, RequestInput([100, 101], {}, SamplingParams(), True))
    made = [strategy.prompt_rows(0, 1, 12), strategy.prompt_rows(1, 0, 2), strategy.first_outputs(0)["image_ids"]]
    assert strategy.first_outputs(1) == {}
    slots = torch.tensor([1, 0], device=device)
    rows = FedBackRows(torch.tensor([4, 0], device=device), slots, torch.zeros(2, dtype=torch.int64, device=device))
    return [*made, strategy.feed_back(rows).embeds, strategy.replay(rows).embeds]


def test_inputs_and_outputs(prior: Prior, device: SimulatedDevice) -> None:
    torch.testing.assert_close(on_cpu(read(prior, DEVICE)), read(prior, CPU))
