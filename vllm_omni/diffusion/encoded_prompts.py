# SPDX-License-Identifier: Apache-2.0
"""Encoded prompts on their way from a stage that encodes them to the one that denoises.

What a pipeline's `encode_prompt` returns is taken as it is, whatever it is made of: the denoising stage's pipeline
calls `encode_prompt` as ever, and gets it back. Tensors travel as tensors, everything else says where they stand.
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_omni.outputs import StageOutput

_NAME = "prompt_embeds"


def pack_encoded_prompts(results: list[Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """
    Args:
        results: What each call returned: tensors and None, in any depth of tuples and lists.

    Returns:
        `StageOutput.tensors` and `StageOutput.data`.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, {_NAME: _pack(results, tensors)}


def unpack_encoded_prompts(output: StageOutput) -> list[Any] | None:
    """What `pack_encoded_prompts` was given; None where the output has none."""
    return _unpack(output.data[_NAME], output.tensors) if _NAME in output.data else None


def _pack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = f"{_NAME}.{len(tensors)}"
        tensors[name] = value.cpu()
        return name
    if isinstance(value, tuple | list):
        return [type(value).__name__, *(_pack(item, tensors) for item in value)]
    if value is not None:
        raise TypeError(f"encode_prompt returned a {type(value).__name__}; only tensors can be handed to another stage")
    return None


def _unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, str):
        return tensors[value]
    if value is None:
        return None
    kind, *items = value
    unpacked = [_unpack(item, tensors) for item in items]
    return tuple(unpacked) if kind == "tuple" else unpacked
