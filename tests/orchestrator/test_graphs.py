# SPDX-License-Identifier: Apache-2.0
"""Pipelines of any shape: chains, diamonds, several final stages, skipped stages, functions, and their payloads."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.orchestrator.pipelines import (
    Caller,
    error_of,
    fake_stage,
    function_stage,
    make_config,
    open_orchestrator,
    texts,
)
from vllm_omni.errors import StageConfigError, StageExecutionError
from vllm_omni.events import ARSegmentEvent, CompletedEvent
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput

Sources = Mapping[int, StageOutput]


@contextmanager
def running(*stages: dict, **runtime: Any) -> Iterator[Caller]:
    config = make_config(*stages, **runtime)
    orchestrator = open_orchestrator(config)
    try:
        yield Caller(orchestrator, config)
    finally:
        orchestrator.close()


def make_much(request: StageRequest, sources: Sources) -> dict[str, Any]:
    return {"text": "much", "wanted": torch.arange(3), "unwanted": torch.zeros(1000), "size": 3, "note": "n"}


def name_all(request: StageRequest, sources: Sources) -> dict[str, Any]:
    """The texts of the sources, by name."""
    (source,) = sources.values()
    names = [*source.tensors, *source.data, *(["text"] if source.completions else [])]
    return {"text": " ".join(sorted(names))}


def count_down(request: StageRequest, sources: Sources) -> Iterator[dict[str, Any]]:
    for i in range(request.options["count"], 0, -1):
        yield {"text": f"{i} ", "rows": torch.full((1,), i)}


def double_all(requests: Sequence[StageRequest], sources: Sequence[Sources]) -> list[dict[str, Any] | Exception]:
    """A batch function: outputs the batch size; refuses "bad", and raises on "broken"."""
    prompts = [request.prompt for request in requests]
    if "broken" in prompts:
        raise RuntimeError("broken batch")
    return [
        ValueError("bad prompt") if prompt == "bad" else {"text": f"{prompt}{prompt}", "batch": len(prompts)}
        for prompt in prompts
    ]


def test_a_diamond_waits_for_both_branches() -> None:
    stages = [
        fake_stage(0, "top"),
        fake_stage(1, "left", (0,)),
        fake_stage(2, "right", (0,)),
        fake_stage(3, "bottom", (1, 2), "text"),
    ]
    with running(*stages) as caller:
        caller.submit("slow", fake_seconds=0.2, fake_only="left")
        for i in range(20):
            caller.submit(f"p{i}")
        ends = caller.wait(21)
    assert texts(ends["r1"]) == ["slow>top>left+slow>top>right>bottom"]
    assert texts(ends["r21"]) == ["p19>top>left+p19>top>right>bottom"]


def test_a_stage_waits_only_for_sources_that_the_request_needs() -> None:
    """`joint` reads both writers, but a request for "text" alone does not need the second one's reader."""
    stages = [
        fake_stage(0, "thinker", (), "text"),
        fake_stage(1, "talker", (0,), "audio"),
        fake_stage(2, "painter", (0,), "image"),
    ]
    with running(*stages) as caller:
        for wanted in (("text",), ("audio",), ("image", "text"), ("text", "audio", "image")):
            caller.submit("p", wanted)
        ends = list(caller.wait(4).values())
    whole = {"text": "p>thinker", "audio": "p>thinker>talker", "image": "p>thinker>painter"}
    by_id = {end.request_id: end for end in ends}
    assert texts(by_id["r1"]) == [whole["text"]]
    assert texts(by_id["r2"]) == [whole["audio"]]
    assert texts(by_id["r3"]) == [whole["text"], whole["image"]]
    assert texts(by_id["r4"]) == [whole["text"], whole["audio"], whole["image"]]
    first = by_id["r1"]
    assert isinstance(first, CompletedEvent)
    assert [metrics.name for metrics in first.outputs[0].stage_metrics] == ["thinker"]


def test_two_final_stages_become_one_result() -> None:
    stages = [fake_stage(0, "a"), fake_stage(1, "b", (0,), "text"), fake_stage(2, "c", (0,), "audio")]
    with running(*stages) as caller:
        caller.submit("p", fake_bytes=100_000, fake_only="c")
        end = caller.wait_one()
    assert texts(end) == ["p>a>b", "p>a>c"]
    assert isinstance(end, CompletedEvent)
    assert end.outputs[0].multimodal_output == {}
    assert end.outputs[1].multimodal_output["bytes"].shape == (100_000,)


def test_only_fields_that_are_read_are_sent() -> None:
    maker = function_stage(0, "maker", make_much)
    every = function_stage(1, "every", name_all, (0,), "text")
    some = function_stage(2, "some", name_all, (0,), "audio") | {"reads": ["tensors.wanted", "data.size"]}
    none = function_stage(3, "none", name_all, (0,), "image") | {"reads": []}
    with running(maker, every, some, none) as caller:
        caller.submit("p")
        assert texts(caller.wait_one()) == ["note size text unwanted wanted", "size wanted", ""]
    with pytest.raises(StageConfigError, match=r"reads: 'tensor.wanted' is not one of .*tensors"):
        make_config(maker, some | {"reads": ["tensor.wanted"]})


def test_a_function_that_yields_streams() -> None:
    stages = [function_stage(0, "counter", count_down, (), "audio"), fake_stage(1, "reader", (0,), "text")]
    with running(*stages) as caller:
        events = caller.events_of(caller.submit("p", ("audio",), streams=True, count=3))
        pieces = [event for event in events if isinstance(event, ARSegmentEvent)]
        assert "".join(event.text for event in pieces) == "3 2 1 "
        assert len(pieces) >= 3
        caller.submit("p", count=2)
        assert texts(caller.wait_one()) == ["2 1 ", "2 1 >reader"]


def test_a_batch_function_fails_one_item_alone() -> None:
    slow = function_stage(0, "first", make_much)
    batch = fake_stage(1, "batch", (0,), "text", max_batch_size=4) | {
        "engine_type": "function",
        "batch_function": f"{__name__}.double_all",
    }
    with running(slow, batch) as caller:
        prompts = ["a", "bad", "b", "broken", "c", "d", "e", "f"]
        ids = {caller.submit(prompt): prompt for prompt in prompts}
        ends = caller.wait(len(prompts))
    for request_id, prompt in ids.items():
        if prompt in ("bad", "broken"):
            error = error_of(ends[request_id])
            assert isinstance(error, StageExecutionError)
            assert "stage 1 (batch): " in str(error) and prompt in str(error)
        else:
            assert texts(ends[request_id]) == [2 * prompt]


def test_invalid_windows_are_refused() -> None:
    stages = [fake_stage(0, "a"), fake_stage(1, "b", (0,), "text")]
    for window, message in (
        ({"window_size": 0}, "window_size 0 is neither -1"),
        ({"window_size": -2}, "window_size -2 is neither -1"),
        ({"window_size": 2, "first_window_size": -3}, "first_window_size -3"),
        ({"window_size": 2, "left_context": -1}, "left_context -1 is negative"),
        ({"window_size": 2, "right_context": -3}, "right_context -3 is negative"),
        ({"window_size": 9, "first_window_size": 2, "window_growth": 0.5}, "window_growth: Expected `float` > 1.0"),
    ):
        with pytest.raises(StageConfigError, match=message):
            make_config(*stages, edges=[{"from": 0, "to": 1, **window}])
