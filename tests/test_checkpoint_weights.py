# SPDX-License-Identifier: Apache-2.0
"""The bytes of a checkpoint's tensors, by the heads of its files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_omni.checkpoint_weights import weight_bytes

DTYPES = ("float64", "float32", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_each_dtype(tmp_path: Path, dtype: str) -> None:
    tensor = torch.zeros(3, 5, dtype=getattr(torch, dtype))
    save_file({"talker.a": tensor, "other": torch.zeros(2)}, tmp_path / "model.safetensors")
    parts = {"thinker", "talker"}
    assert weight_bytes(str(tmp_path), "talker", parts) == tensor.nbytes
    assert weight_bytes(str(tmp_path), "thinker", parts) == 8


def test_files_that_the_index_does_not_name_are_not_counted(tmp_path: Path) -> None:
    for name in ("model-00001-of-00001", "consolidated"):
        save_file({"a": torch.zeros(3)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_bytes(str(tmp_path), "a", {"a"}) == 12


def test_folders_are_counted_together(tmp_path: Path) -> None:
    for folder in ("transformer", "vae"):
        (tmp_path / folder).mkdir()
        save_file({"a": torch.zeros(3)}, tmp_path / folder / "model.safetensors")
    assert weight_bytes(str(tmp_path), "dit", {"dit"}) == 24
