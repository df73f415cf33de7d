# SPDX-License-Identifier: Apache-2.0
"""Whether vLLM itself serves a checkpoint as a model that writes text."""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from vllm import ModelRegistry

from vllm_omni.engine.engine_args import create_engine_args, message_of

_TEXT_CLASSES = frozenset(
    {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values(),
    }
)
"""Classes of transformers that write text."""


def why_not_text(model: str, hf_config: PretrainedConfig, engine_args: Mapping[str, Any]) -> str | None:
    """Why vLLM does not serve a checkpoint as a model that writes text; None if it does.

    Args:
        engine_args: vLLM's, some of which decide that.
    """
    is_known = is_of_vllm(hf_config)
    if not is_known and not _writes_text(hf_config):
        return "vLLM has no architecture of this name that writes text"
    try:
        config = create_engine_args(model, **engine_args).create_model_config()
    except (ValueError, TypeError) as error:
        # If vLLM has the model, an argument is wrong, which is reported when all arguments are checked.
        return None if is_known else f"vLLM refuses it: {message_of(error).split('. ')[0]}"
    if config.runner_type != "generate":
        return f"vLLM runs it as a {config.runner_type} model, which writes no text; serve it without --omni"
    return None


def is_of_vllm(hf_config: PretrainedConfig) -> bool:
    """Whether vLLM has the architecture of a checkpoint, which may come from an installed package."""
    return any(name in ModelRegistry.get_supported_archs() for name in hf_config.architectures or ())


def _writes_text(hf_config: PretrainedConfig) -> bool:
    """Whether an architecture writes text: vLLM's transformers backend also takes those that do not."""
    auto_map = getattr(hf_config, "auto_map", None) or {}
    return not _TEXT_CLASSES.isdisjoint(hf_config.architectures or ()) or "AutoModelForCausalLM" in auto_map
