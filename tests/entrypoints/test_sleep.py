# SPDX-License-Identifier: Apache-2.0
"""Sleep gives memory back, and what a pipeline computes afterwards is what it computed before."""

import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model

from tests.entrypoints.conftest import start
from tests.entrypoints.test_weight_updates import TIMEOUT_S, process, update, wait_for
from vllm_omni import OmniLLM
from vllm_omni.errors import ControlError, InvalidControlError
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

PICTURE = {"num_inference_steps": 2, "seed": 1, "height": 32, "width": 32}
NUM_CYCLES, NUM_CALLERS = 50, 4
MIB = 1 << 20


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two of a pipeline whose text encoder has some 150 MB."""
    folders = []
    for seed in (0, 1):
        folder = write_tiny_checkpoint("z_image", tmp_path_factory.mktemp("z_image") / str(seed), seed=seed)
        config = Qwen3Config.from_pretrained(folder / "text_encoder", intermediate_size=1 << 16)
        torch.manual_seed(seed)
        Qwen3Model(config).save_pretrained(folder / "text_encoder")
        folders.append(folder)
    return folders[0], folders[1]


@pytest.fixture(scope="module")
def painter(checkpoints: tuple[Path, Path]) -> Iterator[OmniLLM]:
    with OmniLLM(str(checkpoints[0])) as llm:
        yield llm


def paint(llm: OmniLLM) -> tuple[torch.Tensor, str]:
    """A picture, and the version of the weights that painted it."""
    (output,) = llm.generate("a hen", PICTURE, use_tqdm=False)
    return output.multimodal_output["image"], output.stage_metrics[0].weight_version


def resident_mib(llm: OmniLLM) -> float:
    """Of the stage; its last snapshot may be older than what it was told last."""
    pages = int(Path(f"/proc/{process(llm)}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


@pytest.mark.slow
def test_weights_are_dropped_and_loaded_again(painter: OmniLLM, checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    expected, version = paint(painter)
    awake = resident_mib(painter)
    painter.sleep(level=2)
    asleep = resident_mib(painter)
    assert painter.is_sleeping() and awake - asleep > 140
    with pytest.raises(InvalidControlError, match="it sleeps; wake_up takes its memory again"):
        painter.resume_generation()
    assert painter.is_paused()
    assert not painter.wake_up(["kv_cache"]) and painter.is_sleeping()
    assert painter.wake_up(["weights"]) and not painter.is_sleeping()
    assert abs(resident_mib(painter) - awake) < 30
    assert torch.equal(paint(painter)[0], expected)

    update(painter, checkpoints[1], "step-1")
    changed = paint(painter)
    assert changed[1] == "step-1" and not torch.equal(changed[0], expected)
    painter.sleep(level=2)
    assert painter.wake_up()
    again = paint(painter)
    assert again[1] == "step-1" and torch.equal(again[0], changed[0])

    folder = shutil.copytree(checkpoints[0], tmp_path / "weights")
    update(painter, folder, "step-2")
    assert paint(painter)[1] == "step-2"
    painter.sleep(level=2)
    shutil.rmtree(folder)
    with pytest.raises(ControlError, match=rf"stage 0 \(.*\): {folder}: there is no such folder"):
        painter.wake_up()
    assert painter.is_sleeping() and painter.is_paused()
    update(painter, checkpoints[0], version)  # New weights may come while it sleeps.
    assert painter.is_sleeping() and painter.wake_up()
    assert torch.equal(paint(painter)[0], expected)


@pytest.mark.slow
def test_what_cannot_sleep_is_refused_before_anything_is_done(painter: OmniLLM) -> None:
    for arguments, reason in (({}, "on the host already; use level 2"), ({"level": 2, "mode": "keep"}, "are kept")):
        with pytest.raises(InvalidControlError, match=rf"sleep: the memory of stage 0 \(.*{reason}"):
            painter.sleep(**arguments)
    with pytest.raises(InvalidControlError, match="level: 3 is not 0, 1 or 2"):
        painter.sleep(level=3)
    assert not painter.is_sleeping()


@pytest.mark.slow
def test_a_process_that_starts_is_asleep_as_the_one_before_was(painter: OmniLLM) -> None:
    expected, _ = paint(painter)
    awake, num_restarts = resident_mib(painter), painter.health()[0].num_restarts
    painter.sleep(level=2)
    os.kill(process(painter), signal.SIGKILL)
    wait_for(painter, "ready", num_restarts + 1)
    deadline = time.monotonic() + TIMEOUT_S
    while resident_mib(painter) > awake - 100:
        assert time.monotonic() < deadline
        time.sleep(0.01)  # seen from outside
    assert painter.is_sleeping() and painter.wake_up()
    assert torch.equal(paint(painter)[0], expected)


@pytest.mark.slow
def test_a_stage_that_dies_of_sleep_is_named_and_the_pipeline_is_awake(painter: OmniLLM) -> None:
    """A request that has come meanwhile is completed."""
    expected, _ = paint(painter)
    num_restarts = painter.health()[0].num_restarts
    painter.pause_generation(mode="wait")
    os.kill(process(painter), signal.SIGSTOP)  # So that it cannot answer before it dies.
    errors: list[Exception] = []
    pictures: list[torch.Tensor] = []

    def sleep() -> None:
        try:
            painter.sleep(level=2)
        except ControlError as error:
            errors.append(error)

    threads = [threading.Thread(target=sleep), threading.Thread(target=lambda: pictures.append(paint(painter)[0]))]
    for thread in threads:
        thread.start()
    while not painter._pipeline.orchestrator._control_calls._calls:
        pass
    os.kill(process(painter), signal.SIGKILL)
    threads[0].join()
    assert "died before it had done it" in str(errors[0]) and painter.is_paused()
    assert not painter._pipeline.orchestrator._control_calls._asleep
    painter.resume_generation()
    threads[1].join()
    wait_for(painter, "ready", num_restarts + 1)
    assert torch.equal(pictures[0], expected) and torch.equal(paint(painter)[0], expected)


def text(llm: OmniLLM) -> tuple[list[int], str]:
    greedy = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    (output,) = llm.generate("a hen and a fox", [greedy], use_tqdm=False)
    return output.outputs[0].token_ids, output.stage_metrics[0].weight_version


def are_alike(first: Any, second: Any) -> bool:
    """Joint calls of a diffusion model round differently."""
    if isinstance(first, torch.Tensor):
        return bool((first.int() - second.int()).abs().max() <= 1)
    return first == second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "level", "run"), [("z_image", 2, paint), ("qwen3", 0, text)], ids=["diffusion", "text"]
)
def test_many_cycles_under_load(
    name: str, level: int, run: Callable[[OmniLLM], tuple[Any, str]], tmp_path: Path
) -> None:
    """Of sleep, new weights and wake-up, while callers wait: each output is that of the weights that it names, and
    memory stays level."""
    folders = [write_tiny_checkpoint(name, tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    with OmniLLM(str(folders[0])) if name == "z_image" else start(folders[0], max_model_len=256) as llm:
        expected = {}
        for version, folder in (("1", folders[1]), ("0", folders[0])):
            update(llm, folder, version)
            expected[version] = run(llm)[0]
        assert not are_alike(expected["0"], expected["1"])
        is_over = threading.Event()
        outputs: list[tuple[Any, str]] = []

        def call() -> None:
            while not is_over.is_set():
                outputs.append(run(llm))

        callers = [threading.Thread(target=call) for _ in range(NUM_CALLERS)]
        for caller in callers:
            caller.start()
        memory = []
        for _, (version, folder) in zip(range(NUM_CYCLES), itertools.cycle(enumerate(folders)), strict=False):
            before = len(outputs)
            llm.sleep(level=level, mode="wait")
            update(llm, folder, str(version))
            assert llm.is_sleeping() and llm.wake_up()
            while len(outputs) == before and all(caller.is_alive() for caller in callers):
                time.sleep(0.001)  # seen from outside
            memory.append(resident_mib(llm))
        is_over.set()
        for caller in callers:
            caller.join()
        assert {version for _, version in outputs} == {"0", "1"} and len(outputs) > NUM_CYCLES
        assert all(are_alike(output, expected[version]) for output, version in outputs)
        assert max(memory[-10:]) - max(memory[5:15]) < 20, memory
