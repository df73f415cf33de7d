# SPDX-License-Identifier: Apache-2.0
"""Models that transcribe, by vLLM's interface for them (`SupportsTranscription`): prompts of sounds, and their text.

Of a model that knows times (Whisper, and what has its tokens) vLLM 0.32 and 0.33 write a token into the prompt that the
vocabulary does not have, ask one of English alone for its language, transcribe silence, and cut long sounds within
words. What is right is transformers' `generate` and the paper, https://arxiv.org/abs/2212.04356, section 4.5. Each rule
names what of vLLM it replaces; it can go with the first version whose own does the same.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from vllm.config import ModelConfig
from vllm.config.speech_to_text import SpeechToTextParams
from vllm.inputs import PromptType
from vllm.model_executor.model_loader import get_model_cls
from vllm.model_executor.models.interfaces import SupportsTranscription, supports_transcription
from vllm.multimodal.audio import resample_audio_pyav
from vllm.multimodal.processing import EncDecMultiModalProcessor
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike

from vllm_omni.engine.audio_clips import split_sound
from vllm_omni.engine.input_processor import BaseRenderer
from vllm_omni.errors import StageConfigError
from vllm_omni.inputs import TranscriptionParameters

_MAX_NO_SPEECH, _MIN_LOGPROB = 0.6, -1.0
"""Whisper's own: a clip has no words if the probability of no speech is above, and the mean of its tokens below."""
_SILENCE = 1 / 32768
"""No sample of digital silence is louder. In it Whisper's English models find " you" too likely for their own rule."""
_NUM_LIKELIEST = 20
"""Tokens of a position of the prompt that vLLM returns; one above `_MAX_NO_SPEECH` is the first."""
_UNLIKELY = -100.0
_ENGLISH, _ENGLISH_VOCABULARY = "en", 51_864
TIME_STEP_S = 0.02
"""Between two times of a vocabulary."""
_TIME = re.compile(r"<\|\d+\.\d\d\|>")


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


@dataclass(frozen=True)
class TimedVocabulary:
    """What a model that knows times writes and reads.

    Attributes:
        start: The token that starts a transcript.
        no_speech: The token that follows it if nobody speaks.
        suppressed: Tokens that are never written: signs of noise, as in `[music]`.
        first_time: The token of the time 0; None: this tokenizer has no times, as in converted checkpoints.
        is_multilingual: Whether it knows other languages than English, and translates.
    """

    start: int
    no_speech: int
    suppressed: Sequence[int]
    first_time: int | None
    is_multilingual: bool

    @classmethod
    def load(cls, model_config: ModelConfig, tokenizer: Any) -> "TimedVocabulary | None":
        """None: the model does not know times."""
        if not load_transcription_model(model_config).supports_segment_timestamp:
            return None
        first_time = tokenizer.convert_tokens_to_ids("<|0.00|>")
        generation = model_config.try_get_generation_config()
        return cls(
            start=tokenizer.convert_tokens_to_ids("<|startoftranscript|>"),
            no_speech=tokenizer.convert_tokens_to_ids("<|notimestamps|>") - 1,  # It has had two names.
            suppressed=generation.get("suppress_tokens") or (),
            first_time=first_time if tokenizer.convert_ids_to_tokens(first_time) == "<|0.00|>" else None,
            is_multilingual=generation.get("is_multilingual", model_config.hf_config.vocab_size != _ENGLISH_VOCABULARY),
        )


class Transcription:
    """What vLLM's server does with one sound around its engine: clips, the prompt of each, and the joined text.

    Attributes:
        clips: float32 `[samples]` each, at the model's rate, as long as the model reads at once.
        seconds: The length of the sound.
        starts: Of each clip, seconds.
        language: That is spoken, once it is known.
        vocabulary: None: the model does not know times.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: TokenizerLike,
        sound: np.ndarray,
        sample_rate: float,
        parameters: TranscriptionParameters,
        *,
        writes_times: bool = False,
    ) -> None:
        """
        Args:
            sound: float32 `[samples]`, not empty.
            writes_times: The tokens of a text have times between them, if the vocabulary has times.

        Raises:
            ValueError: The model has not this language, or does not translate.
        """
        self._model = load_transcription_model(model_config)
        self._model_config = model_config
        self._tokenizer = tokenizer
        self._parameters = parameters
        self._config = self._model.get_speech_to_text_config(model_config, parameters.task)
        self.vocabulary = TimedVocabulary.load(model_config, tokenizer)
        self._writes_times = writes_times and self.vocabulary is not None and self.vocabulary.first_time is not None
        self.language = self._model.validate_language(parameters.language)
        if self._is_english_only:
            check_english(parameters)
            self.language = _ENGLISH
        self.clips = self._split(resample_audio_pyav(sound, orig_sr=sample_rate, target_sr=self._config.sample_rate))
        lengths = [len(clip) / self._config.sample_rate for clip in self.clips]
        self.seconds = sum(lengths)
        self.starts = [sum(lengths[:index]) for index in range(len(lengths))]
        self._has_text = False
        self._num_begun = 0
        self._is_clip_empty = True
        self.begin_clip()

    def _split(self, sound: np.ndarray) -> Sequence[np.ndarray]:
        longest = self._config.max_audio_clip_s
        if longest is None or self._config.min_energy_split_window_size is None:
            return [sound]
        return split_sound(sound, self._config.sample_rate, longest)

    @property
    def _is_english_only(self) -> bool:
        return self.vocabulary is not None and not self.vocabulary.is_multilingual

    @property
    def separator(self) -> str:
        """What stands between the texts of two clips."""
        return "" if (self.language or "").lower() in self._model.no_space_languages else " "

    @property
    def needs_language(self) -> bool:
        """Whether the model has to find the language, by `language_prompt`, before there are prompts."""
        return self.language is None and self._model.supports_explicit_language_detection

    def language_prompt(self) -> tuple[PromptType, SamplingParams]:
        """A prompt that the model continues with one token, the language of the first clip."""
        allowed = self._model.get_language_token_ids(self._tokenizer)
        params = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=allowed, watermarking=False)
        return self._model.get_language_detection_prompt(self.clips[0], self._config), params

    def read_language(self, token_ids: Sequence[int]) -> None:
        """Sets the language to what the model wrote."""
        self.language = self._model.parse_language_detection_output(list(token_ids), self._tokenizer)

    def prompt(self, index: int) -> PromptType:
        """The prompt of a clip."""
        task, context = self._parameters.task, self._parameters.prompt
        made = self._model.get_generation_prompt(
            SpeechToTextParams(
                audio=self.clips[index],
                stt_config=self._config,
                model_config=self._model_config,
                language=self.language,
                task_type=task,
                request_prompt=context if self.vocabulary is None else "",
                to_language="en" if task == "translate" else None,
            )
        )
        if self.vocabulary is not None:
            decoder = cast("dict[str, Any]", cast("dict[str, Any]", made)["decoder_prompt"])
            decoder["prompt"] = self._with_context(decoder["prompt"], context)
        return made

    def _with_context(self, prompt: str, context: str) -> str:
        """The prompt behind its context. vLLM writes `<|prev|>` before the context, which no vocabulary has."""
        if self._is_english_only:
            prompt = prompt.replace(f"<|{self.language}|><|{self._parameters.task}|>", "")
        if self._writes_times:
            prompt = prompt.replace("<|notimestamps|>", "<|0.00|>")
        return f"<|startofprev|> {context.strip()}{prompt}" if context.strip() else prompt

    def with_settings(self, params: SamplingParams) -> SamplingParams:
        """`params`, and what `ClipText` reads of the engine's outputs for them."""
        if self.vocabulary is None:
            return params
        params = params.clone()
        params.prompt_logprobs = max(params.prompt_logprobs or 0, self._num_likeliest)
        params.logprobs = params.logprobs or 0
        params.logit_bias = {**dict.fromkeys(self.vocabulary.suppressed, _UNLIKELY), **(params.logit_bias or {})}
        return params

    @property
    def _num_likeliest(self) -> int:
        most = self._model_config.max_logprobs
        return _NUM_LIKELIEST if most < 0 else min(most, _NUM_LIKELIEST)

    def add(self, output: Any) -> str:
        """
        Args:
            output: The engine's for what the model wrote next, clip by clip.

        Returns:
            What it adds to the transcript.
        """
        text = self.clip.take(output)
        if text and self._is_clip_empty:
            if self._has_text:
                text = self.separator + text
            self._is_clip_empty, self._has_text = False, True
        if output.finished:
            self.begin_clip()
        return text

    def begin_clip(self) -> None:
        self.clip = self.clip_text(self._num_begun)
        self._num_begun += 1
        self._is_clip_empty = True

    def clip_text(self, index: int) -> "ClipText":
        """What reads the text of a clip."""
        is_silent = index < len(self.clips) and float(np.abs(self.clips[index]).max()) <= _SILENCE
        return ClipText(self.vocabulary, self._model.get_streaming_post_processor_cls()(), is_silent)


def keep_prompts(renderer: BaseRenderer) -> None:
    """Has prompts of decoders taken as they are, as those of a `Transcription` are complete. vLLM would put the token
    that starts a transcript before the context, too."""
    if isinstance(renderer.mm_processor, EncDecMultiModalProcessor):
        renderer.mm_processor.skip_decoder_start_token = True


def check_english(parameters: TranscriptionParameters) -> None:
    """
    Raises:
        ValueError: It is nothing for a model of English alone.
    """
    if parameters.language not in (None, _ENGLISH):
        raise ValueError(f"this model knows English only; language may not be {parameters.language!r}")
    if parameters.task == "translate":
        raise ValueError("this model knows English only, and does not translate")


class ClipText:
    """Reads the text of one clip: without times, without a blank before it, and without words if nobody speaks.

    A text that may be of no words is returned at the end of the clip, when its likelihood is known.

    Attributes:
        text: What was returned.
        no_speech_prob: The probability of no speech; 0 below that of the `_NUM_LIKELIEST` tokens.
        is_silent: Nobody speaks.
    """

    def __init__(self, vocabulary: TimedVocabulary | None, post_processor: Any, is_silent: bool = False) -> None:
        """
        Args:
            is_silent: The clip is digital silence.
        """
        self._vocabulary = vocabulary
        self._post_processor = post_processor
        self._held = ""
        self._logprob = 0.0
        self._num_tokens = 0
        self.text = ""
        self.no_speech_prob = 0.0
        self.is_silent = is_silent

    def take(self, output: Any) -> str:
        """
        Args:
            output: The engine's for the clip: the next delta, or the whole.

        Returns:
            The text that follows what was returned before.
        """
        (completion,) = output.outputs
        text = self._post_processor.process_delta(completion.text, output.finished)
        if self._vocabulary is None:
            return text
        if output.prompt_logprobs:
            self.no_speech_prob = _no_speech_prob(output, self._vocabulary)
        self._held += without_times(text)
        self._add_logprobs(completion)
        if self.is_silent or self.no_speech_prob > _MAX_NO_SPEECH:
            if not output.finished:
                return ""
            self.is_silent = self.is_silent or self._logprob <= _MIN_LOGPROB * max(self._num_tokens, 1)
        if self.is_silent:
            self._held = ""
        text, self._held = self._held if self.text else self._held.lstrip(), ""
        self.text += text
        return text

    def _add_logprobs(self, completion: Any) -> None:
        positions: Sequence[Mapping[int, Any]] = completion.logprobs or ()
        for token, position in zip(completion.token_ids, positions, strict=False):
            self._logprob += position[token].logprob
            self._num_tokens += 1


def without_times(text: str) -> str:
    """What a model wrote, without the times in it."""
    return _TIME.sub("", text)


def _no_speech_prob(output: Any, vocabulary: TimedVocabulary) -> float:
    """The probability of no speech, in the engine's first output for a clip."""
    backwards = list(output.prompt_token_ids)[::-1]  # A context may have the same token.
    found = output.prompt_logprobs[-backwards.index(vocabulary.start)].get(vocabulary.no_speech)
    return float(np.exp(found.logprob)) if found is not None else 0.0
