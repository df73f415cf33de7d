# SPDX-License-Identifier: Apache-2.0
"""What each step of the talker reads: the token that it has just sampled, and the next row of the thinker's reply.

The reference projects their sum. A projection of a sum is the sum of projections, so every codec token is projected
once, when the weights are loaded, every row of text once, when it arrives, and a step is two look-ups and an addition,
for all requests at once.
Reference: `Qwen2_5OmniTalkerForConditionalGeneration.forward` of HF transformers.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm.sampling_params import SamplingParams

from vllm_omni.model_executor.feedback import FedBack, FedBackRows
from vllm_omni.model_executor.models.qwen_omni.stage_input_processors import REPLY_ROWS
from vllm_omni.model_executor.models.qwen_omni.talker import QwenOmniTalkerFeedback

PROMPT_ROWS = "prompt_rows"
SPEAKER = "speaker"


class TalkerFeedback(QwenOmniTalkerFeedback):
    """A request's information: `prompt_rows` `[P, thinker_hidden]`, `reply_rows` `[at least 1, thinker_hidden]`, and
    `speaker`, a voice's name in lower case. Its prompt is two rows longer than the thinker's: the voice, and the first
    row of the reply."""

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
            prompt_codec_ids: Tokens that are added to the last two rows of the prompt.
            text_end, text_pad: `[thinker_hidden]`, what follows the reply.
            voices: `[thinker_hidden]` by name.
        """
        super().__init__(*projection(torch.stack((text_end, text_pad))), max_batch_size)
        self._projection = projection
        self._codec = functional.linear(codec_embeds, projection.weight)  # [codec vocabulary, hidden]; no bias here
        self._prompt_codec = self._codec[list(prompt_codec_ids)]
        self._voices = voices

    def begin(self, slot: int, information: dict[str, Any], params: SamplingParams, is_input_complete: bool) -> None:
        first, later = self._to_device(information[REPLY_ROWS]).tensor_split((1,))
        voice = self._voices[information[SPEAKER]][None]
        prompt = self._projection(torch.cat((self._to_device(information[PROMPT_ROWS]), voice, first)))
        prompt[-2:] += self._prompt_codec
        self._set_input(slot, prompt, self._projection(later), is_input_complete)

    def project_reply(self, reply_rows: torch.Tensor) -> torch.Tensor:
        return self._projection(self._to_device(reply_rows))

    def feed_back(self, rows: FedBackRows) -> FedBack:
        return FedBack(embeds=self._codec[rows.token_ids] + self._text.read(rows.slots, rows.frames), outputs={})

    def replay(self, rows: FedBackRows) -> FedBack:
        return self.feed_back(rows)

    def save_hidden_states(self, slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """The next input depends on tokens only."""

    def _to_device(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self._codec, non_blocking=True)
