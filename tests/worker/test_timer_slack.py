# SPDX-License-Identifier: Apache-2.0
"""Threads that only look whether they are to end do so seldom."""

import ctypes
import sys
import threading

import pytest

from vllm_omni.worker.timer_slack import patient_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has a timer slack")
PR_GET_TIMERSLACK = 30


def slack_ns() -> int:
    return ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK)


def slack_ns_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(slack_ns()))
    thread.start()
    thread.join()
    return found[0]


def test_only_threads_started_inside_are_patient() -> None:
    before = slack_ns()
    with patient_threads():
        assert slack_ns_of_a_new_thread() == 200_000_000
    assert slack_ns() == before == slack_ns_of_a_new_thread()


def test_the_caller_is_punctual_again_after_an_error() -> None:
    before = slack_ns()
    with pytest.raises(ValueError), patient_threads():
        raise ValueError
    assert slack_ns() == before
