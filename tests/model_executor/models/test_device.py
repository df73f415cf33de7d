# SPDX-License-Identifier: Apache-2.0
"""The models' shared code, on a device that is not the CPU."""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.utils import WeightsMapper
from vllm.multimodal.utils import set_mm_embedding_modality
from vllm.sampling_params import SamplingParams

from tests.simulated_device import DEVICE, SimulatedDevice, on_cpu
from vllm_omni.model_executor.interfaces import RequestSpan
from vllm_omni.model_executor.models.qwen2_5_omni.thinker import OmniQwen2_5OmniThinker
from vllm_omni.model_executor.models.qwen3_omni_moe.thinker import OmniQwen3OmniMoeThinker
from vllm_omni.model_executor.models.qwen_omni.talker import THINKER_EMBEDDING, QwenOmniTalker
from vllm_omni.model_executor.models.qwen_omni.thinker import QwenOmniThinker

AUDIO, IMAGE, VIDEO = 7, 8, 9


class Embedding(nn.Module):
    """Like vLLM's thinkers: media replace the embeddings of their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4).requires_grad_(False)

    def embed_input_ids(
        self, input_ids: torch.Tensor, embeddings: Any = None, *, is_multimodal: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = self.table(input_ids)
        if embeddings is not None:
            assert is_multimodal is not None
            rows[is_multimodal] = torch.cat(list(embeddings))
        return rows


class Thinker(QwenOmniThinker, Embedding):
    make_omni_output = OmniQwen3OmniMoeThinker.make_omni_output


class OlderThinker(QwenOmniThinker, Embedding):
    make_omni_output = OmniQwen2_5OmniThinker.make_omni_output


def emit_rows(thinker_class: type, device: torch.device) -> list[torch.Tensor]:
    """A thinker's rows for the talker, of a prompt with audio in its video and of a generated token."""
    torch.manual_seed(0)
    thinker = thinker_class()
    thinker.set_media_token_ids(AUDIO, IMAGE, VIDEO)
    thinker.to(device)
    ids = torch.tensor([1, VIDEO, AUDIO, VIDEO, 2, AUDIO])
    is_multimodal = torch.tensor([False, True, True, True, False, False])  # vLLM's is on the CPU
    media = [
        set_mm_embedding_modality(torch.randn(count, 4).to(device), name)
        for name, count in (("audio", 1), ("video", 2))
    ]
    spans = [RequestSpan("a", 0, 5, 0, 5, 5, SamplingParams()), RequestSpan("b", 5, 6, 3, 3, 4, SamplingParams())]
    states = torch.randn(6, 4).to(device)
    made = []
    for embeds in (thinker.embed_input_ids(ids.to(device), media, is_multimodal=is_multimodal), None):
        _, rows = thinker.preprocess(ids.to(device), embeds, spans)
        made += thinker.make_omni_output(states, [states + 1], rows, spans).values()
    return made


def test_rows_of_a_thinker_for_the_talker(device: SimulatedDevice) -> None:
    for thinker_class in (Thinker, OlderThinker):
        made, expected = (emit_rows(thinker_class, where) for where in (DEVICE, torch.device("cpu")))
        torch.testing.assert_close(on_cpu(made), expected)


def test_the_talkers_rows_of_the_thinkers_embedding(device: SimulatedDevice) -> None:
    """vLLM's loader hands out weights that lie on the CPU; a model's own are on the device."""
    talker, rows = QwenOmniTalker(), torch.randn(5, 4)
    talker.hf_to_vllm_mapper = WeightsMapper()
    loaded, embeds = talker.load_with_thinker_embeds([(THINKER_EMBEDDING, rows)], [3, 1])
    assert loaded == set()
    own = torch.zeros(2, 4, device=DEVICE)
    own.copy_(embeds)
    assert torch.equal(on_cpu(own), rows[[3, 1]])
