# SPDX-License-Identifier: Apache-2.0
"""`OmniLLM.generate(..., stream=True)`: what its caller reads, and what is left when the caller stops reading."""

import gc
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.entrypoints.fake_pipelines import (
    STAGES,
    WINDOWS,
    ask,
    by_request,
    check_story,
    is_idle,
    long,
    make_pipeline,
    running,
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


def test_events_of_several_prompts_come_as_they_happen(llm: OmniLLM) -> None:
    prompts = [ask(f"p{i}", fake_tokens=4 + i, fake_seconds=0.01, fake_only="writer") for i in range(4)]
    events = list(llm.generate(prompts, stream=True))
    stories = by_request(events)
    first = min(int(request_id) for request_id in stories)
    assert sorted(stories) == sorted(str(first + i) for i in range(4)), "numbered in the order of the prompts"
    at_once = llm.generate(prompts, use_tqdm=False)
    for i in range(4):
        end = check_story(stories[str(first + i)])
        text, speech = at_once[2 * i : 2 * i + 2]
        assert end.outputs[0].outputs[0].text == text.outputs[0].text
        assert end.outputs[0].outputs[0].token_ids == text.outputs[0].token_ids == list(range(4 + i))
        assert end.outputs[1].multimodal_output["rows"].equal(speech.multimodal_output["rows"])
    assert len([e for e in events if isinstance(e, ARSegmentEvent) and e.stage_id == 0]) > 4


def test_the_last_event_need_not_have_the_outputs(llm: OmniLLM) -> None:
    prompt = ask("p", fake_tokens=12, fake_seconds=0.01, fake_only="writer")
    *events, end = llm.generate(prompt, stream=True, keep_outputs=False)
    assert isinstance(end, CompletedEvent)
    text, speech = end.outputs
    for output in (text, speech):
        pieces = [e for e in events if isinstance(e, ARSegmentEvent) and e.stage_id == output.stage_id]
        assert len(pieces) > 2 and output.outputs[0].text == pieces[-1].text
        assert [stage.name for stage in output.stage_metrics] == ["writer", "speaker"]
        assert output.outputs[0].finish_reason == "stop"
    assert len(speech.multimodal_output["rows"]) < 12


def test_pieces_are_there_long_before_the_end(llm: OmniLLM) -> None:
    for event in llm.generate(long(), stream=True):
        assert isinstance(event, ARSegmentEvent)
        if event.stage_id == 1:  # The second stage works on what the first is still writing.
            break


def test_a_prompt_that_fails_ends_with_an_error_and_spares_the_others(llm: OmniLLM) -> None:
    prompts = [ask("good", fake_tokens=5), ask("bad", fake_tokens=5, fake_fail="speaker"), ask("fine")]
    stories = by_request(llm.generate(prompts, stream=True))
    good, bad, fine = (stories[key] for key in sorted(stories, key=int))
    check_story(good)
    check_story(fine)
    assert [event.is_terminal for event in bad] == [False] * (len(bad) - 1) + [True]
    end = bad[-1]
    assert isinstance(end, ErrorEvent) and isinstance(end.error, StageExecutionError)
    assert (end.error.request_id, end.error.stage_id) == (end.request_id, 1)
    assert "stage 1 (speaker)" in str(end.error)


def test_closing_the_iterator_aborts_the_rest(llm: OmniLLM) -> None:
    events = llm.generate([ask("done"), *[long(f"p{i}") for i in range(5)]], stream=True)
    for event in events:
        if isinstance(event, CompletedEvent):
            break
    events.close()  # type: ignore[attr-defined]
    assert is_idle(llm)
    assert list(events) == []
    assert len(llm.generate("still serves", use_tqdm=False)) == 2


def test_dropping_the_iterator_aborts_the_rest(llm: OmniLLM) -> None:
    events = llm.generate([long()] * 3, stream=True)
    next(events)
    del events
    assert is_idle(llm)


def test_an_iterator_that_nobody_reads_runs_nothing(llm: OmniLLM) -> None:
    threads = threading.active_count()
    events = llm.generate([long()] * 3, stream=True)
    assert threading.active_count() == threads and is_idle(llm)
    del events


def test_an_exception_in_the_loop_leaves_nothing_running(llm: OmniLLM) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in llm.generate([long()] * 3, stream=True):
            raise ZeroDivisionError
    assert is_idle(llm)


def interrupt_when_working(llm: OmniLLM) -> threading.Thread:
    """Ctrl-C, when a stage has work and the caller waits for it."""

    def interrupt() -> None:
        while not any(llm._pipeline.orchestrator.activity().values()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises; in what a shell runs in the background it may be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_aborts_and_the_pipeline_serves_on(llm: OmniLLM, stream: bool) -> None:
    prompts = [ask(f"p{i}", fake_seconds=60, fake_only="writer") for i in range(5)]
    thread = interrupt_when_working(llm)
    with pytest.raises(KeyboardInterrupt):
        list(llm.generate(prompts, use_tqdm=False, stream=stream))
    thread.join()
    assert is_idle(llm)
    text, _ = llm.generate("next", use_tqdm=False)
    assert text.outputs[0].text == "next>writer"


def test_two_iterators_can_be_read_in_turn(llm: OmniLLM) -> None:
    first, second = (llm.generate(ask(fake_tokens=9), stream=True) for _ in range(2))
    events = [event for pair in zip(first, second, strict=True) for event in pair]
    for story in by_request(events).values():
        check_story(story)


def test_a_wrong_prompt_is_raised_and_ends_the_others(llm: OmniLLM) -> None:
    with pytest.raises(InvalidRequestError, match="cannot output 'audios'"):
        list(llm.generate([long(), ask(modalities=["audios"])], stream=True))
    assert is_idle(llm)


def test_a_deadline_ends_with_its_own_error(tmp_path: Path) -> None:
    with running(OmniLLM, tmp_path, args={"request_timeout_s": 0.3, "log_stats": True}) as llm:
        *_, late = llm.generate(long(), stream=True)
        assert isinstance(late, ErrorEvent) and isinstance(late.error, RequestTimeoutError)
        assert is_idle(llm)
        with pytest.raises(RequestTimeoutError) as error:
            llm.generate([ask("quick"), long()], use_tqdm=False)
        assert [output.outputs[0].text for output in error.value.results] == ["quick>writer", "quick>writer>speaker"]


def test_more_prompts_than_the_pipeline_takes_at_once(tmp_path: Path) -> None:
    with running(OmniLLM, tmp_path, max_inflight=2, max_queued=1) as llm:
        stories = by_request(llm.generate([ask(f"p{i}") for i in range(20)], stream=True))
        assert len(stories) == 20
        for story in stories.values():
            check_story(story)


def stage_processes() -> set[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return {child for child in children if child.cmdline() and child.cmdline()[0].startswith("vllm_omni::")}


def test_a_pipeline_lives_as_long_as_its_events_are_read(tmp_path: Path) -> None:
    others = stage_processes()
    llm = make_pipeline(OmniLLM, tmp_path / "stages.yaml", args={}, **WINDOWS)
    gone = weakref.ref(llm)
    own = stage_processes() - others
    assert len(own) == 2
    events = llm.generate([ask(fake_tokens=5, fake_seconds=0.01), long()], stream=True)
    del llm
    for event in events:
        if isinstance(event, CompletedEvent):
            break
    cycle: list = [events]
    cycle.append(cycle)
    del events, cycle  # In the middle of the second prompt; the collector finds them.
    gc.collect()
    assert gone() is None
    assert not any(process.is_running() for process in own)


def test_close_ends_a_stream_with_an_error(tmp_path: Path) -> None:
    with running(OmniLLM, tmp_path) as llm:
        events = llm.generate(long(), stream=True)
        next(events)
        llm.close()
        *_, end = events
        assert isinstance(end, ErrorEvent) and isinstance(end.error, RequestAbortedError)
        with pytest.raises(PipelineClosedError):
            next(llm.generate("late", stream=True))


def test_a_pipeline_without_windows_streams_its_text_all_the_same(tmp_path: Path) -> None:
    with running(OmniLLM, tmp_path, STAGES) as llm:
        (story,) = by_request(
            llm.generate(ask(fake_tokens=12, fake_seconds=0.02, fake_only="writer"), stream=True)
        ).values()
    check_story(story)
    pieces = [event.stage_id for event in story if isinstance(event, ARSegmentEvent)]
    assert pieces.count(0) > 3 and pieces.count(1) == 1


def test_a_progress_bar_says_what_the_stages_are_doing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    prompts = [ask(f"p{i}", fake_seconds=0.3, fake_only="speaker") for i in range(5)]
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


def test_stages_that_read_along_are_shown_at_work(llm: OmniLLM) -> None:
    events = llm.generate(long(), stream=True)
    next(events)
    assert llm._pipeline.orchestrator.activity() == {"writer": 1, "speaker": 1}
    del events
    assert is_idle(llm) and llm._pipeline.orchestrator.activity() == {"writer": 0, "speaker": 0}
