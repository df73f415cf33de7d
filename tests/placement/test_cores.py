# SPDX-License-Identifier: Apache-2.0
"""Which cores a stage runs on, and with how many threads."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.errors import StageConfigError
from vllm_omni.placement.cores import place_cores

from .machines import install, pipeline


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may use eight cores, and the user has not set the number of threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2, 10)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def place(*stages: dict[str, Any]) -> list[tuple[list[int] | None, int | None]]:
    return [(p.cpus, p.num_threads) for _, p in sorted(place_cores(pipeline(*stages), "none").items())]


@pytest.mark.parametrize(
    ("stages", "placed"),
    [
        # No process has `cpus`: none is bound, and they share the threads.
        ([{"engine_type": "fake"}], [(None, 8)]),
        ([{}, {}, {}], [(None, 2)] * 3),
        ([{}] * 6, [(None, 1)] * 6),
        # A vLLM engine leaves a core.
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


def make_checkpoint(folder: Path, **sizes: int) -> str:
    """The head of a checkpoint with a tensor of so many millions of bytes in each part."""
    folder.mkdir()
    parts, end = {}, 0
    for part, millions in sizes.items():
        begin, end = end, end + millions * 1_000_000
        parts[f"{part}.weight"] = {"dtype": "I8", "shape": [end - begin], "data_offsets": [begin, end]}
    head = json.dumps(parts).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(file, 8 + len(head) + end)  # Zeros, which take no room on a disk.
    return str(folder)


def make_text(folder: Path) -> dict[str, Any]:
    args = {"model_stage": "llm", "model": make_checkpoint(folder / "llm", model=270)}
    return {"stages": [{"engine_type": "AR", "engine_args": args}], "sources": {}}


def make_talk(folder: Path) -> dict[str, Any]:
    model = make_checkpoint(folder / "llm", model=270)
    stages: list[dict[str, Any]] = [
        {
            "engine_type": "function",
            "function": "builtins.str",
            "accepts": "audio",
            "engine_args": {"model_stage": "asr"},
        },
        {"engine_type": "AR", "engine_args": {"model_stage": "llm", "model": model}},
        {
            "engine_type": "function",
            "function": "builtins.str",
            "accepts": "text",
            "engine_args": {"model_stage": "tts"},
        },
    ]
    return {"stages": stages, "sources": {2: [1]}}


def make_heard(folder: Path) -> dict[str, Any]:
    """As talk, with a vLLM engine that transcribes."""
    talk = make_talk(folder)
    args = {"model_stage": "asr", "model": make_checkpoint(folder / "asr", model=145)}
    talk["stages"][0] = {"engine_type": "AR", "accepts": "audio", "engine_args": args}
    return talk


def make_omni(folder: Path, **sizes: int) -> dict[str, Any]:
    """Three stages of one checkpoint."""
    model = make_checkpoint(folder / "omni", **(sizes or {"thinker": 640, "talker": 250, "token2wav": 110}))
    stages: list[dict[str, Any]] = [
        {"engine_type": "AR", "engine_args": {"model_stage": "thinker", "model": model}},
        {"engine_type": "AR", "engine_args": {"model_stage": "talker", "model": model}},
        {"engine_type": "generation", "engine_args": {"model_stage": "code2wav", "model": model}},
    ]
    return {"stages": stages, "sources": {1: [0], 2: [1]}}


def make_small_omni(folder: Path) -> dict[str, Any]:
    return make_omni(folder, thinker=64, talker=25, token2wav=11)


@pytest.mark.parametrize(
    ("make", "num_cores", "threads"),
    [
        # A vLLM engine that is alone leaves a core.
        (make_text, 1, [1]),
        (make_text, 2, [1]),
        (make_text, 4, [3]),
        (make_text, 8, [7]),
        (make_text, 16, [15]),
        # By bytes of weights; a function, whose weights are unknown, has an equal part, and no more.
        (make_talk, 1, [1, 1, 1]),
        (make_talk, 2, [1, "1 to 2", 1]),
        (make_talk, 4, [1, "2 to 3", 1]),
        (make_talk, 8, [2, "4 to 7", 2]),
        (make_talk, 16, [5, "6 to 9", 5]),
        (make_heard, 2, ["1 to 2", "1 to 2", 1]),
        (make_heard, 4, ["1 to 3", "1 to 3", 1]),
        (make_heard, 8, ["2 to 5", "3 to 7", 2]),
        (make_heard, 16, ["3 to 5", "7 to 9", 5]),
        (make_omni, 2, ["1 to 2"] * 3),
        (make_omni, 4, ["2 to 3", "1 to 3", "1 to 3"]),
        (make_omni, 8, ["5 to 7", "2 to 7", "1 to 4"]),
        (make_omni, 16, ["10 to 15", "4 to 8", "1 to 4"]),
        # What others leave is of no use for few weights.
        (make_small_omni, 2, ["1 to 2", 1, 1]),
        (make_small_omni, 4, [2, 1, 1]),
        (make_small_omni, 8, [5, 2, 1]),
    ],
)
def test_threads_follow_from_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Any, num_cores: int, threads: list[int | str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    made = make(tmp_path)
    stages = [
        stage
        | {
            "stage_id": i,
            "final_output": True,
            "final_output_type": "text",
            "engine_input_source": made["sources"].get(i, []),
        }
        for i, stage in enumerate(made["stages"])
    ]
    for i in made["sources"]:
        if stages[i]["engine_type"] != "function":
            stages[i] |= {
                "custom_process_input_func": "vllm_omni.model_executor.stage_input_processor.StageInputProcessor"
            }
    config = parse_pipeline_config({"stage_args": stages}, "my.yaml")
    placements = place_cores(config, "")
    assert [placements[i].threads for i in sorted(placements)] == threads
    assert all(placement.cpus is None for placement in placements.values())


@pytest.mark.parametrize("content", [b"", b"12345678", b"\x02" + bytes(7) + b"[]"])
def test_a_checkpoint_that_cannot_be_read_is_unknown(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert place({"engine_args": {"model": str(tmp_path)}}, {}) == [(None, 4), (None, 4)]


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
