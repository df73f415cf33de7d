# SPDX-License-Identifier: Apache-2.0
"""How a later chunk of a request's input joins what is there, for models that do not say otherwise."""

from typing import Any

import torch


def extend_information(information: dict[str, Any], chunk: dict[str, Any]) -> None:
    """Appends tensors to those of the same name along their first dimension; replaces everything else."""
    for name, value in chunk.items():
        known = information.get(name)
        if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor):
            value = torch.cat((known, value.to(known.device)))
        information[name] = value
