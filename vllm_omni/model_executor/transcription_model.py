# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose transformers class makes text of a sound, and that vLLM does not have.

How it is called follows from the table of transformers that has its class: classes of CTC, transducers, and those that
write with `generate`. What that does not tell is in a subclass (`transcription_adapters.py`, and
`ModelPackage.transcription_adapters` of other packages).
"""

import inspect
import itertools
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import torch
import transformers
from transformers import AutoFeatureExtractor, AutoProcessor, AutoTokenizer, PretrainedConfig
from transformers.models.auto import modeling_auto

from vllm_omni.model_executor.transformers_model import (
    TransformersModel,
    TransformersSettings,
    load_config,
    no_class_error,
    to_module,
)
from vllm_omni.model_packages import find_models

_CTC = modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES
_GENERATING = modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
_TRANSDUCERS = {
    model_type: name
    for table in ("RNNT", "TDT")
    for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {}).items()
}
_SPEAKING = frozenset(modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES.values())
_MAX_TOKENS = 448
"""Of a text, of a model that declares no limit."""
MIN_SOUND_S = 0.1
"""A shorter sound has no words; the convolutions of some models do not take it."""


def find_transcription_class(hf_config: PretrainedConfig) -> str | None:
    """The name of the transformers class that makes text of a sound, of a checkpoint with this configuration; None if
    it is none that is known to."""
    always = {*_CTC.values(), *_TRANSDUCERS.values(), *find_models().transcription_adapters}
    generating = {*_GENERATING.values()} - _SPEAKING
    for name in hf_config.architectures or ():
        model_class = getattr(transformers, name, None)
        makes = getattr(model_class, "output_modalities", None) or ("text",)
        if model_class is not None and (name in always or (name in generating and "text" in makes)):
            return name
        if {"audio", "text"} <= {*makes} and hf_config.model_type in _GENERATING:  # It speaks, too.
            return _GENERATING[hf_config.model_type]
    return None


def is_transcription_checkpoint(model: str, engine_args: Mapping[str, Any]) -> bool:
    """Whether a checkpoint makes text of a sound with a class of transformers."""
    try:
        return find_transcription_class(load_config(model, engine_args)) is not None
    except Exception:  # Of any library that reads it; the caller reports why it cannot be read.
        return False


def open_transcription_model(
    model: str, settings: TransformersSettings, hf_config: PretrainedConfig
) -> "TranscriptionModel":
    """The model, without weights.

    Args:
        model: A folder, or a name on the hub.

    Raises:
        StageConfigError: Its class makes no text of a sound.
    """
    name = find_transcription_class(hf_config)
    if name is None:
        raise no_class_error(model, hf_config, "makes no text of a sound")
    adapter = find_models().transcription_adapters.get(name)
    model_type: type[TranscriptionModel] = GeneratingModel
    if adapter is not None:
        model_type = pkgutil.resolve_name(adapter)
    elif name in _CTC.values():
        model_type = CTCModel
    elif name in _TRANSDUCERS.values():
        model_type = TransducerModel
    return model_type(model, settings, hf_config, getattr(transformers, name))


class TranscriptionModel(TransformersModel):
    """A checkpoint that transcribes. `load` adds its weights.

    Attributes:
        has_times: It tells when each word is spoken.
        feature_extractor, tokenizer: Of a loaded model.
    """

    joins: ClassVar[bool | None] = False
    has_times: ClassVar[bool] = False
    voices: ClassVar[Sequence[str]] = ()

    feature_extractor: Any
    tokenizer: Any

    @cached_property
    def parameters(self) -> type[msgspec.Struct]:
        """The parameters of a request, all with defaults."""
        found: list[Any] = [("timestamps", bool, False)] if self.has_times else []
        return msgspec.defstruct("TranscriptionParameters", found, frozen=True)

    @property
    def sample_rate(self) -> int:
        """Samples per second of the sounds that it reads."""
        return self.feature_extractor.sampling_rate

    def load(self, device: torch.device) -> None:
        super().load(device)
        self.feature_extractor = AutoFeatureExtractor.from_pretrained(self.model, **self.load_arguments)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model, **self.load_arguments)

    def compute(self, sounds: Sequence[np.ndarray], parameters: Any) -> list[torch.Tensor]:
        """What the class returns for each sound; computed together. `read` reads it.

        Args:
            sounds: float32 `[samples]` each.
        """
        torch.manual_seed(0)
        inputs = to_module(self.encode(sounds, parameters), self.module)
        with torch.inference_mode():
            return self.call(inputs, parameters, len(sounds))

    def encode(self, sounds: Sequence[np.ndarray], parameters: Any) -> Mapping[str, Any]:
        """The model's inputs."""
        padding = {"padding": True} if len(sounds) > 1 else {}
        return self.feature_extractor(list(sounds), sampling_rate=self.sample_rate, return_tensors="pt", **padding)

    def call(self, inputs: Mapping[str, Any], parameters: Any, num_rows: int) -> list[torch.Tensor]:
        """What the class returns for each row, without padding."""
        raise NotImplementedError

    def read(self, output: torch.Tensor, seconds: float, parameters: Any) -> dict[str, Any]:
        """
        Args:
            output: Of `compute`.
            seconds: The length of the sound.

        Returns:
            `text`, and, with `timestamps`, `word_times`: float32 `[words, 2]`, the start and end, in seconds, of each
            word of the text, which blanks separate.
        """
        raise NotImplementedError

    def is_long_enough(self, sound: np.ndarray) -> bool:
        """Whether a sound may have words."""
        return len(sound) >= MIN_SOUND_S * self.sample_rate

    def frame_seconds(self, seconds: float, num_frames: int) -> float:
        """The length of a frame of the encoder.

        Args:
            num_frames: Of a sound of this length.
        """
        hop, factor = getattr(self.feature_extractor, "hop_length", None), self.config_value("subsampling_factor")
        ratio = getattr(self.config, "inputs_to_logits_ratio", None)
        if hop is not None and (factor or ratio):
            return hop * (factor or ratio) / self.sample_rate
        return seconds / num_frames if ratio is None else ratio / self.sample_rate

    def word_times(self, tokens: Sequence[tuple[int, int, int]], blank: int, frame_s: float) -> torch.Tensor:
        """`word_times` of `read`.

        Args:
            tokens: Each with the frames of its start and of its end.
            blank: The token that is none.
            frame_s: Seconds of a frame.
        """
        times: list[list[int]] = []
        written: list[int] = []
        length = 0
        for token, start, end in tokens:
            written.append(token)
            if token == blank:
                continue
            text = self.decode(written).strip()
            times += [[start, end] for _ in range(len(text.split()) - len(times))]
            if times and len(text) > length:
                times[-1][1] = end
            length = len(text)
        return torch.tensor(times, dtype=torch.float32).reshape(-1, 2) * frame_s

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


class CTCModel(TranscriptionModel):
    """A token for each frame; equal ones that follow each other are one, and the padding token is none."""

    joins = None
    has_times = True

    def call(self, inputs: Mapping[str, Any], parameters: Any, num_rows: int) -> list[torch.Tensor]:
        """float32 logits `[frames, vocabulary]` of each row."""
        logits = self.module(**inputs).logits.float()
        lengths = self._num_frames(inputs.get("attention_mask"), logits.shape[1])
        if lengths is None:
            if num_rows > 1:
                raise ValueError(f"{self.model_class.__name__} has no mask of its frames")
            lengths = [logits.shape[1]]
        return [row[:length] for row, length in zip(logits, lengths, strict=True)]

    def _num_frames(self, mask: torch.Tensor | None, longest: int) -> list[int] | None:
        """Frames of each row without padding; None: unknown."""
        if mask is None:
            return None
        if hasattr(self.module, "_get_output_attention_mask"):
            frames = self.module._get_output_attention_mask(mask, target_length=longest)
        elif hasattr(self.module, "_get_feature_vector_attention_mask"):
            frames = self.module._get_feature_vector_attention_mask(longest, mask)
        else:
            return None
        return frames.sum(-1).tolist()

    def read(self, output: torch.Tensor, seconds: float, parameters: Any) -> dict[str, Any]:
        ids = output.argmax(-1).tolist()
        found: dict[str, Any] = {"text": self.decode(ids)}
        if parameters.timestamps:
            blank, frame_s = self.config.pad_token_id, self.frame_seconds(seconds, len(ids))
            found["word_times"] = self.word_times(list(_runs(ids)), blank, frame_s)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)  # Else some drop blanks before equal ones.


class TransducerModel(TranscriptionModel):
    """Tokens, each with the frames that pass until the next one."""

    has_times = True

    def call(self, inputs: Mapping[str, Any], parameters: Any, num_rows: int) -> list[torch.Tensor]:
        """int64 `[2, tokens]`: tokens and frames."""
        output = self.module.generate(**inputs)
        return list(torch.stack([output.sequences, output.durations], dim=1))

    def read(self, output: torch.Tensor, seconds: float, parameters: Any) -> dict[str, Any]:
        ids, durations = output.tolist()
        found: dict[str, Any] = {"text": self.decode(ids)}
        if parameters.timestamps:
            starts = [0, *itertools.accumulate(durations)]
            tokens = [
                (token, start, start + max(1, frames))
                for token, start, frames in zip(ids, starts, durations, strict=False)
            ]
            frame_s = self.frame_seconds(seconds, max(starts[-1], 1))
            found["word_times"] = self.word_times(tokens, self.config.blank_token_id, frame_s)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, group_tokens=False)


class GeneratingModel(TranscriptionModel):
    """Text that is written token by token. Its processor may have a prompt for a transcription.

    Attributes:
        processor: Of a loaded model.
    """

    processor: Any

    @cached_property
    def parameters(self) -> type[msgspec.Struct]:
        found: list[Any] = [("language", str | None, None)] if self._language_argument else []
        if self._request_arguments.get("target_language"):
            found.append(("task", Literal["transcribe", "translate"], "transcribe"))
        return msgspec.defstruct("TranscriptionParameters", found, bases=(super().parameters,), frozen=True)

    @cached_property
    def _request_arguments(self) -> Mapping[str, Any]:
        """Arguments of the processor's method that makes the prompt for a transcription."""
        name = self.read_json("processor_config.json").get("processor_class", "")
        make = getattr(getattr(transformers, name, None), "apply_transcription_request", None)
        return {} if make is None else inspect.signature(make).parameters

    @property
    def _language_argument(self) -> str | None:
        return next((name for name in ("source_language", "language") if name in self._request_arguments), None)

    @property
    def max_new_tokens(self) -> int | None:
        """Tokens of the longest text, where the checkpoint does not say that; None: it does."""
        own = self.module.generation_config
        if own.max_new_tokens is not None or own.max_length not in (None, 20):  # 20 is the library's default.
            return None
        return self.config_value("max_target_positions", "max_position_embeddings") or _MAX_TOKENS

    def load(self, device: torch.device) -> None:
        TransformersModel.load(self, device)
        self.processor = AutoProcessor.from_pretrained(self.model, **self.load_arguments)
        self.feature_extractor, self.tokenizer = self.processor.feature_extractor, self.processor.tokenizer

    def encode(self, sounds: Sequence[np.ndarray], parameters: Any) -> Mapping[str, Any]:
        if not self._request_arguments:
            return super().encode(sounds, parameters)
        options = {}
        if self._language_argument and parameters.language is not None:
            options[self._language_argument] = parameters.language
        if getattr(parameters, "task", None) == "translate":
            options["target_language"] = "en"
        return self.processor.apply_transcription_request(audio=list(sounds), **options)

    def options(self, parameters: Any) -> dict[str, Any]:
        """Further arguments of `generate`."""
        return {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}

    def call(self, inputs: Mapping[str, Any], parameters: Any, num_rows: int) -> list[torch.Tensor]:
        """int64 `[tokens]` of each row, without the prompt."""
        output = self.module.generate(**inputs, **self.options(parameters))
        prompt = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        tokens = getattr(output, "sequences", output)
        return list(tokens if prompt is None else tokens[:, prompt.shape[1] :])

    def read(self, output: torch.Tensor, seconds: float, parameters: Any) -> dict[str, Any]:
        return {"text": self.decode(output.tolist())}


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of equal tokens, each with its first frame and the one after its last."""
    start = 0
    for token, run in itertools.groupby(ids):
        end = start + len(list(run))
        yield token, start, end
        start = end
