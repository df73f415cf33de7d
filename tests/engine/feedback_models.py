# SPDX-License-Identifier: Apache-2.0
"""A model that feeds back what it has made, small enough to recompute by hand. It runs on the tiny Qwen3 checkpoint."""

import torch
from torch import nn
from vllm import ModelRegistry
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from vllm_omni.model_executor.feedback import FedBack, FedBackRows, FeedbackStrategy, InputPiece, RequestInput
from vllm_omni.model_executor.feedback_buffers import SlotBuffer, SlotRows, with_room_for

ECHO = 0.1
"""How much of the last hidden state is added to a row that is fed back."""


class EchoStrategy(FeedbackStrategy):
    """A row that is fed back: its token's embedding, an echo of the last state, a row of the feed, and a draw.

    A request brings its prompt's rows as `prompt` `[P, hidden]`, and rows of its feed as `feed` `[n, hidden]`, zeros
    beyond its end. Emits the draw, `[1]`, by which it can be computed again. `refuse`: the request is not taken;
    `raise_at`: this frame raises; `last_frame`: the request ends with it; `first`: emitted before the draws.
    """

    def __init__(self, embedding: nn.Module, hidden_size: int, max_batch_size: int) -> None:
        self.embedding = embedding
        self.prompts: dict[int, torch.Tensor] = {}
        self.raise_at: dict[tuple[int, int], str] = {}
        self.feed = SlotRows(max_batch_size, 64, torch.zeros(hidden_size))
        self.draws = SlotBuffer((1,), max_batch_size, 64, dtype=torch.float32, device="cpu")
        self.echoes = SlotBuffer((hidden_size,), max_batch_size, 64, dtype=torch.float32, device="cpu")
        self.last = torch.zeros(max_batch_size, hidden_size)
        self.first: dict[int, torch.Tensor] = {}
        self.last_frames = torch.zeros(max_batch_size, dtype=torch.int64)
        self.calls: list[tuple[str, int]] = []  # by name, with the number of rows or pieces

    def begin(self, slot: int, request: RequestInput) -> None:
        information = request.information
        if information.get("refuse"):
            raise RuntimeError("told to refuse")
        assert slot not in self.prompts
        self.prompts[slot] = information["prompt"]
        self.feed.begin(slot)
        self.feed.append(slot, information.get("feed", torch.zeros(0, self.last.shape[1])))
        for buffer in (self.draws, self.echoes):
            buffer.reserve(slot, request.params.max_tokens or 1)
        self.last = with_room_for(self.last, slot)
        self.raise_at = {place: text for place, text in self.raise_at.items() if place[0] != slot}
        self.first[slot] = information.get("first", torch.zeros(0, 1))
        self.last_frames = with_room_for(self.last_frames, slot)
        self.last_frames[slot] = information.get("last_frame", -1)
        if "raise_at" in information:
            self.raise_at[slot, information["raise_at"]] = f"told to raise at {information['raise_at']}"

    @property
    def buffer_bytes(self) -> int:
        return self.feed.nbytes + self.draws.nbytes + self.echoes.nbytes

    def extend(self, pieces: list[InputPiece]) -> None:
        self.calls.append(("extend", len(pieces)))
        nothing = torch.zeros(0, self.last.shape[1])
        self.feed.extend([(piece.slot, piece.information.get("feed", nothing)) for piece in pieces])

    def end(self, slot: int) -> None:
        del self.prompts[slot]
        for buffer in (self.feed, self.draws, self.echoes):
            buffer.free(slot)

    def prompt_rows(self, slot: int, start: int, stop: int) -> torch.Tensor:
        return self.prompts[slot][start:stop]

    def first_outputs(self, slot: int) -> dict[str, torch.Tensor]:
        return {"draw": self.first[slot]} if len(self.first[slot]) else {}

    def feed_back(self, rows: FedBackRows) -> FedBack:
        self.calls.append(("feed_back", len(rows.slots)))
        for place in zip(rows.slots.tolist(), rows.frames.tolist(), strict=True):
            if place in self.raise_at:
                raise RuntimeError(self.raise_at[place])
        draw = torch.rand(len(rows.slots), 1)
        self.draws.write(rows.slots, rows.frames, draw)
        echo = ECHO * self.last[rows.slots]
        self.echoes.write(rows.slots, rows.frames, echo)
        return self._as_rows(rows, echo, draw)

    def replay(self, rows: FedBackRows) -> FedBack:
        self.calls.append(("replay", len(rows.slots)))
        return self._as_rows(rows, self.echoes.read(rows.slots, rows.frames), self.draws.read(rows.slots, rows.frames))

    def save_hidden_states(self, slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        self.last[slots] = hidden_states

    def _as_rows(self, rows: FedBackRows, echo: torch.Tensor, draw: torch.Tensor) -> FedBack:
        embeds = self.embedding(rows.token_ids) + echo + self.feed.read(rows.slots, rows.frames)
        return FedBack(embeds + ECHO * draw, {"draw": draw}, rows.frames == self.last_frames[rows.slots])


class EchoQwen3(Qwen3ForCausalLM):
    """Qwen3 with `EchoStrategy`."""

    def make_feedback_strategy(self, max_batch_size: int) -> EchoStrategy:
        return EchoStrategy(self.model.embed_tokens, self.config.hidden_size, max_batch_size)


def register() -> None:
    """A class instead of a name, so that vLLM need not start a process to look at it."""
    ModelRegistry.register_model("EchoQwen3", EchoQwen3)
