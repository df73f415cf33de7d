# SPDX-License-Identifier: Apache-2.0
"""Rows of cached blocks: what is kept, and what is removed."""

import torch

from vllm_omni.core.sched.row_cache import RequestRows, RowCache

SIZE = 4
ROWS = torch.arange(40.0).reshape(20, 2)
BLOCK_BYTES = SIZE * 2 * 4


def cache_of(num_blocks: int, max_blocks: int = 9, max_bytes: int = 1 << 20) -> RowCache:
    cache = RowCache(SIZE, max_blocks, max_bytes)
    for index in range(num_blocks):
        cache.add(index, {"hidden": ROWS[SIZE * index : SIZE * (index + 1)]})
    return cache


def test_rows_of_a_prefix():
    cache = cache_of(4)
    assert [cache.count(hashes) for hashes in ([0, 1, 2], [0, 9, 2], [9], [])] == [3, 1, 0, 0]
    assert torch.equal(cache.read([0, 1, 2, 9], 10)["hidden"], ROWS[:10])


def test_the_least_recently_used_are_removed_and_the_beginning_of_a_prompt_last():
    for limits in ({"max_blocks": 3}, {"max_bytes": 3 * BLOCK_BYTES}):
        cache = cache_of(3, **limits)
        cache.read([0, 1], 8)
        cache.add(3, {"hidden": ROWS[:4]})
        assert [cache.count([index]) for index in range(4)] == [1, 1, 0, 1]
        cache.add(4, {"hidden": ROWS[:4]})
        assert [cache.count([index]) for index in range(5)] == [1, 0, 0, 1, 1]
        assert cache.num_bytes == 3 * BLOCK_BYTES


def test_blocks_fill_as_rows_leave():
    cache, request = cache_of(0), RequestRows()
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 9), (9, 17)):
        rows = {"hidden": ROWS[start:stop]}
        assert request.leave(rows, num_tokens=stop) == rows
        request.keep_blocks(cache, range(stop // SIZE))
        assert cache.count(range(9)) == stop // SIZE
    assert torch.equal(cache.read(range(4), 16)["hidden"], ROWS[:16])


def test_rows_that_were_found_leave_first():
    cache = cache_of(2)
    request = RequestRows(cache.read([0, 1], 8), 8)
    assert torch.equal(request.leave({"hidden": ROWS[8:13]}, num_tokens=13)["hidden"], ROWS[:13])
    request.keep_blocks(cache, range(3))
    assert torch.equal(request.leave({"hidden": ROWS[13:14]}, num_tokens=14)["hidden"], ROWS[13:14])
    assert torch.equal(cache.read(range(3), 12)["hidden"], ROWS[:12])


def test_a_model_without_a_row_for_each_token_is_not_cached():
    cache, request = cache_of(0), RequestRows()
    request.leave({"hidden": ROWS[:8], "other": ROWS[:2]}, num_tokens=8)
    request.keep_blocks(cache, range(2))
    assert cache.count(range(2)) == 0
