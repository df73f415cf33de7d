# SPDX-License-Identifier: Apache-2.0
"""Hashes of KV blocks for models that read rows instead of tokens: rows that are equal are a common prefix.

vLLM's hashes contain token ids, which are placeholders here. What a request reads is in its additional information.
"""

import hashlib
from collections.abc import Callable, Sequence

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from vllm_omni.payloads import AdditionalInformationPayload, TensorPayload

MROPE_POSITIONS = "mrope_positions"
"""Of additional information: `[3, n]`, one column for each token."""


class RowHasher:
    """vLLM's hashes of one request's blocks, each with the rows up to its end. The blocks after these are its own."""

    def __init__(self, hash_blocks: Callable[[Request], list[BlockHash]], digests: Sequence[bytes]) -> None:
        """
        Args:
            hash_blocks: vLLM's: the hashes of blocks that the request has no hashes of yet.
            digests: Of the rows of the first blocks, see `digest_rows`.
        """
        self._hash_blocks = hash_blocks
        self._digests = digests

    def __call__(self, request: Request) -> list[BlockHash]:
        first = len(request.block_hashes)
        return [
            BlockHash(hashlib.sha256(value + self._identify(request, index)).digest())
            for index, value in enumerate(self._hash_blocks(request), first)
        ]

    def _identify(self, request: Request, index: int) -> bytes:
        return self._digests[index] if index < len(self._digests) else request.request_id.encode()


def digest_rows(information: AdditionalInformationPayload, names: Sequence[str], block_size: int) -> list[bytes]:
    """Digests of rows, one for each full block: of all rows up to its end, and of their positions.

    Args:
        names: Tensors `[n, ...]` of the information: row i is what the model reads for token i of the prompt.
        block_size: Tokens in a block.

    Raises:
        ValueError: One of them is missing, or no tensor.
    """
    tensors = [_find_tensor(information, name) for name in names]
    positions = information.entries.get(MROPE_POSITIONS)
    kinds = [(name, tensor.dtype, tensor.shape[1:]) for name, tensor in zip(names, tensors, strict=True)]
    digest, digests = hashlib.sha256(repr(kinds).encode()), []
    num_rows = min((tensor.shape[0] for tensor in tensors), default=0)
    for start in range(0, num_rows - block_size + 1, block_size):
        for tensor in tensors:
            digest.update(_rows(tensor, start, start + block_size))
        if positions is not None and positions.tensor is not None:
            for part in _columns(positions.tensor, start, start + block_size):
                digest.update(part)
        digests.append(digest.digest())
    return digests


def _find_tensor(information: AdditionalInformationPayload, name: str) -> TensorPayload:
    entry = information.entries.get(name)
    if entry is None or entry.tensor is None or not entry.tensor.shape:
        raise ValueError(f"token_information names {name!r}, which is no tensor [n, ...] of additional_information")
    return entry.tensor


def _rows(tensor: TensorPayload, start: int, stop: int) -> memoryview:
    size = len(tensor.data) // tensor.shape[0]
    return memoryview(tensor.data)[start * size : stop * size]


def _columns(tensor: TensorPayload, start: int, stop: int) -> list[memoryview]:
    """The columns of a tensor `[3, n]`, one for each row."""
    num_rows, num_columns = tensor.shape
    data, size = memoryview(tensor.data), len(tensor.data) // (num_rows * num_columns)
    offsets = [row * num_columns * size for row in range(num_rows)]
    return [data[offset + start * size : offset + stop * size] for offset in offsets]
