# SPDX-License-Identifier: Apache-2.0
"""Threads that only look whether they are to end do so seldom."""

import ctypes
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.worker.cpu_ar_worker import CPUARWorker
from vllm_omni.worker.gpu_ar_worker import GPUARWorker
from vllm_omni.worker.gpu_generation_worker import GPUGenerationWorker
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


@pytest.mark.parametrize("worker_class", [GPUARWorker, GPUGenerationWorker, CPUARWorker])
def test_threads_of_a_gpus_libraries_stay_punctual(worker_class: type[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    before, found = slack_ns(), []

    def init_device(worker: Worker) -> None:
        worker.device = torch.device("cpu")
        found.append(slack_ns_of_a_new_thread())

    for base in (Worker, CPUWorker):
        monkeypatch.setattr(base, "init_device", init_device)
    monkeypatch.setattr(worker_class, "_make_model_runner", lambda worker: None)
    worker = object.__new__(worker_class)
    worker.vllm_config = SimpleNamespace(additional_config={})  # type: ignore[assignment]
    worker.init_device()
    assert found == [200_000_000 if issubclass(worker_class, CPUWorker) else before]
