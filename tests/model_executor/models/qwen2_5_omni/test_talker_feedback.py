# SPDX-License-Identifier: Apache-2.0
"""What the talker reads in each step, against the reference's way of computing it, without an engine."""

import pytest
import torch
from torch import nn
from vllm.sampling_params import SamplingParams

from vllm_omni.model_executor.feedback import FedBackRows, InputPiece, RequestInput
from vllm_omni.model_executor.models.qwen2_5_omni.talker import TalkerFeedback

WIDTH, HIDDEN, CODES, PAD, BOS = 12, 8, 20, 16, 17
PARAMS = SamplingParams()


class Reference:
    """The reference's sums, one request at a time."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.projection = nn.Linear(WIDTH, HIDDEN).requires_grad_(False)
        self.codec, self.end, self.pad = (
            torch.randn(*shape, generator=generator) for shape in ((CODES, WIDTH), (WIDTH,), (WIDTH,))
        )
        self.voices = {name: torch.randn(WIDTH, generator=generator) for name in ("a", "b")}

    def strategy(self, max_batch_size: int = 2) -> TalkerFeedback:
        return TalkerFeedback(self.projection, self.codec, (PAD, BOS), self.end, self.pad, self.voices, max_batch_size)

    def prompt(self, prompt: torch.Tensor, reply: torch.Tensor, voice: str) -> torch.Tensor:
        rows = torch.cat((prompt, self.voices[voice][None], reply[:1]))
        rows[-2:] += self.codec[[PAD, BOS]]
        return self.projection(rows)

    def step(self, reply: torch.Tensor, token: int, frame: int) -> torch.Tensor:
        text = [*reply[1:], self.end]
        return self.projection(self.codec[token] + (text[frame] if frame < len(text) else self.pad))


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def information(prompt: torch.Tensor, reply: torch.Tensor, voice: str) -> dict[str, object]:
    return {"prompt_rows": prompt, "reply_rows": reply, "speaker": voice}


def fed_back(tokens: list[int], slots: list[int], frames: list[int]) -> FedBackRows:
    return FedBackRows(*(torch.tensor(values) for values in (tokens, slots, frames)))


def assert_close(ours: torch.Tensor, expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(ours, torch.stack(expected), rtol=0, atol=1e-5)


def test_prompts_end_with_the_voice_and_the_first_token_of_the_reply() -> None:
    reference = Reference()
    strategy = reference.strategy()
    for slot, voice in enumerate(("a", "b")):
        prompt, reply = rows(3 + slot, slot), rows(4, 10 + slot)
        strategy.begin(slot, RequestInput([], information(prompt, reply, voice), PARAMS, True))
        expected = reference.prompt(prompt, reply, voice)
        assert_close(strategy.prompt_rows(slot, 0, len(expected)), [*expected])
        assert_close(strategy.prompt_rows(slot, 1, 3), [*expected[1:3]])


def test_each_token_is_read_with_a_row_of_text_then_the_end_then_padding() -> None:
    reference = Reference()
    strategy = reference.strategy()
    replies = {0: rows(1, 20), 1: rows(5, 21)}
    for slot, reply in replies.items():
        strategy.begin(slot, RequestInput([], information(rows(2, slot), reply, "a"), PARAMS, True))
    for frame in range(8):
        tokens = [frame, CODES - 1 - frame]
        step = fed_back(tokens, [1, 0], [frame, frame])
        expected = [reference.step(replies[slot], token, frame) for slot, token in ((1, tokens[0]), (0, tokens[1]))]
        assert_close(strategy.feed_back(step).embeds, expected)
        assert_close(strategy.replay(step).embeds, expected)


@pytest.mark.parametrize("pieces", [[5], [1, 1, 3], [0, 2, 0, 3, 0]])
def test_text_in_pieces_equals_the_whole_text(pieces: list[int]) -> None:
    reference = Reference()
    strategy = reference.strategy()
    reply, other = rows(6, 30), rows(6, 31)
    for slot, text in enumerate((reply, other)):
        strategy.begin(slot, RequestInput([], information(rows(2, slot), text[:1], "b"), PARAMS, False))
    start = 1
    for index, count in enumerate(pieces):
        more = {"reply_rows": reply[start : start + count]} if count else {}
        arrived = [InputPiece(0, more, is_last=index == len(pieces) - 1)]
        if index == 0:
            arrived.insert(0, InputPiece(1, {"reply_rows": other[1:]}, is_last=True))
        strategy.extend(arrived)
        start += count
    for slot, text in enumerate((reply, other)):
        step = fed_back([3] * 8, [slot] * 8, list(range(8)))
        assert_close(strategy.feed_back(step).embeds, [reference.step(text, 3, frame) for frame in range(8)])


def test_several_pieces_of_one_request_in_one_step() -> None:
    reference = Reference()
    strategy = reference.strategy()
    reply = rows(6, 40)
    strategy.begin(0, RequestInput([], information(rows(2, 0), reply[:2], "a"), PARAMS, False))
    strategy.extend(
        [
            InputPiece(0, {"reply_rows": reply[2:3]}, is_last=False),
            InputPiece(0, {"reply_rows": reply[3:]}, is_last=False),
            InputPiece(0, {}, is_last=True),
        ]
    )
    step = fed_back([1] * 7, [0] * 7, list(range(7)))
    assert_close(strategy.feed_back(step).embeds, [reference.step(reply, 1, frame) for frame in range(7)])


def test_a_slot_keeps_nothing_of_the_request_before() -> None:
    reference = Reference()
    strategy = reference.strategy(max_batch_size=1)
    for slot in range(5):  # beyond the batch size as well
        strategy.begin(slot, RequestInput([], information(rows(2, slot), rows(200, slot), "a"), PARAMS, True))
    strategy.end(3)
    prompt, reply = rows(4, 50), rows(2, 51)
    strategy.begin(3, RequestInput([], information(prompt, reply, "b"), PARAMS, True))
    assert_close(strategy.prompt_rows(3, 0, 6), [*reference.prompt(prompt, reply, "b")])
    step = fed_back([1, 1, 1, 1], [3, 3, 3, 3], [0, 1, 2, 300])
    assert_close(strategy.feed_back(step).embeds, [reference.step(reply, 1, frame) for frame in (0, 1, 2, 300)])
    assert_close(strategy.feed_back(fed_back([2], [4], [150])).embeds, [reference.step(rows(200, 4), 2, 150)])
