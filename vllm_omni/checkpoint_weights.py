# SPDX-License-Identifier: Apache-2.0
"""What the heads of a checkpoint's safetensors files say of its tensors. Reads no weights."""

import json
import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

INDEX = ".safetensors.index.json"
"""How the name of an index ends."""


@dataclass(frozen=True)
class WeightTensor:
    """What a file says of a tensor.

    Attributes:
        dtype: As safetensors writes it: `F32`, `BF16`, `I64`.
        file: Where it is.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path

    @property
    def kind(self) -> str:
        """`float` for all that a stage converts to its own dtype."""
        return "float" if self.dtype in ("F64", "F32", "F16", "BF16") else self.dtype

    @property
    def num_bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # The first number: `F8_E4M3`. `BOOL` has none.
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8


WeightTensors = dict[str, WeightTensor]
"""By name."""


def checkpoint_folder(checkpoint: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint that is one, or a name on the hub; nothing is downloaded.

    Raises:
        OSError, ValueError: It is not here.
    """
    folder = Path(checkpoint)
    return folder if folder.is_dir() else Path(snapshot_download(checkpoint, revision=revision, local_files_only=True))


def read_tensors(root: Path) -> dict[str, WeightTensors]:
    """The tensors of each folder in `root`; `root` itself is the folder ``.

    Raises:
        ValueError: A file is damaged.
    """
    found: dict[str, WeightTensors] = {}
    indexed: dict[Path, set[Path]] = {}
    for file in sorted(root.rglob("*.safetensors")):
        folder = file.parent
        if folder not in indexed:
            indexed[folder] = _indexed(folder)
        if file in indexed[folder]:
            name = "" if folder == root else str(folder.relative_to(root))
            found.setdefault(name, {}).update(read_head(file))
    return found


def read_head(file: Path) -> WeightTensors:
    """The tensors of a file.

    Raises:
        ValueError: It is damaged.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
            return {name: WeightTensor(tuple(p.get_shape()), p.get_dtype(), file) for name, p in parts.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: is damaged: {error}") from error


def read_index(index: Path) -> set[Path]:
    """The files that an index names.

    Raises:
        ValueError: It is damaged.
    """
    try:
        return {index.parent / name for name in json.loads(index.read_text())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: is damaged: {error}") from error


def _indexed(folder: Path) -> set[Path]:
    """The weight files of a folder: of its index if it has one, as some have the same weights in other files, too."""
    indices = sorted(folder.glob(f"*{INDEX}"))
    return set().union(*map(read_index, indices)) if indices else set(folder.glob("*.safetensors"))


def weight_bytes(checkpoint: str, part: str, parts: Collection[str]) -> int | None:
    """Bytes of the tensors of a part of a checkpoint.

    Args:
        checkpoint: A folder, or a name on the hub; nothing is downloaded.
        part: Tensors whose names begin with it (`talker.model...`) belong to it. If there are none, it has those that
            belong to none of `parts`.
        parts: All that are read from this checkpoint.

    Returns:
        None if there are no safetensors files here.
    """
    sizes = _part_sizes(checkpoint)
    if not sizes:
        return None
    return sizes.get(part) or sum(size for name, size in sizes.items() if name not in parts)


@lru_cache(maxsize=8)
def _part_sizes(checkpoint: str) -> dict[str, int]:
    """Bytes of tensors by the first component of their names."""
    sizes: Counter[str] = Counter()
    try:
        for tensors in read_tensors(checkpoint_folder(checkpoint)).values():
            for name, tensor in tensors.items():
                sizes[name.partition(".")[0]] += tensor.num_bytes
    except (OSError, ValueError):
        return {}  # What reads the weights reports what is wrong with them.
    return sizes
