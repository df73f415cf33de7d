# SPDX-License-Identifier: Apache-2.0
"""Rows by slot against lists, whatever the order in which slots begin, grow and are read."""

import random
from unittest import mock

import pytest
import torch

from vllm_omni.model_executor.feedback import FedBack, FedBackRows, InputPiece, RequestInput
from vllm_omni.model_executor.feedback_buffers import PAGE_SIZE, SlotBuffer, SlotRows
from vllm_omni.model_executor.layers.talker import TextFeedback

PADDING = torch.tensor([-1.0, -2.0])


def read(rows: SlotBuffer, slots: list[int], indices: list[int]) -> torch.Tensor:
    return rows.read(torch.tensor(slots), torch.tensor(indices))


def test_rows_are_those_of_the_slot_and_padding_beyond_its_end() -> None:
    rows = SlotRows(2, 64, PADDING)
    rows.begin(0)
    rows.begin(1)
    rows.append(0, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert read(rows, [0, 1, 0, 0, 0], [1, 0, 2, 99_999, 0]).tolist() == [[3, 4], [-1, -2], [-1, -2], [-1, -2], [1, 2]]


def test_a_reused_slot_is_empty() -> None:
    rows = SlotRows(1, 64, PADDING)
    rows.begin(0)
    rows.append(0, torch.ones(5, 2))
    rows.begin(0)
    assert rows.size(0) == 0
    assert read(rows, [0, 0], [0, 4]).tolist() == [[-1, -2], [-1, -2]]


def test_any_order_of_growth_gives_what_lists_give() -> None:
    random.seed(0)
    rows, lists = SlotRows(2, 64, PADDING), {}
    for _ in range(400):
        slot = random.randrange(9)
        if slot not in lists or random.random() < 0.05:
            rows.begin(slot)
            lists[slot] = torch.zeros(0, 2)
        new = torch.randn(random.choice([0, 1, 1, 3, 40]), 2)
        rows.append(slot, new)
        lists[slot] = torch.cat((lists[slot], new))
        assert rows.size(slot) == len(lists[slot])
    slots = [random.choice(list(lists)) for _ in range(200)]
    indices = [random.randrange(300) for _ in slots]
    expected = [
        lists[slot][index] if index < len(lists[slot]) else PADDING for slot, index in zip(slots, indices, strict=True)
    ]
    assert torch.equal(read(rows, slots, indices), torch.stack(expected))


def test_rows_survive_growth() -> None:
    buffer = SlotBuffer((3,), 2, 8, dtype=torch.int64, device="cpu")
    buffer.reserve(1, 10)
    buffer.write(torch.tensor([1, 0]), torch.tensor([9, 0]), torch.tensor([[1, 2, 3], [4, 5, 6]]))
    buffer.reserve(7, 1000)
    buffer.write(torch.tensor([7]), torch.tensor([999]), torch.tensor([[7, 8, 9]]))
    assert read(buffer, [7, 1, 0], [999, 9, 0]).tolist() == [[7, 8, 9], [1, 2, 3], [4, 5, 6]]


def test_memory_is_allocated_once_and_used_again() -> None:
    """Whatever comes and goes, while all together hold no more than the slots' shares."""
    random.seed(1)
    buffer = SlotBuffer((2,), 4, 2 * PAGE_SIZE, dtype=torch.float32, device="cpu")
    memory, size = buffer._rows.data_ptr(), buffer.nbytes
    assert size == 4 * 2 * PAGE_SIZE * 2 * 4 and buffer.num_free_pages == 8
    for _ in range(200):
        buffer.reserve(0, random.randrange(1, 6 * PAGE_SIZE))  # three times its share
        buffer.reserve(5, random.randrange(1, 2 * PAGE_SIZE))
        for slot in random.sample([0, 5], 2):
            buffer.free(slot)
        assert buffer.num_free_pages == 8
    assert (buffer._rows.data_ptr(), buffer.nbytes) == (memory, size)


def test_slots_never_share_a_page() -> None:
    random.seed(2)
    buffer = SlotBuffer((1,), 2, PAGE_SIZE, dtype=torch.int64, device="cpu")
    capacities: dict[int, int] = {}
    for step in range(300):
        slot = random.randrange(6)
        if random.random() < 0.3:
            buffer.free(slot)
            capacities.pop(slot, None)
            continue
        new = random.randrange(1, 5 * PAGE_SIZE)
        if new > capacities.get(slot, 0):
            buffer.reserve(slot, new)
            capacities[slot] = new
            buffer.write(torch.full((new,), slot), torch.arange(new), torch.full((new, 1), 1000 * slot + step))
        for held, capacity in capacities.items():
            values = buffer.read(torch.full((capacity,), held), torch.arange(capacity)).unique().tolist()
            assert len(values) == 1 and values[0] // 1000 == held


class Text(TextFeedback):
    """A talker that only keeps its text, of rows of two."""

    text_key = "text"

    def __init__(self) -> None:
        super().__init__(torch.full((1, 2), 9.0), PADDING, max_batch_size=2)

    def embed_text(self, text: torch.Tensor) -> torch.Tensor:
        return text

    def begin(self, slot: int, request: RequestInput) -> None:
        self.set_input(slot, torch.zeros(1, 2), request.information["text"], request.is_complete)

    def feed_back(self, rows: FedBackRows) -> FedBack:
        return FedBack(self._text.read(rows.slots, rows.frames), {})

    replay = feed_back

    def save_hidden_states(self, slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        pass

    def text_of(self, slot: int, size: int) -> list[float]:
        rows = FedBackRows(torch.zeros(size), torch.full((size,), slot), torch.arange(size))
        return self.feed_back(rows).embeds[:, 0].tolist()


def test_an_ended_request_gives_its_memory_back() -> None:
    talker = Text()
    free = talker._text.num_free_pages
    talker.begin(0, RequestInput([1], {"text": torch.ones(1000, 2)}, mock.Mock(), False))
    assert talker._text.num_free_pages < free
    talker.end(0)
    assert talker._text.num_free_pages == free


def test_pieces_that_come_again_after_a_lack_of_memory_are_there_once() -> None:
    """Some slots had room, another had not: the step is repeated with the same pieces."""
    talker = Text()
    for slot in (0, 1):
        talker.begin(slot, RequestInput([1], {"text": torch.full((1, 2), float(slot))}, mock.Mock(), False))
    pieces = [
        InputPiece(0, {"text": torch.full((2, 2), 3.0)}, False),
        InputPiece(0, {"text": torch.full((1, 2), 4.0)}, True),
        InputPiece(1, {"text": torch.full((200, 2), 5.0)}, True),
    ]
    reserve = SlotBuffer.reserve

    def reserve_little(self: SlotBuffer, slot: int, capacity: int) -> None:
        if capacity > PAGE_SIZE:
            raise torch.OutOfMemoryError("no memory")
        reserve(self, slot, capacity)

    with mock.patch.object(SlotBuffer, "reserve", reserve_little), pytest.raises(torch.OutOfMemoryError):
        talker.extend(pieces)
    assert talker.text_of(0, 3) == [0, -1, -1]
    talker.extend(pieces)
    assert talker.text_of(0, 7) == [0, 3, 3, 4, 9, -1, -1]
    assert talker.text_of(1, 204) == [1, *[5] * 200, 9, -1, -1]
