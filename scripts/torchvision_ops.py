# SPDX-License-Identifier: Apache-2.0
"""Makes a torchvision importable whose library does not load with this torch.

`repair.py` copies this file into site-packages beside a one-line `.pth` that calls `install()`, because every
process that vLLM spawns needs it too. The wheel of the package index is a CUDA build: on a CPU build of torch
its library is skipped silently, and the import then fails because two operators have no schema. Only these two
schemas are defined, just before the first import; the operators themselves stay missing.

Independent of vllm_omni; imports torch only when torchvision is imported.
"""

import importlib.abc
import sys

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_library = None  # torch drops the schemas with the last reference to their library


class TorchvisionOps(importlib.abc.MetaPathFinder):
    """Finds no module: it defines the schemas at the first import of torchvision, and removes itself."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _define_schemas()
        return None


def install() -> None:
    """Registers the finder, once: Python reads a `.pth` for each of lib and lib64."""
    if not any(isinstance(finder, TorchvisionOps) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionOps())


def _define_schemas() -> None:
    global _library
    import torch

    _library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in OPERATORS:
        if not hasattr(torch.ops.torchvision, operator):
            _library.define(operator + SCHEMA)
