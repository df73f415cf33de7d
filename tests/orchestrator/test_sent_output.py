# SPDX-License-Identifier: Apache-2.0
"""What a caller has of a stream is left out of an output that is made again, however it is cut into pieces."""

import random
from typing import Any

import pytest
import torch

from vllm_omni.orchestrator.request import RepetitionError, SentOutput
from vllm_omni.outputs import Completion, StageOutput, merge_stage_outputs

TEXTS = {0: "Rot, grün und blau: 赤、緑、青。", 1: "zwei"}
AUDIO = torch.sin(torch.arange(600, dtype=torch.float32)).reshape(2, 300)
ROWS = torch.arange(15, dtype=torch.bfloat16).reshape(5, 3)


def pieces_of(seed: int) -> list[StageOutput]:
    """One output, cut at random places."""
    dice = random.Random(seed)
    sizes = {"audio": 300, "hidden": 5, "0": len(TEXTS[0]), "1": len(TEXTS[1])}
    places = {name: sorted(dice.choices(range(size + 1), k=4)) for name, size in sizes.items()}

    def part(name: str, i: int) -> slice:
        ends = [0, *places[name], sizes[name]]
        return slice(ends[i], ends[i + 1])

    pieces = []
    for i in range(5):
        completions = []
        for index, text in TEXTS.items():
            cut = part(str(index), i)
            tokens = [ord(letter) for letter in text[cut]]
            reason = "stop" if i == 4 else None
            completions.append(Completion(index=index, text=text[cut], token_ids=tokens, finish_reason=reason))
        tensors = {"audio": AUDIO[:, part("audio", i)], "hidden": ROWS[part("hidden", i)]}
        pieces.append(
            StageOutput(
                request_id="r", stage_id=0, completions=completions, tensors=tensors, is_last=i == 4,
                num_cached_tokens=3 if i == 0 else None,
            )
        )  # fmt: skip
    return pieces


def assert_whole(received: list[StageOutput]) -> None:
    whole = merge_stage_outputs(received)
    assert {each.index: each.text for each in whole.completions} == TEXTS
    assert {each.index: "".join(map(chr, each.token_ids)) for each in whole.completions} == TEXTS
    assert torch.equal(whole.tensors["audio"], AUDIO) and torch.equal(whole.tensors["hidden"], ROWS)
    assert [piece.is_last for piece in received].count(True) == 1 and received[-1].is_last
    assert [piece.num_cached_tokens for piece in received if piece.num_cached_tokens is not None] == [3]


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_that_is_made_again_goes_on(seed: int) -> None:
    sent, received = SentOutput(), []
    for num_pieces, each in zip((seed % 6, 5), (seed, seed + 100), strict=True):
        received += [new for piece in pieces_of(each)[:num_pieces] if (new := sent.take_new(piece)) is not None]
        sent.restart()
    assert_whole(received)
    for piece in pieces_of(seed + 200):
        assert sent.take_new(piece) is None, "the caller has all of it"


def other(piece: StageOutput, **fields: Any) -> StageOutput:
    values = {"completions": piece.completions, "tensors": piece.tensors, "is_last": True, **fields}
    return StageOutput(request_id="r", stage_id=0, **values)


def test_another_stream_is_not_taken_for_it() -> None:
    whole = merge_stage_outputs(pieces_of(0))
    changed = AUDIO.clone()
    changed[1, 128] += 1.0
    texts = [Completion(index=0, text=TEXTS[0].lower(), token_ids=whole.completions[0].token_ids)]
    tokens = [Completion(index=0, text=TEXTS[0], token_ids=[0] * len(TEXTS[0]))]
    shorter = {**whole.tensors, "audio": AUDIO[:, :200]}
    for fields in (
        {"tensors": {"audio": changed}},
        {"completions": texts},
        {"completions": tokens},
        {"tensors": shorter},
    ):
        sent = SentOutput()
        sent.take_new(whole)
        sent.restart()
        with pytest.raises(RepetitionError):
            sent.take_new(other(whole, **fields))


def test_rounding_is_no_other_stream() -> None:
    whole = merge_stage_outputs(pieces_of(0))
    sent = SentOutput()
    sent.take_new(other(whole, tensors={"audio": AUDIO[:, :200]}, is_last=False))
    sent.restart()
    new = sent.take_new(other(whole, tensors={"audio": AUDIO + 1e-6}))
    assert new is not None and torch.equal(new.tensors["audio"], AUDIO[:, 200:] + 1e-6)


def test_steps_and_media_are_sent_once() -> None:
    def step(number: int) -> StageOutput:
        return StageOutput(request_id="r", stage_id=0, step=number, num_steps=4, is_last=False)

    data = {"output_type": "image", "output_format": "np"}
    image = StageOutput(request_id="r", stage_id=0, tensors={"image": torch.zeros(1, 4, 4, 3)}, data=data)
    sent = SentOutput()
    assert sent.take_new(step(0)) and sent.take_new(step(1))
    sent.restart()
    assert sent.take_new(step(0)) is None and sent.take_new(step(1)) is None
    assert sent.take_new(step(2)) is not None
    assert sent.take_new(image) is not None
    sent.restart()
    assert sent.take_new(step(2)) is None and sent.take_new(image) is None
