# SPDX-License-Identifier: Apache-2.0
"""A table of embeddings in float32 that is kept in half precision, where that holds the same numbers.

Models read a table's dtype, and compute in it. So the table stays a parameter in float32 for all that reads it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten


class HalfTable(Tensor):
    """`[rows, ...]`. Rows that are looked up are converted; any other operation converts the whole table.

    Attributes:
        stored: The same numbers in float16 or bfloat16.
    """

    stored: Tensor

    @staticmethod
    def __new__(cls, half: Tensor) -> "HalfTable":
        table = Tensor._make_wrapper_subclass(cls, half.shape, dtype=torch.float32, device=half.device)
        table.stored = half
        return table

    def __init__(self, half: Tensor) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        table, *others = args
        if func is _aten.detach.default:  # Of a parameter that is made of it.
            return cls(table.stored)
        if func is _aten.embedding.default and isinstance(table, HalfTable):
            return func(table.stored, *others, **kwargs or {}).float()
        args, kwargs = tree_map_only(HalfTable, lambda table: table.stored.float(), (args, kwargs or {}))
        return func(*args, **kwargs)


def as_half(weight: Tensor) -> Tensor | None:
    """Float32 `[rows, ...]` in float16 or bfloat16; None if neither holds the same numbers."""
    weight = weight.detach()  # Else the half of a parameter with a gradient would keep it alive.
    halves = map(weight.to, (torch.float16, torch.bfloat16))
    return next((half for half in halves if half.float().equal(weight)), None)


def replace_parameters(model: nn.Module, tables: Mapping[Tensor, Tensor]) -> None:
    """Puts a `HalfTable` in the place of each parameter that has a table in half precision.

    Args:
        tables: By the parameter, which several layers may share.
    """
    replaced = {weight: nn.Parameter(HalfTable(half), requires_grad=False) for weight, half in tables.items()}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if weight in replaced:
                setattr(module, name, replaced[weight])
