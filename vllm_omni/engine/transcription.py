# SPDX-License-Identifier: Apache-2.0
"""Models that transcribe, by vLLM's interface for them (`SupportsTranscription`): prompts of sounds, and their text."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from vllm.config import ModelConfig
from vllm.config.speech_to_text import SpeechToTextParams
from vllm.entrypoints.speech_to_text.base.serving import asr_inter_chunk_separator
from vllm.inputs import PromptType
from vllm.model_executor.model_loader import get_model_cls
from vllm.model_executor.models.interfaces import SupportsTranscription, supports_transcription
from vllm.multimodal.audio import resample_audio_pyav, split_audio
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike

from vllm_omni.errors import StageConfigError
from vllm_omni.inputs import TranscriptionParameters


def load_transcription_model(model_config: ModelConfig) -> type[SupportsTranscription]:
    """The class of a checkpoint's model; loads no weights.

    Raises:
        StageConfigError: It does not transcribe.
    """
    model = cast("type[object]", get_model_cls(model_config))
    if not supports_transcription(model):
        raise StageConfigError(
            f"{model_config.model}: vLLM does not transcribe with {model.__name__}; accepts: audio needs a model that "
            "it transcribes with"
        )
    return model


class Transcription:
    """What vLLM's server does with one sound around its engine: clips, the prompt of each, and the joined text.

    Attributes:
        clips: float32 `[samples]` each, at the model's rate, as long as the model reads at once.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: TokenizerLike,
        sound: np.ndarray,
        sample_rate: float,
        parameters: TranscriptionParameters,
    ) -> None:
        """
        Args:
            sound: float32 `[samples]`, not empty.

        Raises:
            ValueError: vLLM refuses the language.
        """
        self._model = load_transcription_model(model_config)
        self._model_config = model_config
        self._tokenizer = tokenizer
        self._parameters = parameters
        self._config = self._model.get_speech_to_text_config(model_config, parameters.task)
        self._language = self._model.validate_language(parameters.language)
        self.clips = self._split(resample_audio_pyav(sound, orig_sr=sample_rate, target_sr=self._config.sample_rate))
        self._has_text = False
        self._is_clip_empty = True
        self._begin_clip()

    def _split(self, sound: np.ndarray) -> Sequence[np.ndarray]:
        config, longest, window = self._config, self._config.max_audio_clip_s, self._config.min_energy_split_window_size
        if longest is None or window is None or len(sound) <= longest * config.sample_rate:
            return [sound]
        return split_audio(sound, int(config.sample_rate), longest, config.overlap_chunk_second, window)

    @property
    def needs_language(self) -> bool:
        """Whether the model has to find the language, by `language_prompt`, before there are prompts."""
        return self._language is None and self._model.supports_explicit_language_detection

    def language_prompt(self) -> tuple[PromptType, SamplingParams]:
        """A prompt that the model continues with one token, the language of the first clip."""
        allowed = self._model.get_language_token_ids(self._tokenizer)
        params = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=allowed, watermarking=False)
        return self._model.get_language_detection_prompt(self.clips[0], self._config), params

    def read_language(self, token_ids: Sequence[int]) -> None:
        """Sets the language to what the model wrote."""
        self._language = self._model.parse_language_detection_output(list(token_ids), self._tokenizer)

    def prompt(self, index: int) -> PromptType:
        """The prompt of a clip."""
        task = self._parameters.task
        return self._model.get_generation_prompt(
            SpeechToTextParams(
                audio=self.clips[index],
                stt_config=self._config,
                model_config=self._model_config,
                language=self._language,
                task_type=task,
                request_prompt=self._parameters.prompt,
                to_language="en" if task == "translate" else None,
            )
        )

    def add(self, text: str, is_last: bool) -> str:
        """
        Args:
            text: What the model wrote next, clip by clip.
            is_last: The clip's text ends.

        Returns:
            What it adds to the transcript.
        """
        text = self._post_processor.process_delta(text, is_last)
        if text and self._is_clip_empty:
            if self._has_text:
                text = asr_inter_chunk_separator(self._language, self._model.no_space_languages) + text
            self._is_clip_empty, self._has_text = False, True
        if is_last:
            self._begin_clip()
        return text

    def _begin_clip(self) -> None:
        self._post_processor: Any = self._model.get_streaming_post_processor_cls()()
        self._is_clip_empty = True
