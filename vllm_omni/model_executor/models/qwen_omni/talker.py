# SPDX-License-Identifier: Apache-2.0
"""The bases of both talkers and of their feedback: vLLM's model interface, and the text rows that each step reads."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.feedback import FeedbackStrategy, InputPiece
from vllm_omni.model_executor.feedback_buffers import SlotRows
from vllm_omni.model_executor.models.qwen_omni.stage_input_processors import REPLY_ROWS

THINKER_EMBEDDING = "thinker.model.embed_tokens.weight"


class QwenOmniTalker(nn.Module, SupportsMRoPE):
    """
    Attributes:
        model: The decoder layers.
    """

    hf_to_vllm_mapper: ClassVar[WeightsMapper]
    model: Any

    def add_codec_head(self, vllm_config: VllmConfig, config: Any, prefix: str, suppressed: torch.Tensor) -> None:
        """
        Args:
            config: Has the head's `vocab_size` and `hidden_size`.
            suppressed: `[vocab_size]` bool, ids that are never sampled.
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

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = self.logits_processor(self.codec_head, hidden_states)
        return None if logits is None else logits.masked_fill_(self.suppressed, float("-inf"))

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """Linear positions; the stage input processor sends others with its prompts."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """vLLM's loader skips files that hold only other stages' weights."""
        return not name.startswith("talker.") and name != THINKER_EMBEDDING

    def load_with_thinker_embeds(
        self, weights: Iterable[tuple[str, torch.Tensor]], token_ids: list[int]
    ) -> tuple[set[str], torch.Tensor]:
        """The names of the parameters that were loaded, and `[len(token_ids), thinker_hidden]`, the thinker's
        embeddings of these tokens, which are in the same checkpoint.

        Raises:
            ValueError: The checkpoint has no thinker embedding.
        """
        embeds: list[torch.Tensor] = []

        def take_embeds() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name == THINKER_EMBEDDING:
                    embeds.append(tensor[token_ids].clone())
                else:
                    yield name, tensor

        loaded = AutoWeightsLoader(self).load_weights(take_embeds(), mapper=self.hf_to_vllm_mapper)
        if not embeds:
            raise ValueError(f"the checkpoint has no {THINKER_EMBEDDING!r}, which the talker's prompt needs")
        return loaded, embeds[-1]


class QwenOmniTalkerFeedback(FeedbackStrategy):
    """Keeps each request's prompt, and the text rows of the reply, one for each token that is fed back.

    Later pieces of a request's input have `reply_rows`, `[n, thinker_hidden]`, or none. The end of the text follows the
    reply's last row, and then padding.
    """

    def __init__(self, text_end: torch.Tensor, text_pad: torch.Tensor, max_batch_size: int) -> None:
        """
        Args:
            text_end, text_pad: `[hidden]`, what follows the reply.
        """
        self._prompts: dict[int, torch.Tensor] = {}
        self._text = SlotRows(max_batch_size, text_pad)
        self._text_end = text_end[None]

    @abstractmethod
    def project_reply(self, reply_rows: torch.Tensor) -> torch.Tensor:
        """`[n, thinker_hidden]` on any device -> `[n, hidden]`."""

    def extend(self, pieces: list[InputPiece]) -> None:
        received = [piece.information.get(REPLY_ROWS) for piece in pieces]
        sizes = [0 if rows is None else len(rows) for rows in received]
        if any(sizes):
            projected = self.project_reply(torch.cat([rows for rows in received if rows is not None]))
        else:
            projected = self._text_end[:0]
        for piece, part in zip(pieces, projected.split(sizes), strict=True):
            self._append(piece.slot, part, piece.is_last)

    def end(self, slot: int) -> None:
        self._prompts.pop(slot, None)

    def prompt_rows(self, slot: int, start: int, stop: int) -> torch.Tensor:
        return self._prompts[slot][start:stop]

    def _set_input(self, slot: int, prompt: torch.Tensor, text: torch.Tensor, is_complete: bool) -> None:
        """
        Args:
            prompt: `[prompt_len, hidden]`.
            text: `[n, hidden]`, the reply's rows after those in the prompt.
        """
        self._prompts[slot] = prompt
        self._text.begin(slot)
        self._append(slot, text, is_complete)

    def _append(self, slot: int, rows: torch.Tensor, is_last: bool) -> None:
        self._text.append(slot, torch.cat((rows, self._text_end)) if is_last else rows)
