# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's configuration, and one part of it as the configuration of a stage's model."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig
from vllm.plugins import load_general_plugins
from vllm.transformers_utils.config import get_config

HfOverrides = dict[str, Any] | Callable[[PretrainedConfig], PretrainedConfig]

# vLLM reads these from every configuration, also of a model without tokens or attention.
_ONE_STEP_DEFAULTS = {"vocab_size": 1, "hidden_size": 1, "num_attention_heads": 1, "num_hidden_layers": 1}

_READING_ARGS = ("revision", "code_revision", "config_format")


def load_hf_config(model: str, engine_args: Mapping[str, Any]) -> PretrainedConfig:
    """The whole configuration that vLLM reads for an engine with these arguments, before any `hf_overrides`.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    load_general_plugins()  # They add configurations to transformers'.
    given = {name: engine_args[name] for name in _READING_ARGS if engine_args.get(name) is not None}
    return get_config(
        engine_args.get("hf_config_path") or model,
        trust_remote_code=engine_args.get("trust_remote_code", False),
        token=engine_args.get("hf_token"),
        **given,
    )


@dataclass(frozen=True)
class StageConfigOverride:
    """vLLM's `hf_overrides` for a stage. Picklable, as part of the engine arguments.

    Attributes:
        hf_config_name: The part that becomes the model's configuration, e.g. `talker_config`; dots descend further.
            None keeps the whole.
        model_arch: The architecture to run; None keeps the configuration's own.
        one_step: The model generates in one step and may lack the fields of a language model.
        user_overrides: The caller's own `hf_overrides`, applied last, to the part.
    """

    hf_config_name: str | None = None
    model_arch: str | None = None
    one_step: bool = False
    user_overrides: HfOverrides | None = None

    def __call__(self, config: PretrainedConfig) -> PretrainedConfig:
        if config.model_type.startswith("dummy_"):
            return config  # vLLM tests whether an override changes the model type.
        part = self._select(config)
        if self.model_arch is not None:
            part.architectures = [self.model_arch]
        if self.one_step:
            _fill_missing(part)
        return self._apply_user_overrides(part)

    def change_part(self, config: PretrainedConfig) -> None:
        """Applies the caller's overrides to the stage's part, inside of the whole configuration."""
        self._apply_user_overrides(config if self.hf_config_name is None else _descend(config, self.hf_config_name))

    def _select(self, config: PretrainedConfig) -> PretrainedConfig:
        if self.hf_config_name is None:
            return config
        # A copy: the whole configuration stays as in the checkpoint.
        part = copy.deepcopy(_descend(config, self.hf_config_name))
        if part.dtype is None:
            part.dtype = config.dtype
        # As a plain dict, because a configuration inside its own part could not be written as JSON.
        part.omni_parent_config = config.to_dict()
        return part

    def _apply_user_overrides(self, part: PretrainedConfig) -> PretrainedConfig:
        if callable(self.user_overrides):
            return self.user_overrides(part)
        for name, value in (self.user_overrides or {}).items():
            current = getattr(part, name, None)
            if isinstance(value, dict) and isinstance(current, PretrainedConfig):
                current.update(value)
            else:
                part.update({name: value})
        return part


def _descend(config: PretrainedConfig, path: str) -> PretrainedConfig:
    for name in path.split("."):
        part = getattr(config, name, None)
        if not isinstance(part, PretrainedConfig):
            known = sorted(key for key, value in vars(config).items() if isinstance(value, PretrainedConfig))
            raise ValueError(f"hf_config_name {path!r}: {type(config).__name__} has no {name!r}; it has {known}")
        config = part
    return config


def _fill_missing(config: PretrainedConfig) -> None:
    for name, value in _ONE_STEP_DEFAULTS.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
