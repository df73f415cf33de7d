# SPDX-License-Identifier: Apache-2.0
"""Stages of a machine that take the threads which no other one uses."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import get_num_threads

from vllm_omni.placement.shared_cores import SharedCores, set_num_threads
from vllm_omni.placement.spec import StagePlacement


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = get_num_threads()
    yield
    set_num_threads(before)


def make(folder: Path, instance_id: int, least: int, most: int) -> SharedCores:
    return SharedCores(folder, instance_id, StagePlacement(num_threads=least, max_threads=most))


def threads_of(cores: SharedCores) -> int:
    cores.take()
    return get_num_threads()


def test_a_stage_that_is_busy_alone_has_all_threads(tmp_path: Path) -> None:
    first, second = make(tmp_path, 0, 3, 7), make(tmp_path, 1, 2, 7)
    assert threads_of(first) == 7
    assert threads_of(second) == 2, "its own part: the other one is in a step"
    assert threads_of(first) == 5
    assert threads_of(second) == 2
    first.release()
    assert threads_of(second) == 7


def test_a_stage_with_threads_of_its_own_is_counted(tmp_path: Path) -> None:
    model, function = make(tmp_path, 0, 1, 2), make(tmp_path, 1, 1, 1)
    set_num_threads(3)
    function.take()
    assert get_num_threads() == 3, "not touched"
    assert threads_of(model) == 1
    function.release()
    assert threads_of(model) == 2


def test_what_a_dead_process_used_is_free(tmp_path: Path) -> None:
    make(tmp_path, 0, 2, 7).take()
    other = make(tmp_path, 1, 2, 7)
    assert threads_of(other) == 2
    make(tmp_path, 0, 2, 7)  # It replaces the dead one.
    assert threads_of(other) == 7
