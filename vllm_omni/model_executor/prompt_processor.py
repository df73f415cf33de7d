# SPDX-License-Identifier: Apache-2.0
"""The base class of prompt processors: a model's conversion of a caller's prompt to the first stage's input.

A stage without sources names its processor in the stage configuration (`custom_prompt_func`); without one, prompts are
vLLM's. It runs in the caller's process, offline and in the server alike, and has no access to weights: what needs
weights belongs in the model, which receives `StageInput.additional_information`.
"""

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PretrainedConfig
from transformers.models.whisper.tokenization_whisper import LANGUAGES
from vllm.multimodal.audio import MONO_AUDIO_SPEC, normalize_audio, resample_audio_pyav
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike, get_tokenizer
from vllm.tokenizers.hf import CachedHfTokenizer

from vllm_omni.config.loader import resolve_dotted_path
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.config.utils import nearest
from vllm_omni.inputs import OmniPrompt, StageInput
from vllm_omni.model_executor.stage_input_processor import load_stage_hf_config
from vllm_omni.sampling_params import DiffusionSamplingParams

_FOR_THE_PIPELINE = ("modalities", "negative_prompt", "additional_information")
"""Keys of every prompt that are read elsewhere."""


class PromptProcessor(ABC):
    """Converts the prompts of one pipeline. It keeps no state of a request and is called by one thread at a time."""

    fields: ClassVar[tuple[str, ...]]
    """What a prompt can have: keys of `OmniPrompt` (`prompt`, `messages`, `multi_modal_data`), and any keys of its
    `additional_information`. Others are refused. Names that models share: `speaker` (a voice), `language`,
    `instructions`, `ref_audio` and `ref_text` (a sound and what is said in it), `context` (earlier turns)."""

    required: ClassVar[tuple[str, ...]] = ("prompt",)
    """The `fields` that a prompt must have."""

    settings: ClassVar[tuple[str, ...]] = ()
    """Settings of the request's diffusion stage that it reads besides, by their names in `DiffusionSamplingParams`."""

    def __init__(self, hf_config: PretrainedConfig, tokenizer: TokenizerLike) -> None:
        """
        Args:
            hf_config: The checkpoint's full configuration, with the stage's `hf_overrides`. `name_or_path` and
                `omni_revision` are the stage's checkpoint and its revision, for files beside its weights.
        """
        self.hf_config = hf_config
        self.tokenizer = tokenizer

    @abstractmethod
    def process(self, given: Mapping[str, Any]) -> StageInput:
        """
        Args:
            given: The prompt's `fields`, and the `settings`; absent where they are absent or None.

        Returns:
            The first stage's prompt, as that of a `StageInputProcessor`: `prompt_token_ids` are token ids or as many
            placeholders as the model has input rows, `additional_information` has tensors on the CPU and plain values.
            The plain values are the `StageRequest.options` that the other stages' processors read.

        Raises:
            ValueError, TypeError: A value is wrong; the message names the field and valid values.
        """

    def validate(self, params: SamplingParams) -> None:  # noqa: B027 (optional)
        """Checks the sampling parameters that the model itself reads, such as those in `extra_args`; optional. An error
        inside a step of the engine would make its whole batch run again.

        Raises:
            ValueError, TypeError: A parameter is wrong; the message names it and valid values.
        """

    def process_pieces(self, given: Mapping[str, Any]) -> "PromptStream":
        """Starts a prompt whose text arrives in pieces; optional.

        Args:
            given: As for `process`; its `prompt` is not read.

        Raises:
            ValueError, TypeError: As `process`; or the model has to read its text whole.
        """
        raise ValueError("this model reads a text whole: prompt must be a string")

    @property
    def reads_pieces(self) -> bool:
        """Whether the model reads a text in pieces."""
        return type(self).process_pieces is not PromptProcessor.process_pieces

    @property
    def voices(self) -> tuple[str, ...]:
        """The values of the field `speaker`, in lower case, the default one first."""
        return ()

    def __call__(self, prompt: OmniPrompt, settings: DiffusionSamplingParams | None = None) -> StageInput:
        """
        Args:
            settings: Of the request's diffusion stage, with its defaults; None without one.

        Raises:
            ValueError, TypeError: The prompt has a field that the model does not have, lacks one, or a value is wrong.
        """
        given = self._read_fields(prompt)
        if settings is not None:
            given |= {name: value for name in self.settings if (value := getattr(settings, name)) is not None}
        return self.process(given)

    def stream(self, prompt: OmniPrompt) -> "PromptStream":
        """Starts a prompt whose text arrives in pieces. Raises as `__call__`."""
        return self.process_pieces(self._read_fields(prompt))

    def _read_fields(self, prompt: OmniPrompt) -> dict[str, Any]:
        information = prompt.get("additional_information") or {}
        if not isinstance(information, Mapping):
            raise TypeError(f"additional_information must be a dict, got a {type(information).__name__}")
        own = [name for name in self.fields if name not in OmniPrompt.__annotations__]
        self._check_keys(prompt, own)
        for name in information:
            if name not in own:
                raise ValueError(
                    f"this model reads no {name!r} of additional_information{nearest(name, own)} (known: {_list(own)})"
                )
        given = {key: value for key, value in {**prompt, **information}.items() if key in self.fields}
        given = {name: value for name, value in given.items() if value is not None}
        for name in self.required:
            if name not in given:
                raise ValueError(f"the prompt has no {name!r}, which this model needs")
        return given

    def _check_keys(self, prompt: OmniPrompt, own: Sequence[str]) -> None:
        for key, value in prompt.items():
            if key not in self.fields and key not in _FOR_THE_PIPELINE and value is not None:
                keys = [name for name in self.fields if name not in own]
                raise ValueError(
                    f"this model reads no {key!r} of a prompt; it reads {_list(keys)}, and of additional_information: "
                    f"{_list(own)}"
                )


class PromptStream(ABC):
    """One prompt whose text arrives in pieces."""

    @abstractmethod
    def add(self, text: str, is_last: bool) -> StageInput | None:
        """
        Returns:
            The first stage's prompt, once there is text enough, and then more `additional_information`, each with its
            `num_ready_tokens`. None where nothing can be read yet; never for the last piece.

        Raises:
            ValueError, TypeError: As `PromptProcessor.process`.
        """


class PieceTokenizer:
    """Token ids of a text that arrives in pieces: those of the whole text, of a tokenizer that splits a text where a
    run of letters or digits ends, as GPT-2's and its successors do. The last run waits for its end."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._waiting = ""
        self._is_blank = True

    def add(self, text: str, is_last: bool) -> list[int]:
        """
        Raises:
            ValueError, TypeError: The text is empty or no text.
        """
        if not isinstance(text, str):
            raise TypeError(f"prompt must consist of strings, not of a {type(text).__name__}")
        self._is_blank = self._is_blank and not text.strip()
        if is_last and self._is_blank:
            raise ValueError("prompt is empty")
        self._waiting += text
        stop = len(self._waiting) if is_last else _last_end_of_run(self._waiting)
        ready, self._waiting = self._waiting[:stop], self._waiting[stop:]
        return self._encode(ready) if ready else []


def _last_end_of_run(text: str) -> int:
    """0 if no run has ended. A combining mark belongs to the letter before it, with which it may be normalized."""
    for index in range(len(text) - 1, 0, -1):
        before, after = text[index - 1], text[index]
        if before.isalnum() and not after.isalnum() and not unicodedata.category(after).startswith("M"):
            return index
    return 0


def load_prompt_processor(stage: OmniStageConfig, model: str) -> PromptProcessor | None:
    """A stage's prompt processor; None where a stage has none.

    Args:
        model: The stage's checkpoint.
    """
    if stage.custom_prompt_func is None:
        return None
    hf_config = load_stage_hf_config(stage, model)  # It registers configurations that the tokenizer's loader reads.
    processor_class = resolve_dotted_path(stage.custom_prompt_func, "custom_prompt_func")
    processor: PromptProcessor = processor_class(hf_config, _load_tokenizer(stage, model))
    return processor


def _load_tokenizer(stage: OmniStageConfig, model: str) -> TokenizerLike:
    args = stage.engine_args
    name = args.get("tokenizer") or model
    # vLLM's function looks for a model's configuration first, some seconds if there is none.
    load: Any = CachedHfTokenizer.from_pretrained if _has_tokenizer_only(Path(name)) else get_tokenizer
    tokenizer: TokenizerLike = load(
        name,
        revision=args.get("tokenizer_revision") or args.get("revision"),
        trust_remote_code=args.get("trust_remote_code", False),
    )
    return tokenizer


def _has_tokenizer_only(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").is_file() and not (folder / "config.json").exists()


def load_prompt_processors(config: PipelineConfig, model: str) -> dict[int, PromptProcessor]:
    """The prompt processors of a checkpoint's pipeline, by stage id."""
    processors = {stage.stage_id: load_prompt_processor(stage, stage.checkpoint(model)) for stage in config.stage_args}
    return {stage_id: processor for stage_id, processor in processors.items() if processor is not None}


def read_text(value: Any, name: str, specials: Sequence[str] = ()) -> str:
    """A text that is not empty.

    Args:
        specials: Tokens that it must not have: they have a meaning of their own in a prompt.

    Raises:
        TypeError, ValueError: It is not; the message has the field's `name`.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{name} is empty")
    for token in specials:
        if token in value:
            raise ValueError(f"{name} has {token}, a special token of this model; remove it")
    return value


def read_guidance_scale(value: Any) -> float:
    """The `guidance_scale` of a request; 1 is no guidance.

    Raises:
        ValueError: It is no number, negative, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"guidance_scale must be a number of at least 0, not {value!r}")
    return float(value)


def read_choice(value: Any, name: str, known: Sequence[str]) -> str:
    """One of `known`, which are in lower case; case does not matter.

    Raises:
        ValueError: It is none of them; the message lists them.
    """
    if not isinstance(value, str) or value.lower() not in known:
        hint = nearest(value.lower(), known) if isinstance(value, str) else ""
        raise ValueError(f"unknown {name} {value!r}{hint}; this checkpoint has {_list(known)}")
    return value.lower()


def read_language(value: Any, known: Sequence[str]) -> str:
    """Reads a language as `read_choice`. It may also be a code of ISO 639-1 (`en`), also with a region (`en-US`)."""
    code = value.lower().replace("_", "-").partition("-")[0] if isinstance(value, str) else ""
    name = LANGUAGES.get(code, "")
    return name if name in known else read_choice(value, "language", known)


def read_turns(context: Any, needed: Sequence[str], further: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """The earlier turns of a conversation, each with its name in messages.

    Args:
        needed, further: The keys that each has to have, and may have.

    Raises:
        TypeError, ValueError: It is no list of such dicts.
    """
    if not isinstance(context, (list, tuple)):
        raise TypeError(f"context must be a list of turns, not {type(context).__name__}")
    for index, turn in enumerate(context):
        if not isinstance(turn, Mapping) or not {*needed} <= turn.keys() <= {*needed, *further}:
            raise ValueError(
                f"context[{index}] must be a dict with {' and '.join(needed)}, and may have {' and '.join(further)}"
            )
    return [(f"context[{index}]", dict(turn)) for index, turn in enumerate(context)]


def read_reference(given: Mapping[str, Any]) -> tuple[Any, str] | None:
    """A reference voice of a model that needs its text.

    Args:
        given: As for `PromptProcessor.process`.

    Returns:
        `ref_audio`, still to be read by `read_sound`, and `ref_text`; None if neither is given.

    Raises:
        TypeError, ValueError: One of them is missing, or the text is empty or no text.
    """
    if ("ref_audio" in given) != ("ref_text" in given):
        raise ValueError("a reference voice is ref_audio and ref_text, what is said in it; give both, or none")
    return (given["ref_audio"], read_text(given["ref_text"], "ref_text")) if "ref_audio" in given else None


def read_sound(value: Any, name: str, sample_rate: int, max_seconds: float) -> torch.Tensor:
    """A sound at the model's rate.

    Args:
        value: `(waveform, rate)`: a numpy array or tensor `[samples]`, `[channels, samples]` or `[samples, channels]`,
            float in [-1, 1] or integers, and its samples per second.
        sample_rate: The model's.
        max_seconds: The longest sound that is taken.

    Returns:
        float32 `[samples]`, at least one; channels are averaged.

    Raises:
        TypeError, ValueError: It is no sound, empty, too long, or has values that are not finite.
    """
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} must be (waveform, samples per second), not {type(value).__name__}")
    wave, rate = value
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 1000 <= rate <= 768_000:
        raise ValueError(f"{name}: {rate!r} is no number of samples per second from 1000 to 768000")
    wave = _as_mono(wave, name)
    if not 0 < len(wave) <= max_seconds * rate:
        raise ValueError(f"{name} must be a sound of at most {max_seconds:g} s, not of {len(wave) / rate:g} s")
    if not np.isfinite(wave).all():
        raise ValueError(f"{name} has values that are not finite")
    wave = resample_audio_pyav(wave, orig_sr=rate, target_sr=sample_rate)
    return torch.from_numpy(np.array(wave, dtype=np.float32))


def _as_mono(wave: Any, name: str) -> np.ndarray:
    array = wave.detach().cpu().numpy() if isinstance(wave, torch.Tensor) else np.asarray(wave)
    if array.dtype.kind not in "fi" or array.ndim not in (1, 2):
        raise TypeError(f"{name}: the waveform must be numbers [samples] or [channels, samples]")
    if array.dtype.kind == "i":
        array = array / -float(np.iinfo(array.dtype).min)
    return np.asarray(normalize_audio(array.astype(np.float32), MONO_AUDIO_SPEC))


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
