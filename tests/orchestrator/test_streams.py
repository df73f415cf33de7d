# SPDX-License-Identifier: Apache-2.0
"""Events of running requests; windows of any size give the same outputs."""

from collections.abc import Iterator

import pytest
import torch

from tests.orchestrator.pipelines import Caller, fake_stage, fresh_stats, make_config, opened, texts
from vllm_omni.errors import RequestAbortedError, StageExecutionError
from vllm_omni.events import ARSegmentEvent, CompletedEvent, ErrorEvent, ImageProgressEvent

# writer makes tokens; speaker reads their rows three at a time (the first time two), with one row of context;
# singer reads the speaker's whole result.
STAGES = (
    fake_stage(0, "writer", (), "text"),
    fake_stage(1, "speaker", (0,), "audio"),
    fake_stage(2, "singer", (1,), "song"),
)
EDGE = {"from": 0, "to": 1, "window_size": 3, "first_window_size": 2, "left_context": 1, "unit": "rows"}
# Each piece is an event: without an interval, no delay puts several into one.
CONFIG = make_config(*STAGES, edges=[EDGE], ar={"min_flush_interval_ms": 0})


@pytest.fixture(scope="module")
def caller() -> Iterator[Caller]:
    with opened(CONFIG) as caller:
        yield caller


def segments(events: list, stage_id: int) -> list[ARSegmentEvent]:
    return [event for event in events if isinstance(event, ARSegmentEvent) and event.stage_id == stage_id]


def test_a_streaming_client_gets_segments_and_the_whole_output(caller: Caller) -> None:
    events = caller.events_of(caller.submit("p", streams=True, fake_tokens=10))
    written, spoken = segments(events, 0), segments(events, 1)
    assert len(written) > 2
    assert [token for event in written for token in event.tokens] == list(range(10))
    assert "".join(event.text for event in written) == "0 1 2 3 4 5 6 7 8 9 "
    assert [event.is_last for event in written] == [False] * (len(written) - 1) + [True]
    assert [event.is_last for event in spoken] == [False] * (len(spoken) - 1) + [True]
    assert all(event.multimodal_output == {} for event in written), "a text comes without what other stages read"
    assert sorted(event.ts for event in events) == [event.ts for event in events]
    end = events[-1]
    assert isinstance(end, CompletedEvent)
    assert end.outputs[0].outputs[0].token_ids == list(range(10))
    assert torch.equal(end.outputs[1].multimodal_output["rows"][:, 0], torch.arange(10.0))
    rows = torch.cat([event.multimodal_output["rows"] for event in spoken if event.multimodal_output])
    assert torch.equal(rows, end.outputs[1].multimodal_output["rows"])


def test_each_window_is_an_event(caller: Caller) -> None:
    events = caller.events_of(caller.submit("p", streams=True, fake_tokens=12))
    sizes = [event.multimodal_output["rows"].shape[0] for event in segments(events, 1) if event.multimodal_output]
    assert sizes == [2, 3, 3, 3, 1]


def test_without_streaming_there_is_only_the_last_event(caller: Caller) -> None:
    (end,) = caller.events_of(caller.submit("p", fake_tokens=7))
    assert isinstance(end, CompletedEvent)
    assert end.outputs[1].multimodal_output["rows"].shape == (7, 4)
    assert end.outputs[2].outputs[0].text == "0 1 2 3 4 5 6 >speaker>singer"


def test_windows_only_for_streaming_clients() -> None:
    config = make_config(*STAGES, edges=[EDGE | {"only_if_streaming": True}])
    with opened(config) as caller:
        ends = {
            streams: caller.events_of(caller.submit("p", streams=streams, fake_tokens=9))[-1]
            for streams in (False, True)
        }
    chunks = [[output.stage_metrics[1].num_chunks for output in end.outputs] for end in ends.values()]
    assert chunks[0] == [1, 1, 1] and min(chunks[1]) > 1
    whole, cut = (end.outputs[1].multimodal_output["rows"] for end in ends.values())
    assert torch.equal(whole, cut)


def test_progress_is_reported_and_is_not_part_of_the_result(caller: Caller) -> None:
    events = caller.events_of(caller.submit("p", ("song",), streams=True, fake_steps=4, fake_only="singer"))
    progress = [event for event in events if isinstance(event, ImageProgressEvent)]
    assert [(event.step, event.num_steps) for event in progress] == [(i, 4) for i in range(4)]
    assert [int(event.image[0, 0, 0]) for event in progress if event.image is not None] == [0, 1, 2, 3]
    assert texts(events[-1]) == ["p>writer>speaker>singer"]
    assert isinstance(events[-1], CompletedEvent) and events[-1].outputs[0].multimodal_output == {}


def test_each_image_of_a_request_has_its_progress(caller: Caller) -> None:
    request_id = caller.submit("p", ("song",), streams=True, fake_steps=2, fake_images=3, fake_only="singer")
    events = caller.events_of(request_id)
    progress = [event for event in events if isinstance(event, ImageProgressEvent)]
    assert [(event.step, event.index) for event in progress] == [(step, index) for step in (0, 1) for index in range(3)]
    end = events[-1]
    assert isinstance(end, CompletedEvent)
    assert [image.getpixel((0, 0)) for image in end.outputs[0].images] == [(0, 0, 0), (1, 1, 1), (2, 2, 2)]
    outputs = [event.multimodal_output for event in segments(events, 2) if event.multimodal_output]
    assert [output["image"].shape for output in outputs] == [(3, 2, 2, 3)]


def test_images_without_streaming(caller: Caller) -> None:
    (end,) = caller.events_of(caller.submit("p", ("song",), fake_steps=2, fake_images=2, fake_only="singer"))
    assert isinstance(end, CompletedEvent)
    assert [image.size for image in end.outputs[0].images] == [(2, 2)] * 2


def test_a_failure_during_a_stream_is_the_only_terminal_event(caller: Caller) -> None:
    request_id = caller.submit("p", streams=True, fake_tokens=5, fake_fail="singer")
    events = caller.events_of(request_id)
    assert isinstance(events[-1], ErrorEvent)
    error = events[-1].error
    assert isinstance(error, StageExecutionError) and error.stage_id == 2
    assert segments(events, 0), "segments before the failure are reported"
    assert [event.is_terminal for event in events[:-1]] == [False] * (len(events) - 1)


def test_windows_are_sent_before_the_source_ends_and_an_abort_between_two_ends_the_request(caller: Caller) -> None:
    request_id = caller.submit("p", streams=True, fake_tokens=1_000_000, fake_seconds=0.01, fake_only="writer")
    while not isinstance(event := caller.next(), ARSegmentEvent) or event.stage_id != 1:
        pass
    caller.orchestrator.abort([request_id])
    while not (event := caller.next()).is_terminal:
        pass
    assert isinstance(event, ErrorEvent) and isinstance(event.error, RequestAbortedError)
    caller.events_of(caller.submit("next", fake_tokens=2))  # nothing of the old one comes between
    assert [(stats.num_running, stats.queue_depth) for stats in fresh_stats(caller.orchestrator)] == [(0, 0)] * 3


@pytest.fixture(scope="module")
def reference(caller: Caller) -> CompletedEvent:
    end = caller.events_of(caller.submit("p", fake_tokens=23, fake_fail="none"))[-1]
    assert isinstance(end, CompletedEvent)
    return end


@pytest.mark.parametrize("size", [-1, 1, 4, 23, 100])
def test_every_window_size_gives_the_same_output(size: int, reference: CompletedEvent) -> None:
    edges = [
        {"from": 0, "to": 1, "window_size": size, "unit": "rows", "left_context": 2},
        {"from": 1, "to": 2, "window_size": size, "unit": "rows", "left_context": 1},
    ]
    config = make_config(*STAGES, edges=edges)
    with opened(config) as caller:
        for _ in range(5):
            caller.submit("p", fake_tokens=23, fake_fail="none")
        for event in caller.wait(5).values():
            assert texts(event)[0] == texts(reference)[0]
            assert isinstance(event, CompletedEvent)
            for ours, theirs in zip(event.outputs, reference.outputs, strict=True):
                assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
                assert ours.multimodal_output.keys() == theirs.multimodal_output.keys()
                for name, tensor in ours.multimodal_output.items():
                    assert torch.equal(tensor, theirs.multimodal_output[name])
