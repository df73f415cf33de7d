# SPDX-License-Identifier: Apache-2.0
"""An engine wakes the IO thread once for many items, and for every item."""

import os
import select
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.stage.running_engine import PATIENCE, is_readable
from vllm_omni.config.stage import OmniStageConfig, StageRuntimeConfig
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines.base import NewRequest, Outbox, Result


def result(request_id: str) -> Result:
    return Result(request_id, StageOutput(request_id=request_id, stage_id=0))


def ids(outbox: Outbox) -> list[str]:
    return [item.request_id for item in outbox.take_all() if isinstance(item, Result)]


def num_wakes(outbox: Outbox) -> int:
    """Wake-ups of the reader since it last read."""
    return os.eventfd_read(outbox.fileno())


def test_a_reader_that_has_not_read_yet_is_not_woken_again() -> None:
    outbox = Outbox()
    for number in range(64):
        outbox.put(result(str(number)))
    assert num_wakes(outbox) == 1
    assert ids(outbox) == [str(number) for number in range(64)]
    outbox.put(result("next"))
    assert is_readable(outbox)
    assert ids(outbox) == ["next"] and not is_readable(outbox)


def test_a_batch_wakes_the_reader_at_its_end() -> None:
    outbox = Outbox()
    with pytest.raises(ZeroDivisionError), outbox.batch():
        outbox.put(result("a"))
        outbox.put(result("b"))
        assert not is_readable(outbox)
        raise ZeroDivisionError
    assert num_wakes(outbox) == 1 and ids(outbox) == ["a", "b"]
    with outbox.batch():
        pass
    assert not is_readable(outbox)
    outbox.put(result("c"))
    assert is_readable(outbox)


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads switch at almost every instruction."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_the_reader_never_sleeps_while_items_wait(eager_threads: None) -> None:
    outbox = Outbox()
    names, count = "abc", 3000

    def write(name: str) -> None:
        for number in range(0, count, 3):
            outbox.put(result(f"{name}{number}"))
            with outbox.batch():
                outbox.put(result(f"{name}{number + 1}"))
                outbox.put(result(f"{name}{number + 2}"))

    threads = [threading.Thread(target=write, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    poller = select.poll()
    poller.register(outbox.fileno(), select.POLLIN)
    taken: list[str] = []
    while len(taken) < len(names) * count:
        assert poller.poll(PATIENCE * 1000), f"asleep with {len(taken)} items taken"
        taken += ids(outbox)
    for thread in threads:
        thread.join()
    for name in names:
        assert [item for item in taken if item[0] == name] == [f"{name}{number}" for number in range(count)]


def echo(requests: Sequence[StageRequest], sources: Sequence[Mapping[int, StageOutput]]) -> list[dict[str, Any]]:
    """A batch function."""
    return [{"text": request.request_id} for request in requests]


def test_a_batch_of_a_function_wakes_the_reader_once(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = Outbox()
    runtime = StageRuntimeConfig(max_batch_size=64)
    stage = OmniStageConfig(stage_id=0, engine_type="function", batch_function=f"{__name__}.echo", runtime=runtime)
    engine = stage.kind.make_engine("", outbox)
    engine.start()
    for number in range(64):
        engine.inbox.put(NewRequest(StageRequest(request_id=str(number))))
    assert engine.wait_for_work()
    put, was_awake = outbox.put, []
    monkeypatch.setattr(outbox, "put", lambda item: (was_awake.append(is_readable(outbox)), put(item)))
    engine.step()
    assert was_awake == [False] * 64 and num_wakes(outbox) == 1
