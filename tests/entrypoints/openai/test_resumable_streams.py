# SPDX-License-Identifier: Apache-2.0
"""Clients that lose the connection of a streamed answer, and read on; and those that do not come back."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI, Response
from openai.types.chat import ChatCompletionChunk

from tests.clock import pass_time
from tests.entrypoints.fake_pipelines import WRITER, is_idle, running
from tests.entrypoints.int16_sound import assert_sounds_like
from tests.entrypoints.openai.audio_stage import AUDIO_STAGE
from tests.entrypoints.openai.fake_server import AppRequest, FakeServer, over_http
from tests.entrypoints.openai.media_apps import MODEL, with_flags
from tests.entrypoints.openai.small_apps import make_app
from tests.entrypoints.openai.test_openai_client import GREEDY, QUESTION, Answer
from tests.entrypoints.openai.test_slow_clients import LONG, NUM_BYTES, PATH, Reader, wait_for_slot, wait_until_made
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai import resumable_streams
from vllm_omni.entrypoints.openai.http_protocol import http_protocol
from vllm_omni.entrypoints.openai.sse import ClosingResponse, comment_line, sse_line, sse_response
from vllm_omni.errors import PipelineFullError

GROUP = "llm"
FLAG = "--resumable-streams"
LINES = [sse_line({"number": number}, "made" if number % 2 else "") for number in range(6)]
EVENTS = [b"id: %d\n%b" % (number, line) for number, line in enumerate(LINES, start=1)]
PIECES = [bytes([number]) * 1000 for number in range(6)]
MIB = 1 << 20


class Source:
    """The parts of answers, as a test gives them.

    Attributes:
        num_taken: Parts that were sent.
        is_closed: The endpoint has ended.
    """

    def __init__(self) -> None:
        self._parts: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.num_taken, self.is_closed = 0, asyncio.Event()

    def add(self, *parts: bytes | Exception | None) -> None:
        """None is the end."""
        for part in parts:
            self._parts.put_nowait(part)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        try:
            while (part := await self._parts.get()) is not None:
                if isinstance(part, Exception):
                    raise part
                yield part
                self.num_taken += 1
        finally:
            self.is_closed.set()


def app_of(source: Source, **flags: Any) -> FastAPI:
    app = make_app(resumable_streams=True, **flags)
    app.include_router(resumable_streams.router)

    @app.post("/v1/lines")
    async def lines() -> Response:
        return sse_response(source.stream(), 0)

    @app.post("/v1/pieces")
    async def pieces() -> Response:
        return ClosingResponse(source.stream(), "audio/pcm", {"X-Sample-Rate": "24000"})

    return app


def held_by(app: FastAPI) -> int:
    num_bytes: int = app.state.omni_sessions.budget.num_bytes
    return num_bytes


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)  # There is no event for it.


async def received(request: AppRequest, num_chunks: int) -> None:
    await until(lambda: len(request.chunks) >= num_chunks)


async def complete(request: AppRequest) -> bytes:
    await asyncio.wait([request._task])
    return b"".join(request.chunks)


async def asked(app: FastAPI, path: str, **options: Any) -> tuple[int, str]:
    """The status of a request, and the message of its error."""
    request = AppRequest(app, path, **options)
    answer = await complete(request)
    return request.status, httpx.Response(200, content=answer).json()["error"]["message"] if answer else ""


async def begun(app: FastAPI, source: Source, *parts: bytes, path: str = "/v1/lines") -> tuple[AppRequest, str]:
    """A request that has received these parts, and the path of its stream."""
    request = AppRequest(app, path, {})
    source.add(*parts)
    await received(request, len(parts))
    return request, f"/v1/streams/{request.headers['x-stream-id']}"


def test_a_client_goes_on_after_the_last_event_that_it_received() -> None:
    async def main() -> None:
        source = Source()
        app = app_of(source)
        first, path = await begun(app, source, *LINES[:3])
        first.drop()
        source.add(*LINES[3:5])
        resumed = AppRequest(app, path, headers={"Last-Event-ID": "2"})  # The third was lost on its way.
        await received(resumed, 3)
        source.add(LINES[5], None)
        assert b"".join(first.chunks[:2]) + await complete(resumed) == b"".join(EVENTS)
        for name in ("content-type", "cache-control", "x-stream-id"):
            assert resumed.headers[name] == first.headers[name]
        await asyncio.wait([first._task])

    asyncio.run(main())


def test_a_client_goes_on_within_a_piece_of_sound() -> None:
    async def main() -> None:
        source = Source()
        app = app_of(source)
        first, path = await begun(app, source, *PIECES[:3], path="/v1/pieces")
        first.drop()
        resumed = AppRequest(app, f"{path}?starting_after=1234")
        source.add(*PIECES[3:], None)
        assert b"".join(first.chunks)[:1234] + await complete(resumed) == b"".join(PIECES)
        assert resumed.headers["x-sample-rate"] == "24000"
        again = AppRequest(app, path)
        assert await complete(again) == b"".join(PIECES)

    asyncio.run(main())


def test_events_are_whole_and_comments_have_no_number() -> None:
    async def main() -> None:
        source = Source()
        app = app_of(source)
        sent = LINES[0] + comment_line("step 1") + LINES[1]
        request, path = await begun(app, source, sent[:5], sent[5:40], sent[40:], LINES[2])
        source.add(None)
        whole = await complete(request)
        assert whole == EVENTS[0] + comment_line("step 1") + EVENTS[1] + EVENTS[2]
        assert await complete(AppRequest(app, path, headers={"Last-Event-ID": "1"})) == EVENTS[1] + EVENTS[2]

    asyncio.run(main())


def test_two_clients_read_the_same() -> None:
    async def main() -> None:
        source = Source()
        app = app_of(source)
        first, path = await begun(app, source, *LINES[:2])
        second = AppRequest(app, path)
        third = AppRequest(app, f"{path}?starting_after=1")
        await received(third, 1)
        source.add(*LINES[2:4])
        await received(second, 4)
        first.drop()
        source.add(*LINES[4:], None)
        assert await complete(second) == b"".join(EVENTS) == EVENTS[0] + await complete(third)

    asyncio.run(main())


def test_errors_name_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        source = Source()
        app = app_of(source, api_key=["one", "other"])
        one, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "other"))
        request = AppRequest(app, "/v1/lines", {}, headers=one)
        source.add(*LINES[:3])
        await received(request, 3)
        path = f"/v1/streams/{request.headers['x-stream-id']}"
        unknown = await asked(app, "/v1/streams/stream-1", headers=one)
        assert unknown[0] == 404 and "there is no stream 'stream-1' of this API key" in unknown[1]
        for method in ("GET", "DELETE"):
            status, message = await asked(app, path, headers=other, method=method)
            assert status == 404 and "there is no stream" in message
        assert (await asked(app, path))[0] == 401
        status, message = await asked(app, path, headers=one | {"Last-Event-ID": "4"})
        assert status == 400 and "has 3 events so far; it cannot go on after 4" in message
        status, message = await asked(app, path, headers=one | {"Last-Event-ID": "a"})
        assert status == 400 and "last-event-id" in message.lower()
        assert (await asked(app, f"{path}?starting_after=-1", headers=one))[0] == 400
        source.add(None)
        await complete(request)
        assert await asked(app, f"{path}?starting_after=3", headers=one) == (204, ""), "nothing is missing"

        monkeypatch.setattr(resumable_streams, "WINDOW_BYTES", 2500)
        request = AppRequest(app, "/v1/pieces", {}, headers=one)
        source.add(*PIECES)
        await received(request, 6)
        path = f"/v1/streams/{request.headers['x-stream-id']}"
        status, message = await asked(app, f"{path}?starting_after=2999", headers=one)
        assert status == 410 and "has dropped its first 3000 bytes; it cannot go on after 2999" in message
        resumed = AppRequest(app, f"{path}?starting_after=3000", headers=one)
        source.add(None)
        assert await complete(resumed) == b"".join(PIECES[3:])

    asyncio.run(main())


def test_what_is_not_streamed_is_as_before() -> None:
    async def main() -> None:
        source = Source()
        app = app_of(source)
        whole = AppRequest(app, "/v1/echo", {"text": "a"})
        assert await whole.end() == {"text": "a", "number": 0.0} and "x-stream-id" not in whole.headers
        refused = AppRequest(app, "/v1/echo", {"number": 1})
        await refused.end()
        assert refused.status == 400

    asyncio.run(main())


def test_a_stream_that_fails_is_not_taken_for_the_whole() -> None:
    async def main() -> None:
        source = Source()
        app = app_of(source)
        request, path = await begun(app, source, PIECES[0], path="/v1/pieces")
        request.drop()
        resumed = AppRequest(app, path)
        await received(resumed, 1)
        source.add(PIECES[1], RuntimeError("a defect"))
        with pytest.raises(RuntimeError, match="a defect"):
            await request._task
        assert await complete(resumed) == PIECES[0] + PIECES[1] and not resumed.is_complete

    asyncio.run(main())


def test_a_request_that_nobody_resumes_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        source = Source()
        app = app_of(source)
        first, path = await begun(app, source, LINES[0])
        first.drop()
        resumed = AppRequest(app, path)
        await received(resumed, 1)
        await pass_time(2 * resumable_streams.KEEP_S, monkeypatch)
        source.add(LINES[1])
        await received(resumed, 2)
        assert not source.is_closed.is_set() and held_by(app) > 0, "somebody reads"
        resumed.drop()
        await asyncio.wait([resumed._task])
        assert not source.is_closed.is_set()
        await pass_time(resumable_streams.KEEP_S, monkeypatch)
        await source.is_closed.wait()
        await asyncio.wait([first._task])
        assert (await asked(app, path))[0] == 404 and held_by(app) == 0

    asyncio.run(main())


@pytest.mark.parametrize("has_left", [True, False])
def test_a_stream_that_is_deleted_is_aborted_when_nobody_reads_it(has_left: bool) -> None:
    async def main() -> None:
        source = Source()
        app = app_of(source)
        request, path = await begun(app, source, LINES[0])
        if has_left:
            request.drop()
        assert await asked(app, path, method="DELETE") == (204, "")
        if not has_left:
            source.add(LINES[1])
            await received(request, 2)
            assert not source.is_closed.is_set()
            request.drop()
        await asyncio.wait_for(source.is_closed.wait(), 60)
        await asyncio.wait([request._task])
        assert (await asked(app, path))[0] == 404 and held_by(app) == 0

    asyncio.run(main())


def test_while_nobody_reads_only_so_much_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    window = 20_000
    monkeypatch.setattr(resumable_streams, "WINDOW_BYTES", window)
    pieces = [bytes([number]) * 1000 for number in range(100)]

    async def main() -> None:
        source = Source()
        app = app_of(source)
        request, path = await begun(app, source, *pieces[:10], path="/v1/pieces")
        request.drop()
        source.add(*pieces[10:], None)
        await until(lambda: source.num_taken >= 10 + window // 1200)
        for _ in range(100):
            await asyncio.sleep(0)
        assert source.num_taken < 10 + window // 1000 and held_by(app) < 2 * window + 10_000
        resumed = AppRequest(app, f"{path}?starting_after=500")
        assert await complete(resumed) == b"".join(pieces)[500:]
        await asyncio.wait([request._task])
        assert held_by(app) < window + 10_000

    asyncio.run(main())


def test_streams_that_have_ended_make_room() -> None:
    limits = dict.fromkeys(("max_total_realtime_bytes", "max_client_realtime_bytes"), 120_000)

    async def main() -> None:
        source = Source()
        app = app_of(source, **limits)
        budget = app.state.omni_sessions.budget
        paths = []
        for _ in range(3):
            request, path = await begun(app, source, bytes(30_000), path="/v1/pieces")
            source.add(None)
            await complete(request)
            paths.append(path)
        assert [await asked(app, f"{path}?starting_after=30000") for path in paths] == [(204, "")] * 3
        running, path = await begun(app, source, bytes(30_000), path="/v1/pieces")
        assert [(await asked(app, f"{path}?starting_after=30000"))[0] for path in paths] == [404, 204, 204]
        share = budget.share("127.0.0.1")
        share.set(60_000)  # Of a session.
        assert [(await asked(app, f"{path}?starting_after=30000"))[0] for path in paths] == [404, 404, 404]
        with pytest.raises(PipelineFullError):
            share.set(100_000)

        source.add(bytes(30_000))  # There is no room: it goes on, and cannot be resumed.
        await received(running, 2)
        assert (await asked(app, path))[0] == 404 and held_by(app) == 60_000
        source.add(bytes(30_000))
        await received(running, 3)
        source.is_closed.clear()  # Earlier answers have set it.
        running.drop()
        await asyncio.wait_for(source.is_closed.wait(), 60)
        await asyncio.wait([running._task])

    asyncio.run(main())


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmniLLM]:
    with running(AsyncOmniLLM, tmp_path_factory.mktemp("writer"), (WRITER,), max_inflight=1, max_queued=0) as llm:
        yield llm


def test_a_lost_client_holds_its_slot_until_it_is_lost_for_good(
    writer: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = FakeServer(writer, FLAG).app
    endless = {"stream": True, "options": {"fake_tokens": 100_000, "fake_seconds": 0.01}}

    async def main() -> None:
        request = AppRequest(app, "/v1/generate", endless)
        await request.first_chunk()
        request.drop()
        (stream,) = app.state.omni_streams._streams.values()
        await until(lambda: not stream.num_readers)
        assert (await asked(app, "/v1/generate", body={}))[0] == 429
        await pass_time(resumable_streams.KEEP_S, monkeypatch)
        await request.disconnect()
        assert is_idle(writer)
        again = AppRequest(app, "/v1/generate", {"options": {"text": "hello"}})
        assert await again.end() == {"text": "hello>writer"}

    asyncio.run(main())


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmniLLM]:
    folder = tmp_path_factory.mktemp("config")
    with running(AsyncOmniLLM, folder, [AUDIO_STAGE], max_inflight=1, max_queued=0) as llm:
        yield llm


def test_a_client_that_reads_nothing_is_ended(llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_streams, "KEEP_S", 0.2)
    app = FakeServer(llm, FLAG).app
    with over_http(app, http=http_protocol(0.5)) as url, Reader(url, PATH, LONG) as reader:
        wait_until_made(llm, reader)
        wait_for_slot(url)
        num_bytes = 0
        while chunk := reader.read(MIB):
            num_bytes += len(chunk)
        assert num_bytes < NUM_BYTES


def test_a_connection_that_is_not_known_to_be_lost_holds_up_nothing(llm: AsyncOmniLLM) -> None:
    """The server has sent what the systems between take, and waits for a client that is gone."""
    with over_http(FakeServer(llm, FLAG).app, http=http_protocol(60)) as url, Reader(url, PATH, LONG) as reader:
        head = reader.read(4096).decode("latin-1")
        stream_id = head.partition("x-stream-id: ")[2].partition("\r\n")[0]
        rest = httpx.get(f"{url}/v1/streams/{stream_id}", timeout=60)
        assert len(rest.content) == NUM_BYTES


def test_speech_goes_on_byte_for_byte(llm: AsyncOmniLLM) -> None:
    request: dict[str, Any] = {"input": "200 pieces", "response_format": "pcm"}
    with over_http(FakeServer(llm, FLAG).app, http=http_protocol(60)) as url:
        undisturbed = httpx.post(url + PATH, json=request, timeout=60).content
        wait_for_slot(url)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        speech = client.audio.speech.with_streaming_response
        with speech.create(model="fake", voice="default", **request) as answer:
            stream_id = answer.headers["x-stream-id"]
            received = next(answer.iter_bytes(10_001))
        rest = httpx.get(f"{url}/v1/streams/{stream_id}?starting_after={len(received)}", timeout=60)
        assert rest.headers["x-sample-rate"] == answer.headers["x-sample-rate"]
        assert len(received) == 10_001 and received + rest.content == undisturbed
        wait_for_slot(url)


def test_a_spoken_chat_goes_on_event_for_event(omni_app: FastAPI) -> None:
    with over_http(with_flags(omni_app, FLAG), http=http_protocol(60)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def ask() -> Any:
            return client.chat.completions.with_raw_response.create(
                model=MODEL,
                messages=[{"role": "user", "content": QUESTION}],
                modalities=["text", "audio"],
                stream=True,
                extra_body={"sampling_params_list": GREEDY},
            )

        def resumed(last: int) -> list[ChatCompletionChunk]:
            chunks = client.get(
                f"/streams/{stream_id}",
                cast_to=ChatCompletionChunk,
                stream=True,
                stream_cls=openai.Stream[ChatCompletionChunk],
                options={"headers": {"Last-Event-ID": str(last)}},
            )
            return list(chunks)

        undisturbed = joined(ask().parse())
        raw = ask()
        stream_id = raw.headers["x-stream-id"]
        chunks = raw.parse()
        received = [next(chunks) for _ in range(3)]
        chunks.close()
        received += resumed(len(received))
        assert received == resumed(0)
    answer = joined(received)
    assert answer.texts == undisturbed.texts and answer.finish_reasons == undisturbed.finish_reasons
    assert_sounds_like(answer.speech, undisturbed.speech)


def joined(chunks: Any) -> Answer:
    answer = Answer()
    for chunk in chunks:
        for choice in chunk.choices:
            answer.add(choice.index, choice.delta, choice.finish_reason)
    return answer
