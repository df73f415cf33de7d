# SPDX-License-Identifier: Apache-2.0
"""Which cores a stage runs on, and with how many threads."""

import os
from typing import Any

import pytest

from vllm_omni.errors import StageConfigError
from vllm_omni.placement.cores import place_cores

from .machines import install, pipeline


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may use eight cores, and the user has not set the number of threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2, 10)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def place(*stages: dict[str, Any]) -> list[tuple[list[int] | None, int | None]]:
    return [(p.cpus, p.num_threads) for _, p in sorted(place_cores(pipeline(*stages)).items())]


@pytest.mark.parametrize(
    ("stages", "placed"),
    [
        # No process has `cpus`: none is bound, and they share the threads.
        ([{"engine_type": "fake"}], [(None, 8)]),
        ([{}, {}, {}], [(None, 2)] * 3),
        ([{}] * 6, [(None, 1)] * 6),
        # A vLLM engine that shares with no other stage leaves a core.
        ([{}], [(None, 7)]),
        # Lists, which may overlap; the others share the rest.
        ([{"cpus": "2-4"}, {"cpus": "4,9"}], [([2, 3, 4], 3), ([4, 9], 2)]),
        ([{"cpus": "3-5"}, {}, {}], [([3, 4, 5], 3), ([2, 6, 7, 8, 9], 2), ([2, 6, 7, 8, 9], 2)]),
        # Numbers get cores of their own, in order, around the lists.
        ([{"cpus": 2}, {"cpus": "3"}, {"cpus": 3}, {}], [([2, 4], 2), ([3], 1), ([5, 6, 7], 3), ([8, 9], 1)]),
        ([{"cpus": 8}], [(list(range(2, 10)), 8)]),
        # No core is left: the other processes are not bound.
        ([{"cpus": "2-9"}, {}], [(list(range(2, 10)), 8), (None, 1)]),
        # Each replica has its own.
        ([{"replicas": 2, "cpus": 2}, {}], [([2, 3], 2), ([6, 7, 8, 9], 3), ([4, 5], 2)]),
        ([{"replicas": 2, "cpus": ["2", "3-4"]}], [([2], 1), ([3, 4], 2)]),
    ],
)
def test_cores(stages: list[dict[str, Any]], placed: list[tuple[list[int] | None, int | None]]) -> None:
    assert place(*stages) == placed


def test_the_user_s_number_of_threads_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert place({"cpus": 2}, {}) == [([2, 3], None), ([4, 5, 6, 7, 8, 9], None)]


def test_with_an_accelerator_only_stages_with_cpus_have_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 1 << 30)
    assert place({}, {}) == [(None, None)] * 2
    assert place({"cpus": 2}, {}) == [([2, 3], 2), ([4, 5, 6, 7, 8, 9], None)]


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (
            [{}, {"cpus": "0-3"}],
            r"stage 1 \(b\): runtime.cpus names 0, 1, but this process may run on 2, 3, 4, 5, 6, 7",
        ),
        ([{"cpus": 5}, {"cpus": 4}], r"need 9 cores \(a 5, b 4\), but of 8 .* 8 are left for them; set smaller"),
        ([{"cpus": 5}, {"cpus": "2-5"}], r"need 5 cores \(a 5\), but of 8 that this process may use 4 are left"),
    ],
)
def test_cores_that_do_not_exist(stages: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(StageConfigError, match=says):
        place(*stages)
