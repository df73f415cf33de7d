# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that a class of transformers runs: what models that speak and models that transcribe have in common."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import torch
import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import cached_file

from vllm_omni.errors import StageConfigError
from vllm_omni.model_packages import find_models

TOLERANCE = 1e-4
"""Of samples or other values, or of the largest one where all are small: how much a result that was computed with
others may differ from the one that was computed alone."""


@dataclass(frozen=True, kw_only=True)
class TransformersSettings:
    """`engine_args` of a stage of the kind `transformers`."""

    model: str | None = None
    """The stage's own checkpoint. Default: the pipeline's."""
    model_stage: str | None = None
    """The stage's name."""
    engine_output_type: str | None = None
    """The output for other stages; for information only."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights: `auto` is float32 on a CPU, and the checkpoint's on an accelerator."""
    revision: str | None = None
    """Revision of the checkpoint on the hub."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint."""
    vocoder: str | None = None
    """Checkpoint of the vocoder of a model that makes spectrograms. Default: the one of transformers' pipeline."""
    voices: str | None = None
    """Folder with a file for each voice, of a model that reads x-vectors: `NAME.npy`, float32 `[size]`. Default:
    `voices` in the checkpoint."""
    max_audio_clip_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 30.0
    """Seconds of a sound that a model that transcribes reads at once; longer ones are cut at pauses."""
    profiler_config: dict[str, Any] | None = None
    """Fields of vLLM's `ProfilerConfig`, as `{profiler: torch, torch_profiler_dir: /tmp/traces}`."""


TRANSFORMERS_SETTINGS = tuple(setting.name for setting in fields(TransformersSettings))


def no_class_error(model: str, hf_config: PretrainedConfig, lacks: str) -> StageConfigError:
    """The error of a checkpoint whose architecture does not do what is wanted: it makes no sound of a text, say."""
    architectures = ", ".join(hf_config.architectures or ["not given"])
    return StageConfigError(
        f"{model}: the architecture {architectures} {lacks} with transformers {transformers.__version__}\n"
        f"{find_models().describe()}"
    )


def load_config(model: str, engine_args: Mapping[str, Any]) -> PretrainedConfig:
    """A checkpoint's configuration as transformers reads it: vLLM refuses those with two language models.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    trusts = bool(engine_args.get("trust_remote_code"))
    return AutoConfig.from_pretrained(model, revision=engine_args.get("revision"), trust_remote_code=trusts)


class TransformersModel:
    """A checkpoint of a class of transformers. `load` adds its weights.

    Attributes:
        joins: Whether rows that are computed together are equal to each alone; None: found out with requests.
        model: The checkpoint.
        config, model_class: Its configuration and class.
        module: Of a loaded model.
        gate: Called before each layer; it may raise.
    """

    joins: ClassVar[bool | None] = None

    module: Any

    def __init__(
        self, model: str, settings: TransformersSettings, hf_config: PretrainedConfig, model_class: Any
    ) -> None:
        self.model = model
        self.settings = settings
        self.config = hf_config
        self.model_class = model_class
        self.gate: Callable[[], None] = lambda: None
        self._lock = threading.Lock()  # Tokenizers are not thread-safe.

    def config_value(self, *names: str) -> Any:
        """The first of these fields that the configuration has, or a part of it."""
        parts = [self.config, *(part for part in vars(self.config).values() if isinstance(part, PretrainedConfig))]
        found = (getattr(part, name, None) for name in names for part in parts)
        return next((value for value in found if value is not None), None)

    def read_json(self, name: str) -> dict[str, Any]:
        """A file of the checkpoint; empty if there is none."""
        path = cached_file(
            self.model,
            name,
            revision=self.settings.revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is None:
            return {}
        with open(path, encoding="utf-8") as file:
            return json.load(file)

    @property
    def sound_rate(self) -> int | None:
        """Samples per second of the sound that a request may give beside its text; None: it reads none."""
        return None

    @property
    def load_arguments(self) -> dict[str, Any]:
        """The arguments of every `from_pretrained`."""
        return {"revision": self.settings.revision, "trust_remote_code": self.settings.trust_remote_code}

    def load(self, device: torch.device) -> None:
        """
        Raises:
            StageConfigError: Something that the model needs is missing.
        """
        is_float32 = self.settings.dtype == "auto" and device.type == "cpu"
        dtype = "float32" if is_float32 else self.settings.dtype
        self.module = self.model_class.from_pretrained(self.model, dtype=dtype, **self.load_arguments)
        self.module.to(device).eval()
        for each in self.module.modules():
            if isinstance(each, torch.nn.ModuleList):
                for layer in each:
                    layer.register_forward_pre_hook(lambda module, args: self.gate())


def are_equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Whether results, such as sounds, have the same lengths and, within `TOLERANCE` of the second ones, the same
    values."""
    for one, other in zip(first, second, strict=True):
        if one.shape != other.shape:
            return False
        if one.numel() and (one - other).abs().max() > TOLERANCE * min(1.0, float(other.abs().max())):
            return False
    return True


def to_module(value: Any, module: Any) -> Any:
    """A value, or a mapping of any depth, with all tensors where a module is; floats in its type."""
    if isinstance(value, torch.Tensor):
        return value.to(module.device, module.dtype if value.is_floating_point() else None)
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {name: to_module(each, module) for name, each in value.items()}
    return value
