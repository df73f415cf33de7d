# SPDX-License-Identifier: Apache-2.0
"""A thread that sleeps in a poll is woken by any other."""

import os
import select
import threading

import pytest

from vllm_omni.distributed.wake_up import WakeUp

PATIENCE_MS = 30_000


@pytest.fixture
def poller(wake_up: WakeUp) -> select.poll:
    poller = select.poll()
    poller.register(wake_up.fileno(), select.POLLIN)
    return poller


@pytest.fixture
def wake_up() -> WakeUp:
    return WakeUp()


def test_is_readable_until_it_is_cleared(wake_up: WakeUp, poller: select.poll) -> None:
    assert not poller.poll(0)
    wake_up.clear()
    for _ in range(3):
        wake_up.set()
    assert poller.poll(0)
    wake_up.clear()
    assert not poller.poll(0)


def test_wakes_a_thread_that_sleeps(wake_up: WakeUp, poller: select.poll) -> None:
    woken: list[int] = []
    sleeper = threading.Thread(target=lambda: woken.extend(fd for fd, _ in poller.poll(PATIENCE_MS)))
    sleeper.start()
    wake_up.set()
    sleeper.join()
    assert woken == [wake_up.fileno()]


def test_leaves_no_file_open_and_writes_to_no_other(wake_up: WakeUp) -> None:
    fd = wake_up.fileno()
    assert not os.get_inheritable(fd)
    wake_up.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ValueError, match="file descriptor"):
        wake_up.set()
    assert wake_up.fileno() == -1
