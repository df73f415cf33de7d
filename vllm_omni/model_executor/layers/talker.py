# SPDX-License-Identifier: Apache-2.0
"""What talkers share: vLLM's interface of a model that predicts codes, and their feedback.

A step of a talker reads what it has made last. In some models it reads the sum of that and of the next row of the text
that it speaks, which may arrive while it speaks (`TextFeedback`); in others the whole text is in the prompt
(`WholePromptFeedback`). This file knows no model and no engine.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sampling_params import SamplingParams
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.feedback import FedBack, FedBackRows, FeedbackStrategy, InputPiece
from vllm_omni.model_executor.feedback_buffers import SlotRows
from vllm_omni.model_executor.layers.frame_loop import FrameLoop, FrameMemory
from vllm_omni.model_executor.layers.residual_codes import ResidualFilter
from vllm_omni.model_executor.sound_cache import SoundCache

TEXT_ROWS = 2048
"""Rows of text for which a talker has memory from the start, for each request of a step: ten minutes of speech."""

NUM_SPECIALS = 1024
"""The last ids of Qwen3's codec vocabularies: marks, languages and voices."""


def find_specials(vocab_size: int, end_id: int) -> torch.Tensor:
    """`[vocab_size]` bool: what is never sampled of a codec vocabulary of Qwen3's, the specials without the end."""
    ids = torch.arange(vocab_size)
    return (ids >= vocab_size - NUM_SPECIALS) & (ids != end_id)


class Talker(nn.Module):
    """
    Attributes:
        model: The decoder layers.
    """

    model: Any

    def add_codec_head(self, vllm_config: VllmConfig, config: Any, prefix: str, suppressed: torch.Tensor) -> None:
        """
        Args:
            config: Has the head's `vocab_size` and `hidden_size`.
            suppressed: `[N]` bool, of the ids that the sampler counts with: those that are never sampled.
        """
        self.codec_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "codec_head"),
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.suppressed: torch.Tensor
        self.register_buffer("suppressed", suppressed, persistent=False)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The decoder's own embeddings; vLLM requires them, and the strategy overwrites the rows."""
        return self.model.embed_input_ids(input_ids)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.codec_head, hidden_states)

    def suppressed_tokens(self) -> torch.Tensor:
        """See `SupportsSuppressedTokens`."""
        return self.suppressed

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)


class EncodingTalker(Talker):
    """A talker with an encoder of the sounds of prompts, which loads its own weights.

    Attributes:
        encoder_name: The attribute that has it (a checkpoint may have none), and the prefix of its weights' names.
    """

    encoder_name: ClassVar[str] = "codec"
    hf_to_vllm_mapper: ClassVar[WeightsMapper]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        prefix = f"{self.encoder_name}."
        taken: dict[str, torch.Tensor] = {}
        others = _take_out(self.hf_to_vllm_mapper.apply(weights), prefix, taken)
        loaded = AutoWeightsLoader(self).load_weights(self.split_weights(others))
        if (encoder := getattr(self, self.encoder_name, None)) is not None:
            loaded |= {prefix + name for name in encoder.load(taken)}
        return loaded

    def split_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """The weights but for the encoder's, under the names and in the parts that the model has."""
        return weights


def _take_out(
    weights: Iterable[tuple[str, torch.Tensor]], prefix: str, taken: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights without those of this prefix, which are put into `taken`."""
    for name, tensor in weights:
        if name.startswith(prefix):
            taken[name.removeprefix(prefix)] = tensor
        else:
            yield name, tensor


class TextFeedback(FeedbackStrategy):
    """Keeps each request's prompt, and the rows of its text, one for each token that is fed back.

    Later pieces of a request's input have more text, or none. The end of the text follows its last row, and then
    padding.
    """

    text_key: ClassVar[str]
    """The text in a piece's information, `[n, ...]`."""

    def __init__(self, text_end: torch.Tensor, text_pad: torch.Tensor, max_batch_size: int) -> None:
        """
        Args:
            text_end: `[n, hidden]`, rows that follow the text.
            text_pad: `[hidden]`, the row that follows these, for ever.
        """
        self._prompts: dict[int, torch.Tensor] = {}
        self._text = SlotRows(max_batch_size, TEXT_ROWS, text_pad)
        self._text_end = text_end

    @abstractmethod
    def embed_text(self, text: torch.Tensor) -> torch.Tensor:
        """`[n, ...]` of `text_key`, on any device -> `[n, hidden]`."""

    def extend(self, pieces: list[InputPiece]) -> None:
        received = [piece.information.get(self.text_key) for piece in pieces]
        sizes = [0 if text is None else len(text) for text in received]
        if any(sizes):
            rows = self.embed_text(torch.cat([text for text in received if text is not None]))
        else:
            rows = self._text_end[:0]
        parts = zip(pieces, rows.split(sizes), strict=True)
        self._text.extend([(piece.slot, self._with_end(part, piece.is_last)) for piece, part in parts])

    def end(self, slot: int) -> None:
        self._prompts.pop(slot, None)
        self._text.free(slot)

    @property
    def buffer_bytes(self) -> int:
        return self._text.nbytes

    def prompt_rows(self, slot: int, start: int, stop: int) -> torch.Tensor:
        return self._prompts[slot][start:stop]

    def set_input(self, slot: int, prompt: torch.Tensor, text: torch.Tensor, is_complete: bool) -> None:
        """What a request starts with.

        Args:
            prompt: `[prompt_len, hidden]`.
            text: `[n, hidden]`, the rows of the text after those in the prompt.
        """
        self._text.begin(slot)
        self._text.append(slot, self._with_end(text, is_complete))
        self._prompts[slot] = prompt

    def _with_end(self, rows: torch.Tensor, is_last: bool) -> torch.Tensor:
        return torch.cat((rows, self._text_end)) if is_last else rows


class FrameFeedback(TextFeedback):
    """Keeps the frames of each request as well. Emits `codes`, int64 `[num_codes]` for each row."""

    def __init__(
        self,
        codec_embedding: nn.Module,
        frames: FrameLoop,
        text_end: torch.Tensor,
        text_pad: torch.Tensor,
        max_batch_size: int,
    ) -> None:
        """
        Args:
            codec_embedding: Of first codes, `[N]` ids -> `[N, hidden]`.
        """
        super().__init__(text_end, text_pad, max_batch_size)
        self._codec_embedding = codec_embedding
        self._frames = frames

    def end(self, slot: int) -> None:
        super().end(slot)
        self._frames.end(slot)

    @property
    def buffer_bytes(self) -> int:
        return super().buffer_bytes + self._frames.buffer_bytes

    def feed_back(self, rows: FedBackRows) -> FedBack:
        first = self._codec_embedding(rows.token_ids)
        codes, residual = self._frames.make(rows, first)
        return self._with_text(rows, first + residual, codes)

    def replay(self, rows: FedBackRows) -> FedBack:
        codes, residual = self._frames.read(rows)
        return self._with_text(rows, self._codec_embedding(codes[:, 0]) + residual, codes)

    def _with_text(self, rows: FedBackRows, frame_embeds: torch.Tensor, codes: torch.Tensor) -> FedBack:
        return FedBack(frame_embeds + self._text.read(rows.slots, rows.frames), {"codes": codes})

    def save_hidden_states(self, slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        self._frames.save_hidden_states(slots, hidden_states)


class WholePromptFeedback(FeedbackStrategy):
    """Keeps each request's prompt, which is complete when it arrives, its frames, and the encoded sounds of prompts."""

    sound_cache: SoundCache

    def __init__(self, frames: FrameMemory) -> None:
        self._frames = frames
        self._prompts: dict[int, torch.Tensor] = {}
        self.sound_cache = SoundCache()

    def set_input(self, slot: int, prompt: torch.Tensor, params: SamplingParams) -> None:
        """What a request starts with.

        Args:
            prompt: `[prompt_len, hidden]`.
            params: Also those of residual codes.
        """
        self._frames.begin(slot, params, ResidualFilter.from_params(params))
        self._prompts[slot] = prompt

    def extend(self, pieces: list[InputPiece]) -> None:
        """No prompt has later pieces."""

    def end(self, slot: int) -> None:
        self._prompts.pop(slot, None)
        self._frames.end(slot)

    @property
    def buffer_bytes(self) -> int:
        return self._frames.buffer_bytes

    def prompt_rows(self, slot: int, start: int, stop: int) -> torch.Tensor:
        return self._prompts[slot][start:stop]

    def save_hidden_states(self, slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        self._frames.save_hidden_states(slots, hidden_states)
