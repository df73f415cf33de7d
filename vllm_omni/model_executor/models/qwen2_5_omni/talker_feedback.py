# SPDX-License-Identifier: Apache-2.0
"""What each step of the talker reads: the token that it has just said, and the next row of the thinker's reply.

The reference projects their sum. A projection of a sum is the sum of projections, so that here every codec token is
projected once, when the weights are loaded, every row of text once, when it arrives, and a step is two look-ups and
an addition, for all requests at once.
Reference: `Qwen2_5OmniTalkerForConditionalGeneration.forward` of HF transformers.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm.sampling_params import SamplingParams

from vllm_omni.model_executor.feedback import FedBack, FedBackRows, FeedbackStrategy, InputPiece
from vllm_omni.model_executor.feedback_buffers import SlotRows

PROMPT_ROWS = "prompt_rows"
REPLY_ROWS = "reply_rows"
SPEAKER = "speaker"


class TalkerFeedback(FeedbackStrategy):
    """A request's information: `prompt_rows` `[P, thinker_hidden]`, `reply_rows` `[at least 1, thinker_hidden]`, and
    `speaker`, a voice's name in lower case. Its prompt is as long as the thinker's and two rows more: the voice, and
    the first row of the reply. Later pieces bring more `reply_rows`. After the last one comes the end of the text, and
    then padding for as long as it takes."""

    def __init__(
        self,
        projection: nn.Linear,
        codec_embeds: torch.Tensor,
        prompt_codec_ids: tuple[int, int],
        text_end: torch.Tensor,
        text_pad: torch.Tensor,
        voices: dict[str, torch.Tensor],
        max_batch_size: int,
    ) -> None:
        """
        Args:
            projection: From the thinker's width to the talker's.
            codec_embeds: `[codec vocabulary, thinker_hidden]`.
            prompt_codec_ids: Tokens above the last two rows of the prompt.
            text_end, text_pad: `[thinker_hidden]`, what follows the reply.
            voices: `[thinker_hidden]` by name.
        """
        self._projection = projection
        self._codec = functional.linear(codec_embeds, projection.weight)  # [codec vocabulary, hidden]; no bias here
        self._prompt_codec = self._codec[list(prompt_codec_ids)]
        self._voices = voices
        end, pad = projection(torch.stack((text_end, text_pad)))
        self._text_end = end[None]
        self._text = SlotRows(max_batch_size, padding=pad)
        self._prompts: dict[int, torch.Tensor] = {}

    def begin(self, slot: int, information: dict[str, Any], params: SamplingParams, is_input_complete: bool) -> None:
        first, later = self._to_device(information[REPLY_ROWS]).tensor_split((1,))
        voice = self._voices[information[SPEAKER]][None]
        prompt = self._projection(torch.cat((self._to_device(information[PROMPT_ROWS]), voice, first)))
        prompt[-2:] += self._prompt_codec
        self._prompts[slot] = prompt
        self._text.begin(slot)
        self._append(slot, self._projection(later), is_input_complete)

    def extend(self, pieces: list[InputPiece]) -> None:
        rows = [piece.information[REPLY_ROWS] for piece in pieces if piece.information]
        projected = self._projection(self._to_device(torch.cat(rows))) if rows else self._codec[:0]
        start = 0
        for piece in pieces:
            stop = start + (piece.information[REPLY_ROWS].shape[0] if piece.information else 0)
            self._append(piece.slot, projected[start:stop], piece.is_last)
            start = stop

    def end(self, slot: int) -> None:
        self._prompts.pop(slot, None)

    def prompt_rows(self, slot: int, start: int, stop: int) -> torch.Tensor:
        return self._prompts[slot][start:stop]

    def feed_back(self, rows: FedBackRows) -> FedBack:
        return FedBack(embeds=self._codec[rows.token_ids] + self._text.read(rows.slots, rows.frames), outputs={})

    def replay(self, rows: FedBackRows) -> FedBack:
        return self.feed_back(rows)

    def remember(self, slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """What comes next depends on tokens alone."""

    def _append(self, slot: int, projected: torch.Tensor, is_last: bool) -> None:
        self._text.append(slot, projected)
        if is_last:
            self._text.append(slot, self._text_end)

    def _to_device(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self._codec, non_blocking=True)
