# SPDX-License-Identifier: Apache-2.0
"""The talker's inputs that come from text: its prompt, and the text rows of its later steps.

Reference: `_get_talker_user_parts` and `_get_talker_assistant_parts` of HF transformers' Qwen3-Omni.
This file knows no engine; its input tells apart the thinker's rows of the user and of the reply.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerResizeMLP

NUM_TAIL_ROWS = 9
"""Rows that follow the user's part of the prompt: the reply's header, control codes and its first token."""

NUM_HEADER_ROWS = 3
"""Rows of the reply's header: `<|im_start|>`, `assistant`, newline."""


@dataclass(frozen=True, slots=True)
class ThinkerRows:
    """The thinker's rows for one request, in the request's additional information.

    Attributes:
        user_rows: `[users, thinker_hidden]`, the rows of all user turns in order.
        user_is_placeholder: `[users]` bool, rows that are states of a media placeholder.
        reply_rows: `[replies, thinker_hidden]`, from the last `<|im_start|>assistant` to the last token
            but one; at least 4.
        speaker_id: Codec id of the voice.
    """

    user_rows: torch.Tensor
    user_is_placeholder: torch.Tensor
    reply_rows: torch.Tensor
    speaker_id: int

    def to_information(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def pop_from(cls, information: dict[str, Any]) -> "ThinkerRows":
        """Takes the fields out of a request's additional information; KeyError names what is missing."""
        return cls(**{field.name: information.pop(field.name) for field in fields(cls)})


class TalkerPromptBuilder(nn.Module):
    """Projects the thinker's rows into the talker's space and builds its prompt."""

    def __init__(self, config: Qwen3OmniMoeTalkerConfig) -> None:
        """
        Args:
            config: The checkpoint's `talker_config`.
        """
        super().__init__()
        self.config = config
        self.text_projection = Qwen3OmniMoeTalkerResizeMLP(config)
        self.hidden_projection = Qwen3OmniMoeTalkerResizeMLP(config)
        hidden_size = self.text_projection.linear_fc2.out_features
        self.control: torch.Tensor  # bos, eos, pad
        self.register_buffer("control", torch.zeros(3, hidden_size), persistent=False)

    @property
    def tts_eos(self) -> torch.Tensor:
        """`[hidden]`, the text row after the last one of the reply."""
        return self.control[1]

    @property
    def tts_pad(self) -> torch.Tensor:
        """`[hidden]`, the text row of frames after the end of the text."""
        return self.control[2]

    def set_control_embeds(self, embeds: torch.Tensor) -> None:
        """Sets the thinker's embeddings of `tts_bos`, `tts_eos` and `tts_pad`, `[3, thinker_hidden]`."""
        weight = self.text_projection.linear_fc1.weight
        with torch.no_grad():
            self.control.copy_(self.text_projection(embeds.to(weight)))

    def forward(self, rows: ThinkerRows, codec_embedding: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Returns:
            `[users + NUM_TAIL_ROWS, hidden]`, the input embeddings of the prompt; and `[frames, hidden]`, the text rows
            received so far, each for the input of one frame. When the reply is complete, the end of the text follows,
            and then padding.
        """
        bos, pad = self.control[:1], self.control[2:]
        reply = self.project_reply(rows.reply_rows)
        header, first = reply[:NUM_HEADER_ROWS], reply[NUM_HEADER_ROWS : NUM_HEADER_ROWS + 1]
        tail = torch.cat((header, pad.expand(4, -1), bos, first))
        tail[NUM_HEADER_ROWS:] += codec_embedding(self._control_codes(rows.speaker_id))
        return torch.cat((self._project_user(rows), tail)), reply[NUM_HEADER_ROWS + 1 :]

    def project_reply(self, reply_rows: torch.Tensor) -> torch.Tensor:
        """`[n, thinker_hidden]` on any device -> `[n, hidden]`."""
        return self.text_projection(reply_rows.to(self.control))

    def _project_user(self, rows: ThinkerRows) -> torch.Tensor:
        user_rows, is_media = rows.user_rows.to(self.control), rows.user_is_placeholder.to(self.control.device)
        projected = user_rows.new_empty(user_rows.shape[0], self.control.shape[1])
        projected[is_media] = self.hidden_projection(user_rows[is_media])
        projected[~is_media] = self.text_projection(user_rows[~is_media])
        return projected

    def _control_codes(self, speaker_id: int) -> torch.Tensor:
        """`[6]` codec ids that are added to the tail's last six rows."""
        config = self.config
        ids = [
            config.codec_nothink_id,
            config.codec_think_bos_id,
            config.codec_think_eos_id,
            speaker_id,
            config.codec_pad_id,
            config.codec_bos_id,
        ]
        return torch.tensor(ids, device=self.control.device)
