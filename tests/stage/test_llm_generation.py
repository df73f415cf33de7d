# SPDX-License-Identifier: Apache-2.0
"""A one-step stage runs the windows of a request in order, each in one batch with those of other requests."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
from vllm import SamplingParams

from tests.stage.running_engine import RunningEngine, chunk, new_request
from vllm_omni.core.sched.output import RequestWindow
from vllm_omni.inputs import StageInput
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines import llm_request
from vllm_omni.stage.engines.base import AbortRequest, NewRequest, Result, Stream
from vllm_omni.stage.engines.playback import PlayingTime

PARAMS = SamplingParams(max_tokens=1, detokenize=False)


def window(start: int, stop: int, **information) -> StageInput:
    """Codes `start..stop`."""
    codes = torch.arange(start, stop)
    return StageInput(prompt_token_ids=[0] * len(codes), additional_information={"codes": codes, **information})


def begin(request_id: str, stage_input: StageInput, is_last: bool = False, streams_output: bool = True) -> NewRequest:
    return new_request(request_id, stage_input, PARAMS, is_last=is_last, streams_output=streams_output)


def audio(start: int, stop: int) -> torch.Tensor:
    return (torch.arange(start, stop).float() * 0.5).repeat_interleave(2)


def assert_is_one_stream(output: StageOutput, num_codes: int, num_windows: int) -> None:
    """Each window has the state after those before it, none ran twice, and only the last is marked as last."""
    assert output.tensors["place"].tolist() == list(range(num_codes))
    assert output.tensors["ends"].tolist() == [False] * (num_windows - 1) + [True]


def assert_nothing_is_left(running: RunningEngine) -> None:
    engine = running.engine._engine
    runner = engine.model_executor.driver_worker.model_runner
    assert not engine.has_unfinished_requests() and not running.engine._requests
    assert (runner.requests, runner.omni_info, runner._windows, len(runner.states)) == ({}, {}, {}, 0)
    assert running.engine.kv_blocks() == (0, 0)


def test_windows_that_arrive_one_by_one(vocoder):
    vocoder.put(begin("a", window(0, 5)))
    vocoder.wait_asleep()
    vocoder.put(chunk("a", window(5, 8)))
    vocoder.wait_asleep()
    assert all(isinstance(item, Stream) for item in vocoder.items["a"])
    torch.testing.assert_close(vocoder.items["a"][1].output.tensors["audio"], audio(5, 8))
    vocoder.put(chunk("a", window(8, 12), is_last=True))
    (output,) = vocoder.finish("a")
    assert vocoder.counter.batch_sizes == [1, 1, 1]
    torch.testing.assert_close(output.tensors["audio"], audio(0, 12))
    assert_is_one_stream(output, 12, 3)
    last = vocoder.items["a"][-1]
    assert len(last.output.tensors["audio"]) == 8 and last.num_input_tokens == 12
    assert_nothing_is_left(vocoder)


@pytest.mark.parametrize("streams_output", [True, False])
def test_windows_of_several_requests_share_steps_and_are_sent_in_order(vocoder, streams_output):
    vocoder.put(
        begin("a", window(0, 30), streams_output=streams_output),
        chunk("a", window(30, 60)),
        chunk("a", window(60, 90), is_last=True),
        begin("b", window(100, 110), streams_output=streams_output),
        chunk("b", window(110, 130), is_last=True),
    )
    first, second = vocoder.finish("a", "b")
    torch.testing.assert_close(first.tensors["audio"], audio(0, 90))
    torch.testing.assert_close(second.tensors["audio"], audio(100, 130))
    assert_is_one_stream(first, 90, 3)
    assert_is_one_stream(second, 30, 2)
    assert vocoder.counter.batch_sizes == [2, 2, 1]
    assert [len(vocoder.items["a"]), len(vocoder.items["b"])] == ([3, 2] if streams_output else [1, 1])
    assert first.completions[0].finish_reason == "stop" and first.prompt_token_ids == [0] * 30
    assert [vocoder.items[request_id][-1].num_input_tokens for request_id in "ab"] == [90, 30]
    assert_nothing_is_left(vocoder)


def test_merged_windows_equal_the_whole(vocoder):
    vocoder.put(begin("whole", window(0, 20), is_last=True, streams_output=False))
    vocoder.put(begin("a", window(0, 1)), chunk("a", window(1, 13)), chunk("a", window(13, 20), is_last=True))
    output, whole = vocoder.finish("a", "whole")
    torch.testing.assert_close(output.tensors["audio"], whole.tensors["audio"])
    assert output.completions == whole.completions
    (result,) = vocoder.items["whole"]
    assert isinstance(result, Result) and result.num_input_tokens == 20


@pytest.mark.parametrize("streams_output", [True, False])
@pytest.mark.parametrize("waits", [True, False], ids=["after its windows", "at once"])
def test_an_input_that_ends_without_a_window(vocoder, streams_output, waits):
    vocoder.put(begin("a", window(0, 5), streams_output=streams_output), chunk("a", window(5, 9)))
    if waits:
        vocoder.wait_asleep()
        assert len(vocoder.items["a"]) == (2 if streams_output else 0)
    vocoder.put(chunk("a", is_last=True))
    (output,) = vocoder.finish("a")
    torch.testing.assert_close(output.tensors["audio"], audio(0, 9))
    assert_nothing_is_left(vocoder)


def test_an_invalid_window_fails_the_request_once(vocoder):
    vocoder.put(
        begin("a", window(0, 5)),
        chunk("a", window(5, 70)),
        chunk("a", window(70, 75)),
        chunk("a", window(75, 80), is_last=True),
        begin("b", window(0, 5), is_last=True),
    )
    (output,) = vocoder.finish("b")
    torch.testing.assert_close(output.tensors["audio"], audio(0, 5))
    assert len(vocoder.items["a"]) <= 2
    assert vocoder.error("a").invalid and "65" in vocoder.error("a").error
    assert_nothing_is_left(vocoder)


@pytest.mark.parametrize("streams_output", [True, False])
def test_a_window_that_raises_fails_only_its_request(vocoder, streams_output):
    vocoder.put(begin("good", window(0, 5), streams_output=streams_output))
    vocoder.put(begin("bad", window(0, 5), streams_output=False), chunk("bad", window(5, 6, **{"raise": True})))
    vocoder.put(chunk("good", window(5, 9), is_last=True), begin("other", window(7, 9), is_last=True))
    vocoder.wait_asleep()
    assert "told to raise" in vocoder.error("bad").error and len(vocoder.items["bad"]) == 1
    torch.testing.assert_close(vocoder.output("other").tensors["audio"], audio(7, 9))
    torch.testing.assert_close(vocoder.output("good").tensors["audio"], audio(0, 9))
    assert_is_one_stream(vocoder.output("good"), 9, 2)
    vocoder.put(chunk("bad", window(6, 7), is_last=True))
    vocoder.wait_asleep()
    assert len(vocoder.items["bad"]) == 1
    assert_nothing_is_left(vocoder)


@pytest.mark.parametrize("place", ["in the scheduler", "on the way to the host"])
def test_a_window_that_is_lost_after_the_forward_runs_again_from_its_start(vocoder, monkeypatch, place):
    engine = vocoder.engine._engine
    lost: list[int] = []

    def once_in(owner: object, name: str) -> None:
        method = getattr(owner, name)

        def lossy(*args):
            if len(vocoder.items["a"]) == 0 or lost:
                return method(*args)
            lost.append(1)
            raise RuntimeError("lost")

        monkeypatch.setattr(owner, name, lossy)

    vocoder.put(begin("a", window(0, 5)), begin("b", window(0, 2)))
    vocoder.wait_asleep()
    if place == "in the scheduler":
        once_in(engine._core.scheduler, "update_from_output")
    else:
        once_in(engine.model_executor.driver_worker.model_runner, "_make_output")
    vocoder.put(chunk("a", window(5, 9)), chunk("b", window(2, 4), is_last=True))
    vocoder.put(chunk("a", window(9, 12), is_last=True))
    first, second = vocoder.finish("a", "b")
    assert lost
    assert_is_one_stream(first, 12, 3)
    assert_is_one_stream(second, 4, 2)
    torch.testing.assert_close(first.tensors["audio"], audio(0, 12))
    assert_nothing_is_left(vocoder)


def test_the_last_window_is_marked_if_the_end_was_known_at_its_start(vocoder):
    vocoder.put(begin("a", window(0, 5)), chunk("a", window(5, 9)), chunk("a", is_last=True))
    vocoder.put(begin("b", window(0, 5)))
    vocoder.wait_asleep()
    vocoder.put(chunk("b", is_last=True))
    first, second = vocoder.finish("a", "b")
    assert first.tensors["ends"].tolist() == [False, True] and second.tensors["ends"].tolist() == [False]
    assert_nothing_is_left(vocoder)


def test_an_error_of_vllm_is_an_error_of_the_request(vocoder, monkeypatch):
    scheduler = vocoder.engine._engine._core.scheduler
    monkeypatch.setattr(scheduler, "max_prompt_tokens", 8)
    vocoder.put(begin("a", window(0, 5)), chunk("a", window(5, 15)), begin("b", window(0, 3), is_last=True))
    (output,) = vocoder.finish("b")
    torch.testing.assert_close(output.tensors["audio"], audio(0, 3))
    assert "vLLM ended the request" in vocoder.error("a").error
    assert_nothing_is_left(vocoder)


def test_an_abort_drops_all_windows(vocoder):
    vocoder.put(begin("a", window(0, 30)), chunk("a", window(30, 60)), AbortRequest("a"), chunk("a", window(60, 61)))
    vocoder.put(begin("b", window(0, 3)))
    vocoder.wait_asleep()
    vocoder.put(AbortRequest("b"), chunk("b", is_last=True))
    vocoder.wait_asleep()
    assert "a" not in vocoder.items and len(vocoder.items["b"]) == 1
    assert_nothing_is_left(vocoder)


def extensible(start: int, stop: int) -> StageInput:
    return msgspec.structs.replace(window(start, stop), is_extensible=True)


def test_windows_that_pile_up_become_one(vocoder):
    vocoder.put(
        begin("a", extensible(0, 4)),
        chunk("a", extensible(4, 9)),
        chunk("a", extensible(9, 20)),
        chunk("a", extensible(20, 30), is_last=True),
    )
    (output,) = vocoder.finish("a")
    assert vocoder.counter.batch_sizes == [1, 1]
    torch.testing.assert_close(output.tensors["audio"], audio(0, 30))
    assert_is_one_stream(output, 30, 2)
    first = vocoder.items["a"][0]
    assert first.output.tensors["place"].tolist() == [0, 1, 2, 3]  # The first one waits for no other.
    assert vocoder.items["a"][-1].num_input_tokens == 30


def test_merged_windows_are_no_larger_than_a_batch(vocoder):
    vocoder.put(begin("a", extensible(0, 4)), *(chunk("a", extensible(n, n + 25)) for n in (4, 29, 54)))
    vocoder.put(chunk("a", is_last=True))
    (output,) = vocoder.finish("a")
    assert [len(item.output.tensors.get("place", ())) for item in vocoder.items["a"]] == [4, 50, 25]
    torch.testing.assert_close(output.tensors["audio"], audio(0, 79))
    assert_nothing_is_left(vocoder)


@pytest.fixture
def dues(vocoder, monkeypatch):
    """When windows are due, by their id; the clock stands at 1000.0 seconds."""
    due: dict[str, float] = {}

    def set_window(engine_id: str, window: RequestWindow) -> None:
        due[engine_id] = window.due
        original(engine_id, window)

    original = vocoder.engine._engine.set_window
    monkeypatch.setattr(vocoder.engine._engine, "set_window", set_window)
    monkeypatch.setattr(vocoder.engine, "_playing_time", PlayingTime())
    monkeypatch.setattr(llm_request, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    clock = [1000.0]
    return due, clock


def test_a_window_is_due_when_those_before_it_have_been_played(vocoder, dues):
    due, clock = dues
    vocoder.put(begin("a", window(0, 10)), chunk("a", window(10, 30)), chunk("a", window(30, 35)))
    vocoder.wait_asleep()
    assert due == pytest.approx({"a/0": 1000.0, "a/1": 1000.2, "a/2": 1000.6})
    clock[0] = 1010.0  # The client has waited since 1000.7, and plays what comes now.
    vocoder.put(chunk("a", window(35, 40)))
    vocoder.wait_asleep()
    vocoder.put(chunk("a", window(40, 41), is_last=True))
    vocoder.finish("a")
    assert (due["a/3"], due["a/4"]) == pytest.approx((1000.7, 1010.1))


def test_a_request_that_is_not_streamed_is_due_when_it_could_have_been_played(vocoder, dues):
    due, _ = dues
    vocoder.put(begin("a", window(0, 10), is_last=True, streams_output=False))
    vocoder.finish("a")
    assert due == {"a/0": 1000.0}  # Nothing is known of how long its codes play.
    vocoder.put(begin("b", window(0, 50), streams_output=False), chunk("b", window(50, 60), is_last=True))
    vocoder.finish("b")
    assert due["b/0"] == pytest.approx(1001.0) and due["b/1"] == pytest.approx(1001.2)
