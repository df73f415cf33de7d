# SPDX-License-Identifier: Apache-2.0
"""What the model runners do around a forward, on a device that is not the CPU: what is copied, and how often."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.simulated_device import DEVICE, SimulatedDevice, on_cpu
from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.core.sched.output import RequestWindow
from vllm_omni.model_executor.feedback import FedBack, FedBackRows
from vllm_omni.model_executor.feedback_buffers import SlotBuffer, SlotRows
from vllm_omni.model_executor.interfaces import RequestSpan
from vllm_omni.worker import feedback_ar_model_runner
from vllm_omni.worker.feedback_ar_model_runner import BatchSlots, FeedbackARModelRunner
from vllm_omni.worker.feedback_rows import RequestSlots, sort_rows
from vllm_omni.worker.gpu_ar_model_runner import RowTracker, SelectedRows
from vllm_omni.worker.gpu_diffusion_worker import DiffusionGPUWorker
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner, ModelStates, _to_host
from vllm_omni.worker.gpu_model_runner import extend_information
from vllm_omni.worker.guided_pairs import GuidedPairs
from vllm_omni.worker.step import HostCopy, RunnerStep


def is_host(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu"


def test_a_host_copy_waits_once(device: SimulatedDevice) -> None:
    tensors = [torch.arange(3, device=DEVICE), torch.arange(4.0)]
    copies = HostCopy(tensors).wait()
    assert all(is_host(copy) for copy in copies)
    assert copies[0].tolist() == [0, 1, 2] and copies[1] is tensors[1]
    assert device.num_waits == 0, "but for the event's"


def test_rows_of_a_step_leave_the_device(device: SimulatedDevice) -> None:
    spans = [RequestSpan("a", 0, 3, 0, 5, 5, SamplingParams()), RequestSpan("b", 3, 4, 2, 2, 3, SamplingParams())]
    tracker = RowTracker(emits_prompt_rows=True)
    rows = SelectedRows({"hidden": torch.arange(8.0, device=DEVICE).view(4, 2)}, tracker.select(spans))
    (nothing, (leaving,)) = tracker.emit(spans, rows.parts)
    assert nothing == [] and device.num_waits == 0 and leaving == {}
    rows.wait()
    assert is_host(leaving["hidden"]) and leaving["hidden"].tolist() == [[6, 7]]


def test_the_outputs_of_one_step_models_leave_the_device(device: SimulatedDevice) -> None:
    whole = torch.arange(6.0, device=DEVICE)
    first, second = _to_host([{"audio": whole[:2]}, {"audio": torch.empty(0, device=DEVICE)}])
    assert first["audio"].tolist() == [0, 1] and is_host(first["audio"]) and is_host(second["audio"])


def test_the_inputs_of_one_step_models_are_on_the_device(device: SimulatedDevice) -> None:
    runner: Any = SimpleNamespace(
        device=DEVICE,
        requests={"a": SimpleNamespace(prompt_token_ids=[0, 0]), "b": SimpleNamespace(prompt_token_ids=[0])},
        spans=[SimpleNamespace(req_id="a"), SimpleNamespace(req_id="b")],
    )
    ids, positions = on_cpu(GPUGenerationModelRunner._make_inputs(runner))
    assert ids.tolist() == [0, 0, 0] and positions.tolist() == [0, 1, 0]


def test_a_model_s_state_stays_on_its_device(device: SimulatedDevice) -> None:
    states, state = ModelStates(), torch.ones(2, device=DEVICE)
    states.save(RequestWindow("a", 0, False), {"state": state})
    assert states.load(RequestWindow("a", 1, True))["state"] is state


def test_a_chunk_is_appended_on_the_device_of_the_value(device: SimulatedDevice) -> None:
    information = {"rows": torch.ones(1, 2, device=DEVICE), "codes": torch.zeros(1)}
    extend_information(information, {"rows": torch.zeros(1, 2), "codes": torch.ones(1)})
    assert on_cpu(information["rows"]).tolist() == [[1, 1], [0, 0]] and is_host(information["codes"])


def test_weights_of_a_diffusion_stage_that_sleeps_are_on_the_host(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a stage has left out stay where they are."""
    emptied: list[bool] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(True))
    network, left_out = torch.nn.Linear(3, 3).to(DEVICE), torch.nn.Linear(3, 3)
    weights = [on_cpu(tensor).clone() for tensor in network.parameters()]
    worker = DiffusionGPUWorker("", DiTConfig(), None)
    worker._device, worker._runner = DEVICE, cast(Any, SimpleNamespace(networks=[network, left_out]))
    for _ in range(2):  # The second time nothing is left to do.
        worker.sleep(1)
        assert all(is_host(tensor.data) for tensor in (*network.parameters(), *left_out.parameters()))
        assert worker.sleep_level == 1 and emptied
    assert worker.wake_up() and worker.sleep_level == 0
    assert not any(is_host(tensor.data) for tensor in network.parameters())
    assert all(is_host(tensor.data) for tensor in left_out.parameters())
    assert all(torch.equal(on_cpu(new), old) for new, old in zip(network.parameters(), weights, strict=True))


def test_buffers_of_slots(device: SimulatedDevice) -> None:
    def fill(device: torch.device) -> list[torch.Tensor]:
        buffer = SlotBuffer((3,), 1, 64, dtype=torch.int64, device=device)
        rows = SlotRows(1, 64, torch.full((2,), -1.0).to(device))
        slots, indices = torch.tensor([0, 2], device=device), torch.tensor([70, 1], device=device)
        for slot in range(3):
            buffer.reserve(slot, 80)
            rows.begin(slot)
            rows.append(slot, torch.full((slot + 65, 2), float(slot)).to(device))
        buffer.write(slots, indices, torch.arange(6).view(2, 3).to(device))
        return [buffer.read(slots, indices), rows.read(slots, indices)]

    torch.testing.assert_close(on_cpu(fill(DEVICE)), fill(torch.device("cpu")))


class Strategy:
    """Adds a slot's number to what is fed back, and checks the device."""

    row_mask = None

    def prompt_rows(self, slot: int, start: int, stop: int) -> torch.Tensor:
        return torch.full((stop - start, 2), float(slot), device=DEVICE)

    def feed_back(self, rows: FedBackRows) -> FedBack:
        on_cpu([rows.token_ids, rows.slots, rows.frames])
        embeds = (rows.token_ids + rows.slots)[:, None].expand(-1, 2).float()
        codes = rows.token_ids[:, None] + rows.frames[:, None]
        return FedBack(embeds, {"codes": codes}, is_last=rows.token_ids == 30)

    def first_outputs(self, slot: int) -> dict[str, torch.Tensor]:
        return {"codes": torch.full((2, 1), slot, device=DEVICE)} if slot else {}

    replay = feed_back


class Talker:
    """The part of the talkers' runner between vLLM's preparations and the forward."""

    _write_inputs = FeedbackARModelRunner._write_inputs
    _take_rows = FeedbackARModelRunner._take_rows
    _to_device = FeedbackARModelRunner._to_device
    _unemitted = FeedbackARModelRunner._unemitted
    _first_outputs = FeedbackARModelRunner._first_outputs

    def __init__(self, ids: list[int]) -> None:
        self.device = DEVICE
        self.strategy = Strategy()
        self.slots = RequestSlots()
        self.input_batch = SimpleNamespace(
            req_ids=["a", "b", "c"],
            num_reqs=3,
            num_prompt_tokens=np.full(3, 2),
            num_tokens_no_spec=np.full(3, 2),
        )
        self.input_ids = SimpleNamespace(gpu=torch.tensor(ids, dtype=torch.int32, device=DEVICE))
        for req_id in self.input_batch.req_ids:
            self.slots.take(req_id)
        self._batch = BatchSlots()
        self._batch.update(self.input_batch.req_ids, self.slots, GuidedPairs(), DEVICE)
        self._step = RunnerStep()

    def step(self, computed: list[int], counts: list[int]) -> torch.Tensor:
        """The rows' input, of requests with prompts of two rows."""
        numbers = [np.array(values) for values in (computed, [2, 2, 2], counts)]
        embeds = torch.zeros(sum(counts), 2, device=DEVICE)
        self._write_inputs(sort_rows(self._batch.slots, self.slots.num_frames, *numbers), embeds)  # type: ignore[arg-type, type-var]
        return on_cpu(embeds)[:, 0]


def test_the_inputs_of_a_talkers_step_are_written_on_the_device(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts beside tokens that are fed back, tokens alone, and tokens that were fed back before."""
    # vLLM's CPU worker, which other tests import, replaces vLLM's function by one that copies nothing.
    copy = lambda array, device: torch.from_numpy(array).to(device, non_blocking=True)  # noqa: E731
    monkeypatch.setattr(feedback_ar_model_runner, "async_tensor_h2d", copy)
    talker = Talker([10, 20, 30, 40, 50])
    assert talker.step([0, 0, 2], [2, 2, 1]).tolist() == [0, 0, 1, 1, 52]
    assert talker._step.emitted is not None
    emitted, ended = talker._step.emitted.wait(3)
    assert [row and row["codes"].tolist() for row in emitted] == [None, [[1], [1]], [[50]]]
    assert ended == []
    assert talker.step([2, 2, 3], [1, 1, 1]).tolist() == [10, 21, 32]
    emitted, ended = talker._step.emitted.wait(3)
    assert ended == [2]
    assert all(row is not None and is_host(row["codes"]) for row in emitted)
    assert talker.step([2, 3, 3], [1, 1, 1]).tolist() == [10, 21, 32], "of which two are replays"
    assert device.num_waits == 0, "the CPU runs ahead of the device"
