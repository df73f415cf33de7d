# SPDX-License-Identifier: Apache-2.0
"""`AsyncOmniLLM` on an event loop: concurrent requests, aborted at any moment."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.entrypoints.fake_pipelines import (
    WINDOWS,
    WRITER,
    check_events,
    fake_prompt,
    in_a_fork,
    is_idle,
    long_prompt,
    running,
    wait_until_free,
)
from tests.metrics.collector import Collector
from tests.orchestrator.pipelines import fresh_stats, function_stage
from vllm_omni import AsyncOmniLLM
from vllm_omni.errors import (
    InvalidRequestError,
    PipelineClosedError,
    PipelineFullError,
    RequestAbortedError,
    RequestTimeoutError,
    StageExecutionError,
)
from vllm_omni.events import ARSegmentEvent, CompletedEvent, ErrorEvent, OmniEvent
from vllm_omni.orchestrator.request import PipelineRequest
from vllm_omni.testing.media import example_prompts

GROUP = "llm"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmniLLM]:
    with running(AsyncOmniLLM, tmp_path_factory.mktemp("config"), args={"log_stats": True}, **WINDOWS) as llm:
        yield llm


async def read(events: AsyncIterator[OmniEvent]) -> list[OmniEvent]:
    return [event async for event in events]


def test_concurrent_requests_get_their_own_events(llm: AsyncOmniLLM) -> None:
    async def main() -> list[list[OmniEvent]]:
        prompts = [fake_prompt(f"p{i}", fake_tokens=3 + i, fake_seconds=0.01, fake_only="writer") for i in range(8)]
        return await asyncio.gather(*[read(llm.generate(prompt)) for prompt in prompts])

    for i, events in enumerate(asyncio.run(main())):
        end = check_events(events)
        assert end.outputs[0].outputs[0].token_ids == list(range(3 + i))
        assert len({event.request_id for event in events}) == 1


def test_a_fork_cannot_use_the_pipeline(llm: AsyncOmniLLM) -> None:
    answer = in_a_fork(llm, lambda: asyncio.run(read(llm.generate("p"))))
    assert answer.startswith("PipelineClosedError: the pipeline belongs to the process that this one is a fork of")
    (end,) = asyncio.run(read(llm.generate("p", stream=False)))
    assert isinstance(end, CompletedEvent)


def test_without_stream_there_is_only_the_last_event(llm: AsyncOmniLLM) -> None:
    (end,) = asyncio.run(read(llm.generate(fake_prompt(fake_tokens=5), stream=False)))
    assert isinstance(end, CompletedEvent) and end.outputs[0].outputs[0].text == "0 1 2 3 4 "


def test_a_finished_request_is_freed_without_the_garbage_collector(llm: AsyncOmniLLM) -> None:
    def count() -> int:
        return sum(isinstance(thing, PipelineRequest) for thing in gc.get_objects())

    async def main() -> None:
        for _ in range(5):
            await read(llm.generate(fake_prompt(fake_tokens=1, fake_only="writer")))

    gc.collect()
    before = count()
    gc.disable()
    try:
        asyncio.run(main())
        assert count() <= before + 1, "only the orchestrator's thread may still refer to the last one"
    finally:
        gc.enable()


def test_a_failure_is_the_last_event(llm: AsyncOmniLLM) -> None:
    *_, end = asyncio.run(read(llm.generate(fake_prompt(fake_tokens=5, fake_fail="speaker"), request_id="mine")))
    assert isinstance(end, ErrorEvent) and isinstance(end.error, StageExecutionError)
    assert end.request_id == end.error.request_id == "mine"


def test_an_id_may_be_used_twice_at_the_same_time(llm: AsyncOmniLLM) -> None:
    async def main() -> list[list[OmniEvent]]:
        return await asyncio.gather(
            *[read(llm.generate(fake_prompt(f"p{i}", fake_seconds=0.05), request_id="same")) for i in range(2)]
        )

    for i, events in enumerate(asyncio.run(main())):
        end = check_events(events)
        assert {event.request_id for event in events} == {"same"}
        assert end.outputs[0].request_id == "same"
        assert end.outputs[1].outputs[0].text == f"p{i}>writer>speaker"


async def abort_by_break(llm: AsyncOmniLLM) -> None:
    async for _ in llm.generate(long_prompt()):
        break


async def abort_by_aclose(llm: AsyncOmniLLM) -> None:
    async with aclosing(llm.generate(long_prompt())) as events:
        await anext(events)


async def abort_by_exception(llm: AsyncOmniLLM) -> None:
    with pytest.raises(ZeroDivisionError):
        async for _ in llm.generate(long_prompt()):
            raise ZeroDivisionError


async def abort_by_cancellation(llm: AsyncOmniLLM) -> None:
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in llm.generate(long_prompt()):
            started.set()

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def abort_by_timeout(llm: AsyncOmniLLM) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read(llm.generate(fake_prompt(fake_seconds=60))), 0.1)


@pytest.mark.parametrize(
    "abort", [abort_by_break, abort_by_aclose, abort_by_exception, abort_by_cancellation, abort_by_timeout]
)
def test_a_client_abort_leaves_nothing_running(
    abort: Callable[[AsyncOmniLLM], Coroutine[Any, Any, None]], llm: AsyncOmniLLM
) -> None:
    async def main() -> None:
        other = asyncio.create_task(
            read(llm.generate(fake_prompt(fake_tokens=20, fake_seconds=0.01, fake_only="writer")))
        )
        await asyncio.gather(*[abort(llm) for _ in range(3)])
        check_events(await other)
        assert is_idle(llm)

    asyncio.run(main())


def test_a_closed_event_loop_aborts_its_requests(llm: AsyncOmniLLM) -> None:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(llm.generate(long_prompt())))
    loop.close()
    while not is_idle(llm):  # detected at the next event
        pass


class SlowBuilder:
    """Preprocessing that blocks until `proceed` is set."""

    def __init__(self, llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_building = threading.Event()
        self.proceed = threading.Event()
        self.count = 0
        self._build = llm._pipeline.builder.build
        monkeypatch.setattr(llm._pipeline.builder, "build", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        self.is_building.set()
        assert self.proceed.wait(60)
        return self._build(*args, **kwargs)


async def until_set(event: threading.Event) -> None:
    await asyncio.to_thread(event.wait, 60)


def test_preprocessing_does_not_block_the_event_loop(llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        running = llm.generate(fake_prompt(fake_tokens=50, fake_seconds=0.01, fake_only="writer"))
        events = [await anext(running)]
        builder = SlowBuilder(llm, monkeypatch)
        waiting = asyncio.create_task(read(llm.generate("waits")))
        await until_set(builder.is_building)
        events += [event async for event in running]  # the other prompt is preprocessed meanwhile
        check_events(events)
        assert not waiting.done()
        builder.proceed.set()
        check_events(await waiting)

    asyncio.run(main())


def test_a_task_cancelled_during_preprocessing_submits_nothing(
    llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        builder = SlowBuilder(llm, monkeypatch)
        tasks = [asyncio.create_task(read(llm.generate(long_prompt()))) for _ in range(3)]
        await until_set(builder.is_building)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [asyncio.CancelledError] * 3
        builder.proceed.set()
        check_events(await read(llm.generate("next")))  # preprocessed after them
        assert builder.count == 2, "cancelled prompts are not preprocessed"
        assert is_idle(llm)

    asyncio.run(main())


def test_a_wrong_prompt_is_not_submitted(llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*args: Any, **kwargs: Any) -> None:
        pytest.fail("submitted")

    monkeypatch.setattr(llm._pipeline.orchestrator, "submit", submit)
    with pytest.raises(InvalidRequestError, match="cannot output 'audios'") as error:
        asyncio.run(read(llm.generate(fake_prompt(modalities=["audios"]), request_id="mine")))
    assert error.value.request_id == "mine"


def test_a_full_queue_refuses_with_retry_after(tmp_path: Path) -> None:
    async def main(llm: AsyncOmniLLM) -> None:
        running_request = llm.generate(long_prompt())
        await anext(running_request)
        wait = [asyncio.create_task(read(llm.generate(f"p{i}"))) for i in range(2)]
        await asyncio.sleep(0)  # lets the tasks start
        with pytest.raises(PipelineFullError, match=r"3 requests.*max_queued") as full:
            await anext(llm.generate("refused"))
        assert full.value.retry_after_s >= 1 and full.value.recoverable
        await running_request.aclose()
        for task in wait:
            check_events(await task)
        check_events(await read(llm.generate("room again")))
        assert is_idle(llm)

    with running(AsyncOmniLLM, tmp_path, args={"max_inflight": 2, "max_queued": 1}) as llm:
        asyncio.run(main(llm))


def test_prompts_in_preprocessing_count_towards_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(llm: AsyncOmniLLM) -> None:
        builder = SlowBuilder(llm, monkeypatch)
        admitted = [asyncio.create_task(read(llm.generate(f"p{i}"))) for i in range(2)]
        await until_set(builder.is_building)
        with pytest.raises(PipelineFullError, match="2 requests"):
            await anext(llm.generate("refused"))
        assert builder.count == 1, "refused before its prompt is preprocessed"
        builder.proceed.set()
        for task in admitted:
            check_events(await task)

    with running(AsyncOmniLLM, tmp_path, args={"max_inflight": 1, "max_queued": 1}) as llm:
        asyncio.run(main(llm))


def test_a_timeout_is_the_last_event(tmp_path: Path) -> None:
    with running(AsyncOmniLLM, tmp_path, args={"request_timeout_s": 0.3}) as llm:
        *_, end = asyncio.run(read(llm.generate(long_prompt())))
        assert isinstance(end, ErrorEvent) and isinstance(end.error, RequestTimeoutError)
        assert is_idle(llm)


def test_request_timeout_s_is_set_by_default_and_0_disables_it(llm: AsyncOmniLLM, tmp_path: Path) -> None:
    assert llm.builder.build("p", None, print).timeout_s == 6 * 3600
    with running(AsyncOmniLLM, tmp_path, args={"request_timeout_s": 0}) as without:
        assert without.builder.build("p", None, print).timeout_s is None
        check_events(asyncio.run(read(without.generate("p"))))


def test_close_ends_every_request_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(llm: AsyncOmniLLM) -> None:
        running_request = asyncio.create_task(read(llm.generate(fake_prompt(fake_seconds=60))))
        while not any(llm._pipeline.orchestrator.activity().values()):
            await asyncio.sleep(0)
        builder = SlowBuilder(llm, monkeypatch)
        preprocessed = [asyncio.create_task(read(llm.generate("p"))) for _ in range(2)]
        await until_set(builder.is_building)
        llm.close()
        builder.proceed.set()
        (end,) = await running_request
        assert isinstance(end, ErrorEvent) and isinstance(end.error, RequestAbortedError)
        for outcome in await asyncio.gather(*preprocessed, return_exceptions=True):
            assert isinstance(outcome, PipelineClosedError)
        assert builder.count == 1
        with pytest.raises(PipelineClosedError):
            await anext(llm.generate("late"))

    with running(AsyncOmniLLM, tmp_path) as llm:
        asyncio.run(main(llm))


def report_trace(request: Any, sources: Any) -> dict[str, Any]:
    return {"text": request.trace_headers.get("traceparent", "none")}


def test_trace_headers_reach_the_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    trace = "0af7651916cd43dd8448eb211c80319c"
    stages = [WRITER, function_stage(1, "tracer", report_trace, (0,), "trace")]
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}

    async def main(llm: AsyncOmniLLM) -> str:
        (end,) = await read(llm.generate("p", stream=False, trace_headers=headers))
        assert isinstance(end, CompletedEvent)
        return end.outputs[1].outputs[0].text

    with (
        closing(Collector()) as collector,
        running(AsyncOmniLLM, tmp_path, stages, {"otlp_traces_endpoint": collector.url}) as llm,
    ):
        assert asyncio.run(main(llm)).split("-")[1] == trace


# Real engines.

GREEDY = [{"temperature": 0.0, "max_tokens": 24}, {"temperature": 0.0, "max_tokens": 32, "detokenize": False}, None]


@pytest.fixture(scope="module")
def qwen(talking_async_llm: AsyncOmniLLM) -> AsyncOmniLLM:
    return talking_async_llm


@pytest.mark.slow
def test_concurrent_requests_equal_single_ones(qwen: AsyncOmniLLM, tiny_qwen3_omni_moe: Path) -> None:
    prompts = list(example_prompts(tiny_qwen3_omni_moe).values())

    async def main() -> None:
        alone = [(await read(qwen.generate(prompt, GREEDY, stream=False)))[-1] for prompt in prompts]
        results = await asyncio.gather(*[read(qwen.generate(prompt, GREEDY)) for prompt in prompts * 2])
        for reference, events in zip(alone * 2, results, strict=True):
            assert isinstance(reference, CompletedEvent)
            (text, speech), (text_alone, speech_alone) = check_events(events).outputs, reference.outputs
            assert text.outputs[0].text == text_alone.outputs[0].text
            assert text.outputs[0].token_ids == text_alone.outputs[0].token_ids
            audio, expected = (output.multimodal_output["audio"] for output in (speech, speech_alone))
            torch.testing.assert_close(audio, expected, rtol=0, atol=1e-4)

    asyncio.run(main())


def test_client_aborts_free_the_kv_cache(qwen: AsyncOmniLLM, tiny_qwen3_omni_moe: Path) -> None:
    prompt = example_prompts(tiny_qwen3_omni_moe)["text"]
    endless = [{"max_tokens": 900, "ignore_eos": True}, None, None]

    async def main() -> None:
        streams = [qwen.generate(prompt, endless) for _ in range(4)]
        for events in streams:
            assert isinstance(await anext(events), ARSegmentEvent)
        assert any(stage.kv_blocks_used for stage in fresh_stats(qwen._pipeline.orchestrator))
        for events in streams:
            await events.aclose()
        await asyncio.to_thread(wait_until_free, qwen)
        check_events(await read(qwen.generate(prompt, GREEDY)))

    asyncio.run(main())
