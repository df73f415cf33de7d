# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose transformers class makes sound of a text, or of a sound, with its own `generate` or `forward`.

What a request may set, and how the class is called, follows from the checkpoint's configuration, its generation
configuration, its processor and the signature of the class. What those do not tell is in a subclass of `SpeechModel`, a
few lines for each class (`speech_adapters.py`, and `ModelPackage.speech_adapters` of other packages).
"""

import inspect
import os
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np
import torch
import transformers
from transformers import (
    AutoProcessor,
    GenerationMixin,
    PretrainedConfig,
    SpeechT5HifiGan,
    SpeechT5HifiGanConfig,
)
from transformers.models.auto import modeling_auto
from transformers.pipelines.text_to_audio import DEFAULT_VOCODER_ID

from vllm_omni.errors import StageConfigError
from vllm_omni.model_executor.row_noise import RowNoise
from vllm_omni.model_executor.transformers_model import (
    TransformersModel,
    TransformersSettings,
    load_config,
    no_class_error,
    to_module,
)
from vllm_omni.model_packages import find_models

_SPECTROGRAM = frozenset(modeling_auto.MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES.values())
_WAVEFORM = modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES
_FILES = ("generation_config.json", "preprocessor_config.json", "processor_config.json")
_RATES = ("sampling_rate", "sample_rate")
_SPEAKERS = {
    "speaker_id": ("num_speakers", "vocoder_num_spkrs"),
    "speaker_ids": ("num_speakers",),
    "spkr_id": ("vocoder_num_spkrs",),
}
"""By the argument that selects a speaker by number: fields of the configuration with their number."""
_NO_LIMIT = 1_000_000
"""Tokens: a `model_max_length` above this stands for none."""
_MAX_TEXT_TOKENS = 2000
"""Of a model that declares no limit."""
_GENERATION_PARAMETERS: dict[str, Any] = {
    "do_sample": bool,
    "temperature": Annotated[float, msgspec.Meta(gt=0, le=10)],
    "top_k": Annotated[int, msgspec.Meta(ge=0, le=1_000_000)],
    "top_p": Annotated[float, msgspec.Meta(gt=0, le=1)],
    "guidance_scale": Annotated[float, msgspec.Meta(ge=0, le=100)],
}


def find_speech_class(hf_config: PretrainedConfig) -> str | None:
    """The name of the transformers class that makes sound of a text, of a checkpoint with this configuration; None if
    it is none that is known to."""
    names = {*_WAVEFORM.values(), *_SPECTROGRAM, *find_models().speech_adapters}
    architectures = hf_config.architectures or [_WAVEFORM.get(hf_config.model_type, "")]
    return next((name for name in architectures if name in names and hasattr(transformers, name)), None)


def find_speech_input(model: str, engine_args: Mapping[str, Any]) -> Literal["text", "audio"] | None:
    """What a checkpoint makes sound of, with a class of transformers; None if it makes none."""
    try:
        name = find_speech_class(load_config(model, engine_args))
    except Exception:  # Of any library that reads it; the caller reports why it cannot be read.
        return None
    return None if name is None else "audio" if name in _model_type(name).only_hearing_classes else "text"


def _model_type(name: str) -> "type[SpeechModel]":
    """The class here for one of transformers."""
    adapter = find_models().speech_adapters.get(name)
    return SpeechModel if adapter is None else pkgutil.resolve_name(adapter)


def open_speech_model(
    model: str, settings: TransformersSettings, hf_config: PretrainedConfig, *, hears: bool = False
) -> "SpeechModel":
    """The model, without weights.

    Args:
        model: A folder, or a name on the hub.
        hears: It makes sound of sounds.

    Raises:
        StageConfigError: Its class makes no sound of a text, or of a sound.
    """
    name = find_speech_class(hf_config)
    if name is None:
        raise no_class_error(model, hf_config, "makes no sound of a text")
    model_type = _model_type(name)
    if hears and name not in (*model_type.hearing_classes, *model_type.only_hearing_classes):
        raise StageConfigError(f"{model}: {name} makes sound of a text, and the input of this stage is a sound")
    if not hears and name in model_type.only_hearing_classes:
        raise StageConfigError(f"{model}: {name} makes sound of a sound; the stage needs accepts: audio")
    opened = model_type(model, settings, hf_config, getattr(transformers, name))
    opened.hears = hears
    return opened


class TextWithSound(NamedTuple):
    """A text, and the sound that a request gives beside it: float32 `[samples]` at `SpeechModel.sound_rate`."""

    text: str
    sound: np.ndarray


class SpeechModel(TransformersModel):
    """A checkpoint that speaks, or makes other sound of a text. `load` adds its weights.

    Subclasses change what the declarations of the class do not tell. Of each method and attribute that they may
    replace, this class has what follows from the declarations.

    Attributes:
        speaks: The text is spoken: a long one may be cut into sentences.
        generation_parameters: What a request may set of the generation configuration.
        limits_tokens: A request may set `max_new_tokens`.
        hearing_classes: Classes of transformers that also make sound of a sound.
        only_hearing_classes: Those that make sound of a sound, and of nothing else.
        hears: This model makes sound of sounds: in the place of texts it has these, float32 `[samples]`.
        processor, vocoder: Of a loaded model; no vocoder where the class makes waveforms.
    """

    speaks: ClassVar[bool] = True
    generation_parameters: ClassVar[Sequence[str]] = tuple(_GENERATION_PARAMETERS)
    limits_tokens: ClassVar[bool] = True
    hearing_classes: ClassVar[Sequence[str]] = ()
    only_hearing_classes: ClassVar[Sequence[str]] = ()
    hears: bool = False

    processor: Any
    vocoder: Any

    # What the files tell, without weights.

    @cached_property
    def files(self) -> list[dict[str, Any]]:
        """The content of the checkpoint's files that describe its generation and its processor."""
        return [self.read_json(name) for name in _FILES]

    @cached_property
    def sample_rate(self) -> int:
        """Samples per second of the sound.

        Raises:
            StageConfigError: No file tells it.
        """
        if self.needs_vocoder:
            return SpeechT5HifiGanConfig.from_pretrained(self.vocoder_path).sampling_rate
        parts = self._rate_sources()
        found = next((rate for part in parts for name in _RATES if isinstance(rate := part.get(name), int)), None)
        if found is None:
            raise StageConfigError(f"{self.model}: neither its configuration nor its processor has a sampling_rate")
        return found

    @cached_property
    def voices(self) -> Sequence[str]:
        """The values of a request's `voice`, the default one first."""
        counts = [self.config_value(*fields) for name, fields in _SPEAKERS.items() if self.takes(name)]
        return [str(number) for number in range(next((count for count in counts if (count or 0) > 1), 0))]

    @cached_property
    def languages(self) -> Sequence[str]:
        """The values of a request's `language`, the default one first."""
        if not self.takes("tgt_lang"):
            return []
        tables = [value for key, value in self.files[0].items() if "lang" in key and isinstance(value, dict)]
        known = set.intersection(*map(set, tables)) if tables else set()
        return sorted(known, key=lambda name: (name != "eng", name))

    @cached_property
    def parameters(self) -> type[msgspec.Struct]:
        """The parameters of a request, all with defaults."""
        found: list[Any] = [("seed", Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)], 0)]
        if self.voices:
            found.append(("voice", str, self.voices[0]))
        if self.takes("speaking_rate"):
            found.append(("speed", Annotated[float, msgspec.Meta(ge=0.25, le=4.0)], 1.0))
        if self.languages:
            found.append(("language", Literal[tuple(self.languages)], self.languages[0]))
        if issubclass(self.model_class, GenerationMixin):
            found += [(name, _GENERATION_PARAMETERS[name] | None, None) for name in self.generation_parameters]
            if self.limits_tokens:
                meta = msgspec.Meta(ge=1, le=self.max_tokens)
                found.append(("max_new_tokens", Annotated[int, meta] | None, None))
        return msgspec.defstruct("SpeechParameters", found, frozen=True)

    @cached_property
    def max_tokens(self) -> int:
        """Tokens of the longest sound."""
        parts = (getattr(self.config, name, None) for name in ("decoder", "decoder_config"))
        positions = [getattr(part, "max_position_embeddings", None) for part in (*parts, self.config)]
        own = next((number for number in positions if number), 4096)
        return max(own, *(self.files[0].get(name) or 0 for name in ("max_length", "max_new_tokens")))

    @cached_property
    def max_text_tokens(self) -> int:
        """Tokens of the longest text, which the memory of a call grows with."""
        encoder = getattr(self.config, "encoder_config", None)
        limits = [
            getattr(self.config, "max_text_positions", None),
            getattr(encoder, "max_position_embeddings", None),
            getattr(self.tokenizer, "model_max_length", None),
        ]
        known = [limit for limit in limits if limit and limit < _NO_LIMIT]
        return min(known, default=_MAX_TEXT_TOKENS)

    @property
    def needs_vocoder(self) -> bool:
        """Whether the class makes spectrograms."""
        return self.model_class.__name__ in _SPECTROGRAM

    @property
    def vocoder_path(self) -> str:
        """The vocoder's checkpoint: the operator's, the folder `vocoder` of the model's, or that of the pipeline of
        transformers."""
        own = os.path.join(self.model, "vocoder")
        return self.settings.vocoder or (own if os.path.isdir(own) else DEFAULT_VOCODER_ID)

    def takes(self, name: str) -> bool:
        """Whether the class has an argument of this name."""
        return name in inspect.signature(self._method(self.model_class)).parameters

    def _rate_sources(self) -> Iterator[dict[str, Any]]:
        """Dicts that may have the sampling rate, the most specific ones first."""
        own = self.config.to_dict()
        for whole in (own, self.files[0]):
            yield whole
        for whole in (own, *self.files):
            yield from (part for part in (whole, *whole.values()) if isinstance(part, dict))

    # With weights, in the stage's process.

    def load(self, device: torch.device) -> None:
        """
        Raises:
            StageConfigError: Something that the model needs is missing.
        """
        super().load(device)
        self.processor = self.load_processor(**self.load_arguments)
        self.vocoder = None
        if self.needs_vocoder:
            vocoder: Any = SpeechT5HifiGan.from_pretrained(self.vocoder_path)
            self.vocoder = vocoder.to(device, self.module.dtype).eval()
        self._num_marks = len(self.tokenizer(self.prepare_text(""))["input_ids"])

    def load_processor(self, **args: Any) -> Any:
        """What encodes texts."""
        return AutoProcessor.from_pretrained(self.model, **args)

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    def count_tokens(self, text: str) -> int:
        """Tokens of a text; 0 if there is nothing in it that the model reads."""
        with self._lock:
            number = len(self.tokenizer(self.prepare_text(text))["input_ids"])
        return 0 if number <= self._num_marks else number

    def compute(self, texts: Sequence[Any], parameters: Any) -> list[torch.Tensor]:
        """The sounds of texts, or of sounds, with the same parameters, computed together.

        Args:
            texts: Of a text with a sound beside it, a `TextWithSound`.

        Returns:
            float32 `[samples]`, or `[channels, samples]`, of each text.
        """
        torch.manual_seed(parameters.seed)
        sounds = [text.sound for text in texts if isinstance(text, TextWithSound)]
        texts = [text.text if isinstance(text, TextWithSound) else text for text in texts]
        with self._lock:
            prepared = texts if self.hears else [self.prepare_text(text) for text in texts]
            inputs = dict(self.encode(prepared, parameters))
        for sound in sounds:
            inputs |= self.encode_sound(sound)
        inputs = to_module(inputs, self.module)
        options = self.options(parameters, len(texts))
        with torch.inference_mode():
            if len(texts) == 1:
                output = self.call(inputs, options)
            else:
                with RowNoise([parameters.seed] * len(texts)) as noise:
                    output = self.call_rows(inputs, options, noise)
            return [sound.float().cpu() for sound in self.decode(output, len(texts))]

    def prepare_text(self, text: str) -> str:
        """The text as the model reads it."""
        return text

    @property
    def input_rate(self) -> int:
        """Samples per second of the sounds that it hears."""
        return self.processor.feature_extractor.sampling_rate

    def encode_sound(self, sound: np.ndarray) -> Mapping[str, Any]:
        """The model's further inputs for a sound beside a text, float32 `[samples]` at `sound_rate`.

        Raises:
            InvalidRequestError: A package that reads it is missing.
        """
        raise NotImplementedError

    def encode(self, texts: Sequence[Any], parameters: Any) -> Mapping[str, Any]:
        """The model's inputs."""
        return self.processor(text=list(texts), return_tensors="pt", padding=len(texts) > 1)

    def options(self, parameters: Any, num_rows: int) -> dict[str, Any]:
        """Further arguments of the call."""
        found: dict[str, Any] = {}
        if self.voices:
            found |= self.voice_options(parameters.voice, num_rows)
        if self.takes("speaking_rate"):
            found["speaking_rate"] = (self.config_value("speaking_rate") or 1.0) * parameters.speed
        if self.languages:
            found["tgt_lang"] = parameters.language
        if issubclass(self.model_class, GenerationMixin):
            names = (*self.generation_parameters, *(("max_new_tokens",) if self.limits_tokens else ()))
            found |= {name: value for name in names if (value := getattr(parameters, name)) is not None}
            if self.limits_tokens and not any(self.files[0].get(n) for n in ("max_length", "max_new_tokens")):
                found.setdefault("max_new_tokens", self.max_tokens)
        return found

    def voice_options(self, voice: str, num_rows: int) -> dict[str, Any]:
        """The arguments for a voice."""
        name = next(name for name in _SPEAKERS if self.takes(name))
        number = int(voice)
        is_tensor = name == "speaker_ids"
        return {name: torch.full((num_rows, 1), number, device=self.module.device) if is_tensor else number}

    def call(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """What the class returns."""
        output = self._method(self.module)(**inputs, **options)
        return output if self.vocoder is None else self.vocoder(output[0])

    def call_rows(self, inputs: Mapping[str, Any], options: Mapping[str, Any], noise: RowNoise) -> Any:
        """What the class returns for several rows.

        Args:
            noise: Draws each row's random numbers as if it were alone.
        """
        return self.call(inputs, options)

    def decode(self, output: Any, num_rows: int) -> list[torch.Tensor]:
        """The sounds in what the class returned, without padding."""
        if isinstance(output, torch.Tensor):
            waveforms, lengths = output, None
        elif isinstance(output, tuple):
            waveforms, lengths = output[:2]
        else:
            waveforms = output.waveform
            lengths = next((output[name] for name in output if name.endswith("lengths")), None)
        if waveforms.ndim == 1:
            waveforms = waveforms[None]
        if waveforms.ndim == 3 and waveforms.shape[1] == 1:
            waveforms = waveforms[:, 0]
        sizes = (
            [waveforms.shape[-1]] * num_rows
            if lengths is None
            else [int(n) for n in torch.as_tensor(lengths).flatten()]
        )
        return [waveform[..., :size] for waveform, size in zip(waveforms, sizes, strict=True)]

    @staticmethod
    def _method(model: Any) -> Any:
        """`generate` of a class or model, or, without one, `forward`."""
        if hasattr(model, "generate"):
            return model.generate
        return model if isinstance(model, torch.nn.Module) else model.forward
