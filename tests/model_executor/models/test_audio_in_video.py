# SPDX-License-Identifier: Apache-2.0
"""Embeddings are in the order of their tokens, wherever a chunked prefill cuts a video with audio."""

import pytest
import torch
from vllm.multimodal.utils import get_mm_embedding_modalities, set_mm_embedding_modality

from vllm_omni.model_executor.models.qwen_omni.thinker import in_token_order

TEXT, AUDIO, IMAGE, VIDEO = range(4)
TOKEN_IDS = {"audio": AUDIO, "image": IMAGE, "video": VIDEO}
VALUES = {AUDIO: 100.0, IMAGE: 200.0, VIDEO: 300.0}


def item(modality: str, first: int, count: int) -> torch.Tensor:
    """`[count, 1]`: the values identify the modality and the token."""
    rows = VALUES[TOKEN_IDS[modality]] + torch.arange(first, first + count)
    return set_mm_embedding_modality(rows[:, None], modality)


@pytest.mark.parametrize(
    ("tokens", "items"),
    [
        ([VIDEO, VIDEO, AUDIO], [("audio", 0, 1), ("video", 0, 2)]),
        ([TEXT, AUDIO, AUDIO, VIDEO, TEXT], [("video", 0, 1), ("audio", 0, 2)]),
        ([VIDEO, AUDIO, VIDEO, AUDIO, AUDIO], [("audio", 0, 3), ("video", 0, 2)]),
        ([IMAGE, VIDEO, TEXT, AUDIO, VIDEO, VIDEO], [("image", 0, 1), ("audio", 0, 1), ("video", 0, 3)]),
        # Two requests: a video without its beginning, and audio before a video.
        ([AUDIO, VIDEO, TEXT, AUDIO, VIDEO], [("video", 0, 1), ("audio", 0, 1), ("audio", 1, 1), ("video", 1, 1)]),
    ],
)
def test_every_token_gets_its_embedding(tokens: list[int], items: list[tuple[str, int, int]]) -> None:
    ids = torch.tensor(tokens)
    is_multimodal = ids != TEXT
    ordered = in_token_order(ids, [item(*given) for given in items], is_multimodal, TOKEN_IDS)
    assert ordered is not None
    expected = torch.tensor([VALUES[t] + tokens[:i].count(t) for i, t in enumerate(tokens) if t != TEXT])
    assert torch.equal(torch.cat(list(ordered)).flatten(), expected)
    runs = [name for name, rows in zip(get_mm_embedding_modalities(list(ordered)), ordered, strict=True) for _ in rows]
    assert [TOKEN_IDS[name] for name in runs] == [t for t in tokens if t != TEXT]


def test_generated_ids_are_no_placeholders() -> None:
    ids = torch.tensor([AUDIO, VIDEO, AUDIO])
    given = [item("video", 0, 1), item("audio", 0, 1)]
    ordered = in_token_order(ids, given, torch.tensor([False, True, True]), TOKEN_IDS)
    assert ordered is not None
    assert torch.cat(list(ordered)).flatten().tolist() == [300.0, 100.0]


def test_without_audio_and_video_nothing_changes() -> None:
    ids = torch.tensor([IMAGE, AUDIO])
    given = [item("image", 0, 1), item("audio", 0, 1)]
    assert in_token_order(ids, given, torch.tensor([True, True]), TOKEN_IDS) is given
    assert in_token_order(ids, None, None, TOKEN_IDS) is None
