# SPDX-License-Identifier: Apache-2.0
"""How many bytes of weights the files of a checkpoint have, by part. Reads the heads of files, no weights."""

import struct
from collections import Counter
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

import msgspec
from huggingface_hub import snapshot_download

_HEAD_LENGTH = struct.Struct("<Q")


class _Tensor(msgspec.Struct):
    """An entry of a safetensors file's head; `__metadata__` has no offsets."""

    data_offsets: tuple[int, int] = (0, 0)


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
    folder = Path(checkpoint)
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(checkpoint, local_files_only=True))
        for path in [*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")]:
            with path.open("rb") as file:
                (length,) = _HEAD_LENGTH.unpack(file.read(_HEAD_LENGTH.size))
                head = file.read(min(length, path.stat().st_size))
            for name, tensor in msgspec.json.decode(head, type=dict[str, _Tensor]).items():
                begin, end = tensor.data_offsets
                sizes[name.partition(".")[0]] += end - begin
    except (OSError, ValueError, msgspec.MsgspecError, struct.error):
        return {}  # What reads the weights reports what is wrong with them.
    return sizes
