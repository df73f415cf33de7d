# SPDX-License-Identifier: Apache-2.0
"""The lock of the engines of a process is fair, and engines that share it have the outputs that they have alone."""

import threading

import torch

from tests.engine.running import greedy, random_prompts
from tests.stage.test_llm_engine import assert_equal, whole
from tests.stage.test_llm_generation import audio, begin, chunk, window
from vllm_omni.stage.engines.base import FairLock


def test_the_thread_that_has_waited_longest_is_next():
    lock, order = FairLock(), []

    def enter(name):
        with lock:
            order.append(name)

    threads = [threading.Thread(target=enter, args=(name,)) for name in range(4)]
    with lock:
        for number, thread in enumerate(threads, 1):
            thread.start()
            while len(lock._turns) < number:
                pass
    enter("again")
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, "again"]


def test_an_error_releases_the_lock():
    lock = FairLock()
    try:
        with lock:
            raise KeyError
    except KeyError:
        pass
    with lock:
        assert lock._is_taken
    assert not lock._is_taken


def test_only_one_thread_has_the_lock():
    lock, inside, overlaps = FairLock(), [], []

    def work():
        for _ in range(200):
            with lock:
                inside.append(1)
                overlaps.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [1] * 800


def test_engines_of_one_process(ar, collecting, vocoder):
    prompts = random_prompts(20, 70, 33)
    requests = [whole(str(index), prompt, greedy(30)) for index, prompt in enumerate(prompts)]
    ar.put(*requests)
    expected = ar.finish("0", "1", "2")
    ar.items.clear()
    ar.put(*requests)
    collecting.put(*requests)
    vocoder.put(begin("a", window(0, 3)))
    for start in range(3, 60, 3):
        vocoder.put(chunk("a", window(start, start + 3), is_last=start == 57))
    for running in (ar, collecting):
        for output, one in zip(running.finish("0", "1", "2"), expected, strict=True):
            assert_equal(output, one)
    (output,) = vocoder.finish("a")
    torch.testing.assert_close(output.tensors["audio"], audio(0, 60))
