# SPDX-License-Identifier: Apache-2.0
"""How the stages of both omni models feed each other, as far as it is the same: voices, M-RoPE positions, windows.

This file imports no model of vLLM: stage input processors run outside the engines.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.outputs import StageOutput

TALKER_INPUT = "talker_input"
"""The thinker's output: `[rows, thinker_hidden]`, a row for each token of the prompt and the reply but the last."""

REPLY_ROWS = "reply_rows"
"""Key of the talker's additional information: `[n, thinker_hidden]`, the thinker's rows of the reply."""


class QwenOmniThinkerToTalker(StageInputProcessor):
    """The conversation and the reply, as the thinker computed them, become the talker's input.

    The prompt of the talker ends with the reply's first token. Each further one is read with a frame of its own, so
    the talker can start when the thinker has made two tokens (the row of a token exists when the next one does).
    """

    reads: ClassVar[tuple[str, ...]] = ("completions", f"tensors.{TALKER_INPUT}")
    window: ClassVar[WindowConfig] = WindowConfig(unit="tokens", first_window_size=2)
    min_first_window_size: ClassVar[int] = 2
    spoken_rows: ClassVar[str | None] = TALKER_INPUT

    def validate(self, request: StageRequest) -> None:
        find_speaker(request, self.voices)

    def process(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> StageInput | None:
        """
        Returns:
            None for a reply of one token, which holds no text to speak, and for the end of a reply whose rows have all
            been sent.

        Raises:
            InvalidRequestError: As `validate`.
        """
        (window,) = sources.values()
        rows = window.tensors.get(TALKER_INPUT)
        if window.start:
            made = None if rows is None else StageInput(additional_information={REPLY_ROWS: rows})
        elif rows is None:
            raise ValueError(f"the thinker emits no {TALKER_INPUT!r}; its engine_output_type must be 'latent'")
        else:
            made = self.make_prompt(request, rows)
        if made is not None and not window.is_last:
            num_generated = window.start + len(window.completions[0].token_ids) - window.context
            made.num_ready_tokens = self.num_ready_tokens(request, num_generated)
        return made

    @abstractmethod
    def make_prompt(self, request: StageRequest, rows: torch.Tensor) -> StageInput | None:
        """
        Args:
            rows: The thinker's, from its prompt's first one on.

        Returns:
            None for a reply of one token.
        """

    @abstractmethod
    def num_ready_tokens(self, request: StageRequest, num_generated: int) -> int:
        """Counts the tokens as in `StageInput`: the talker's prompt, and the rows of the reply that follow it.

        Args:
            num_generated: Tokens of the reply so far, which have one row less.
        """


def find_speaker(request: StageRequest, voices: Sequence[str]) -> str:
    """The voice of a request, in lower case; by default the first one.

    Raises:
        InvalidRequestError: The voice is unknown; the message lists the known ones.
    """
    name = request.options.get("speaker", voices[0])
    if not isinstance(name, str) or name.lower() not in voices:
        known = ", ".join(sorted(voices))
        raise InvalidRequestError(f"unknown speaker {name!r}; this checkpoint has {known}", request.request_id)
    return name.lower()


class RopeIndex:
    """M-RoPE positions as the reference computes them, from token ids and the sizes of media.

    Calls the method of HF transformers' models itself, on an object with the few fields that it reads: no weights.
    """

    def __init__(self, hf_class: Any, config: Any, spatial_merge_size: int) -> None:
        """
        Args:
            hf_class: `...PreTrainedModelForConditionalGeneration` of the model.
            config: The fields that the method reads of its model's configuration.
        """
        self._hf_class = hf_class
        self._caller = SimpleNamespace(
            config=config,
            spatial_merge_size=spatial_merge_size,
            get_llm_pos_ids_for_vision=lambda *args: hf_class.get_llm_pos_ids_for_vision(None, *args),
            get_chunked_index=lambda *args: hf_class.get_chunked_index(None, *args),
        )

    def __call__(self, token_ids: torch.Tensor, media: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """
        Args:
            token_ids: `[len]` int64, placeholders expanded.
            media: Fields of the prompt's media by vLLM's names, stacked in prompt order; those that it has.

        Returns:
            `[3, len]` int64.
        """
        ids = token_ids[None]
        uses_audio_in_video = media.get("use_audio_in_video")
        positions, _ = self._hf_class.get_rope_index(
            self._caller,
            ids,
            media.get("image_grid_thw"),
            media.get("video_grid_thw"),
            torch.ones_like(ids),
            use_audio_in_video=uses_audio_in_video is not None and bool(uses_audio_in_video.any()),
            audio_seqlens=media.get("audio_feature_lengths"),
            second_per_grids=media.get("second_per_grid_ts"),
        )
        return positions[:, 0].long()
