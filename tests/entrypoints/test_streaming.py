# SPDX-License-Identifier: Apache-2.0
"""`OmniLLM.generate(..., stream=True)`: its events, and client aborts."""

import gc
import os
import re
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.fake_pipelines import (
    STAGES,
    WINDOWS,
    by_request,
    check_events,
    descendants,
    fake_prompt,
    in_a_fork,
    is_idle,
    long_prompt,
    make_pipeline,
    running,
    set_deadline,
)
from vllm_omni import OmniLLM
from vllm_omni.errors import (
    InvalidRequestError,
    PipelineClosedError,
    RequestAbortedError,
    RequestTimeoutError,
    StageExecutionError,
)
from vllm_omni.events import ARSegmentEvent, CompletedEvent, ErrorEvent


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OmniLLM]:
    with running(OmniLLM, tmp_path_factory.mktemp("config"), args={"log_stats": True}, **WINDOWS) as llm:
        yield llm


def test_events_of_several_prompts(llm: OmniLLM) -> None:
    prompts = [fake_prompt(f"p{i}", fake_tokens=4 + i, fake_seconds=0.01, fake_only="writer") for i in range(4)]
    events = list(llm.generate(prompts, stream=True))
    by_id = by_request(events)
    first = min(int(request_id) for request_id in by_id)
    assert sorted(by_id) == sorted(str(first + i) for i in range(4)), "numbered in the order of the prompts"
    at_once = llm.generate(prompts, use_tqdm=False)
    for i in range(4):
        end = check_events(by_id[str(first + i)])
        text, speech = at_once[2 * i : 2 * i + 2]
        assert end.outputs[0].outputs[0].text == text.outputs[0].text
        assert end.outputs[0].outputs[0].token_ids == text.outputs[0].token_ids == list(range(4 + i))
        assert end.outputs[1].multimodal_output["rows"].equal(speech.multimodal_output["rows"])
    assert len([e for e in events if isinstance(e, ARSegmentEvent) and e.stage_id == 0]) > 4


def test_a_fork_cannot_use_the_pipeline_and_leaves_it_alone(llm: OmniLLM) -> None:
    reason = "the pipeline belongs to the process that this one is a fork of"
    error = f"PipelineClosedError: {reason}; make a new one"
    for work in (lambda: llm.generate("p"), lambda: list(llm.generate("p", stream=True)), llm.stats):
        assert in_a_fork(llm, work) == error
    assert in_a_fork(llm, lambda: [(stage.state, stage.last_death) for stage in llm.health()]) == str(
        [("dead", reason)] * 2
    )
    assert in_a_fork(llm, lambda: (llm.close(), llm.is_open)) == "(None, False)"
    assert llm.generate("p", use_tqdm=False)[0].outputs[0].text == "p>writer"


def test_keep_outputs_false_leaves_out_earlier_segments(llm: OmniLLM) -> None:
    prompt = fake_prompt("p", fake_tokens=12, fake_seconds=0.01, fake_only="writer")
    *events, end = llm.generate(prompt, stream=True, keep_outputs=False)
    assert isinstance(end, CompletedEvent)
    text, speech = end.outputs
    for output in (text, speech):
        segments = [e for e in events if isinstance(e, ARSegmentEvent) and e.stage_id == output.stage_id]
        assert len(segments) > 2 and output.outputs[0].text == segments[-1].text
        assert [stage.name for stage in output.stage_metrics] == ["writer", "speaker"]
        assert output.outputs[0].finish_reason == "stop"
    assert len(speech.multimodal_output["rows"]) < 12


def test_segments_arrive_before_the_end(llm: OmniLLM) -> None:
    for event in llm.generate(long_prompt(), stream=True):
        assert isinstance(event, ARSegmentEvent)
        if event.stage_id == 1:  # The second stage started before the first one finished.
            break


def test_a_failed_prompt_ends_with_an_error_event_and_does_not_affect_others(llm: OmniLLM) -> None:
    prompts = [
        fake_prompt("good", fake_tokens=5),
        fake_prompt("bad", fake_tokens=5, fake_fail="speaker"),
        fake_prompt("fine"),
    ]
    by_id = by_request(llm.generate(prompts, stream=True))
    good, bad, fine = (by_id[key] for key in sorted(by_id, key=int))
    check_events(good)
    check_events(fine)
    assert [event.is_terminal for event in bad] == [False] * (len(bad) - 1) + [True]
    end = bad[-1]
    assert isinstance(end, ErrorEvent) and isinstance(end.error, StageExecutionError)
    assert (end.error.request_id, end.error.stage_id) == (end.request_id, 1)
    assert "stage 1 (speaker)" in str(end.error)


def test_closing_the_iterator_aborts_the_rest(llm: OmniLLM) -> None:
    events = llm.generate([fake_prompt("done"), *[long_prompt(f"p{i}") for i in range(5)]], stream=True)
    for event in events:
        if isinstance(event, CompletedEvent):
            break
    events.close()  # type: ignore[attr-defined]
    assert is_idle(llm)
    assert list(events) == []
    assert len(llm.generate("still serves", use_tqdm=False)) == 2


def test_dropping_the_iterator_aborts_the_rest(llm: OmniLLM) -> None:
    events = llm.generate([long_prompt()] * 3, stream=True)
    next(events)
    del events
    assert is_idle(llm)


def test_an_iterator_that_is_not_read_runs_nothing(llm: OmniLLM) -> None:
    threads = set(threading.enumerate())
    events = llm.generate([long_prompt()] * 3, stream=True)
    assert set(threading.enumerate()) <= threads and is_idle(llm)
    del events


def test_an_exception_in_the_loop_leaves_nothing_running(llm: OmniLLM) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in llm.generate([long_prompt()] * 3, stream=True):
            raise ZeroDivisionError
    assert is_idle(llm)


@contextmanager
def interrupted_when_working(llm: OmniLLM) -> Iterator[None]:
    """Ctrl-C while a stage has a request; none after this block."""
    has_ended = threading.Event()

    def interrupt() -> None:
        while not any(llm._pipeline.orchestrator.activity().values()):
            if has_ended.wait(0.05):
                return
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises; shells make background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_aborts_and_the_pipeline_continues(llm: OmniLLM, stream: bool) -> None:
    prompts = [fake_prompt(f"p{i}", fake_seconds=60, fake_only="writer") for i in range(5)]
    with pytest.raises(KeyboardInterrupt), interrupted_when_working(llm):
        list(llm.generate(prompts, use_tqdm=False, stream=stream))
    assert is_idle(llm)
    text, _ = llm.generate("next", use_tqdm=False)
    assert text.outputs[0].text == "next>writer"


def test_two_iterators_are_read_in_turn(llm: OmniLLM) -> None:
    first, second = (llm.generate(fake_prompt(fake_tokens=9), stream=True) for _ in range(2))
    events = [event for pair in zip(first, second, strict=True) for event in pair]
    for own in by_request(events).values():
        check_events(own)


def test_a_wrong_prompt_ends_alone(llm: OmniLLM) -> None:
    prompts = [fake_prompt("a"), fake_prompt(modalities=["audios"]), fake_prompt("b")]
    events = list(llm.generate(prompts, stream=True))
    ends = {event.prompt_index: event for event in events if event.is_terminal}
    assert [type(ends[index]) for index in range(3)] == [CompletedEvent, ErrorEvent, CompletedEvent]
    assert str(ends[1].error).startswith("prompt 1: this pipeline cannot output 'audios'")  # type: ignore[attr-defined]
    assert {event.prompt_index for event in events} == {0, 1, 2}
    assert is_idle(llm)


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        (None, {}, "prompts must be a string, a dict, or a list of these, not NoneType"),
        (5, {}, "prompts must be .* not int"),
        (b"hello", {}, "prompts must be .* not bytes"),
        ((text for text in "ab"), {}, "prompts must be .* not generator"),
        ([None], {}, "a prompt is a string or a dict .* not NoneType"),
        ([[5]], {}, "a prompt is a string or a dict .* not list"),
        ({"prompt": 5}, {}, "prompt must be a string, not int"),
        ({"prompt_token_ids": ["x"]}, {}, "prompt_token_ids must be integers, not 'x'"),
        ({"prompt": "p", "chat_params": 5}, {}, "chat_params must be vLLM's ChatParams, not int"),
        ({5: "hello"}, {}, "unknown key 5 in a prompt"),
        ({"prompt": "p", "modalities": [5]}, {}, "cannot output 5"),
        ({"prompt": "p", "additional_information": "ada"}, {}, "additional_information must be a dict, not str"),
        ({"prompt": "p", "multi_modal_data": [5]}, {}, "multi_modal_data must be a dict.* not list"),
        ({"messages": "hello"}, {}, "messages must be a list of messages, not str"),
        ("p", {"sampling_params_list": 5}, "sampling_params_list must be a list, not int"),
        ("p", {"sampling_params_list": "xy"}, "sampling_params_list must be a list, not str"),
        ("p", {"sampling_params_list": [5, None]}, "stage 'writer' takes SamplingParams.* not int"),
        ("p", {"lora_request": "adapter"}, "lora_request must be a LoRARequest of vLLM, not str"),
        ("p", {"priority": "high"}, "priority must be an integer, not str"),
        ("p", {"priority": [1, 2]}, "priority has 2 entries for 1 prompts"),
    ],
)
def test_a_wrong_argument_is_named(llm: OmniLLM, prompts: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate(prompts, use_tqdm=False, **options)


def test_a_timeout_ends_with_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(OmniLLM, tmp_path, args={"request_timeout_s": 0.3, "log_stats": True}) as llm:
        set_deadline(llm, monkeypatch, "quick", None)
        *_, late = llm.generate(long_prompt(), stream=True)
        assert isinstance(late, ErrorEvent) and isinstance(late.error, RequestTimeoutError)
        assert is_idle(llm)
        with pytest.raises(RequestTimeoutError) as error:
            llm.generate([fake_prompt("quick"), long_prompt()], use_tqdm=False)
        assert [output.outputs[0].text for output in error.value.results] == ["quick>writer", "quick>writer>speaker"]


def test_more_prompts_than_max_inflight(tmp_path: Path) -> None:
    with running(OmniLLM, tmp_path, max_inflight=2, max_queued=1) as llm:
        by_id = by_request(llm.generate([fake_prompt(f"p{i}") for i in range(20)], stream=True))
        assert len(by_id) == 20
        for events in by_id.values():
            check_events(events)


def test_a_pipeline_stays_open_while_its_events_are_read(tmp_path: Path) -> None:
    others = descendants("vllm_omni::")
    llm = make_pipeline(OmniLLM, tmp_path / "stages.yaml", args={}, **WINDOWS)
    reference = weakref.ref(llm)
    own = descendants("vllm_omni::") - others
    assert len(own) == 2
    events = llm.generate([fake_prompt(fake_tokens=5, fake_seconds=0.01), long_prompt()], stream=True)
    del llm
    for event in events:
        if isinstance(event, CompletedEvent):
            break
    cycle: list = [events]
    cycle.append(cycle)
    del events, cycle  # during the second prompt; the garbage collector frees them
    gc.collect()
    assert reference() is None
    assert not any(process.is_running() for process in own)


def test_close_ends_a_stream_with_an_error(tmp_path: Path) -> None:
    with running(OmniLLM, tmp_path) as llm:
        events = llm.generate(long_prompt(), stream=True)
        next(events)
        llm.close()
        *_, end = events
        assert isinstance(end, ErrorEvent) and isinstance(end.error, RequestAbortedError)
        with pytest.raises(PipelineClosedError):
            next(llm.generate("late", stream=True))


def test_a_pipeline_without_windows_streams_text(tmp_path: Path) -> None:
    with running(OmniLLM, tmp_path, STAGES) as llm:
        (events,) = by_request(
            llm.generate(fake_prompt(fake_tokens=12, fake_seconds=0.02, fake_only="writer"), stream=True)
        ).values()
    check_events(events)
    segments = [event.stage_id for event in events if isinstance(event, ARSegmentEvent)]
    assert segments.count(0) > 3 and segments.count(1) == 1


def test_the_progress_bar_shows_the_requests_of_stages(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    prompts = [fake_prompt(f"p{i}", fake_seconds=0.3, fake_only="speaker") for i in range(5)]
    with running(OmniLLM, tmp_path) as llm:
        capsys.readouterr()
        llm.generate(prompts)
        shown = capsys.readouterr().err.split("\r")
        llm.generate(prompts[:1], use_tqdm=False)
        list(llm.generate(prompts[:1], stream=True))
        assert capsys.readouterr().err == ""
        list(llm.generate(prompts[:1], stream=True, use_tqdm=True))
        assert "1/1" in capsys.readouterr().err
    assert "Processed prompts:   0%" in shown[1] and "0/5" in shown[1]
    assert any(re.search(r"writer 0, speaker [1-5]\]", line) for line in shown)
    assert "100%" in shown[-1] and "5/5" in shown[-1] and "speaker" not in shown[-1]


def test_activity_includes_stages_with_streamed_input(llm: OmniLLM) -> None:
    events = llm.generate(long_prompt(), stream=True)
    next(events)
    assert llm._pipeline.orchestrator.activity() == {"writer": 1, "speaker": 1}
    del events
    assert is_idle(llm) and llm._pipeline.orchestrator.activity() == {"writer": 0, "speaker": 0}
