# SPDX-License-Identifier: Apache-2.0
"""The parts of `benchmarks/serve.py` that must be right for its figures to mean anything."""

import asyncio
import base64
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a part as the script does, which has its own folder on the path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"serve_parts.{name}")


def event(delta: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def speech(pcm: bytes) -> bytes:
    return event({"audio": {"data": base64.b64encode(pcm).decode()}})


END = chunk(b"data: [DONE]\n\n") + chunk(b"")


def test_times_are_those_at_which_the_last_byte_of_a_piece_came(part: Any) -> None:
    client = part("http_client")
    text, sound = chunk(event({"content": "Hi"})), chunk(speech(b"\1\0") + speech(b"\2\0"))
    pieces = [(1.0, HEAD + text[:9]), (2.0, text[9:]), (3.0, sound[:70]), (4.0, sound[70:] + END)]

    answer = client.read_answer(client.Exchange(5, 4.5, pieces), "chat", keeps_speech=True)

    assert (answer.error, answer.question, answer.text) == ("", 5, "Hi")
    assert (answer.first_text, answer.first_audio, answer.completed) == (2.0, 4.0, 4.5)
    assert (answer.num_samples, answer.speech) == (2, b"\1\0\2\0")


@pytest.mark.parametrize(
    ("received", "error"),
    [
        (HEAD + chunk(speech(b"\1\0")) + chunk(b""), "the stream ended early"),
        (HEAD + chunk(speech(b"\1\0"))[:-9], "ValueError"),
        (HEAD + chunk(b'data: {"error": {"message": "a stage died"}}\n\n') + END, "a stage died"),
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\n{full}", "429 {full}"),
        (b"", "no answer"),
    ],
)
def test_what_is_not_whole_is_an_error(part: Any, received: bytes, error: str) -> None:
    client = part("http_client")
    answer = client.read_answer(client.Exchange(0, 2.0, [(1.0, received)]), "chat")
    assert error in answer.error


def test_a_request_goes_over_the_wire(part: Any) -> None:
    client = part("http_client")

    async def main() -> Any:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"POST /v1/audio/speech HTTP/1.1\r\n")
            body = await reader.readexactly(int(head.partition(b"Length: ")[2].split()[0]))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n" + json.loads(body)["input"].encode())
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await client.exchange(port, client.post("/v1/audio/speech", {"input": "abcd"}), 3)

    answer = client.read_answer(asyncio.run(main()), "speech")
    assert (answer.error, answer.num_samples, answer.question) == ("", 2, 3)
    assert 0 < answer.first_audio <= answer.completed


def test_a_server_that_is_not_there_is_an_error(part: Any) -> None:
    client = part("http_client")
    answer = client.read_answer(asyncio.run(client.exchange(1, b"", 0)), "chat")
    assert "ConnectionRefusedError" in answer.error


def test_open_loops_have_the_rate_that_was_asked_for_and_repeat_themselves(part: Any) -> None:
    load = part("loads").Load("chat", 2000, rate=50.0, seed=1)
    assert load.due() == load.due() == sorted(load.due())
    assert load.due()[-1] == pytest.approx(2000 / 50.0, rel=0.1)


def test_closed_loops_ask_as_many_at_once_as_they_should(part: Any) -> None:
    loads = part("loads")
    running, most = 0, 0

    async def call(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return number

    _, numbers = asyncio.run(loads.drive(loads.Load("chat", 20, concurrency=3), call))
    assert numbers == list(range(20)) and most == 3


def test_the_time_of_a_process_is_that_of_its_cores(part: Any) -> None:
    cpu_seconds = part("http_client").cpu_seconds
    before, worked = cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() < worked + 0.2:
        pass
    assert cpu_seconds(os.getpid()) - before == pytest.approx(0.2, abs=0.1)


def test_plots(part: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    named = {f"{name} {percent}": 1.0 for name in ("TTFT", "TTFA", "JCT") for percent in ("p50", "p95")}
    rows = [
        {"model": "m", "endpoint": "chat", "loop": loop, "load": load, "who": "server", "RTF p50": "", **named}
        for loop, load in (("closed", 1), ("closed", 8), ("open", 0.5))
    ]
    part("plots").plot(rows, tmp_path / "plots")
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"m_chat_closed.png", "m_chat_open.png"}


def test_answers_differ_by_a_sample_or_in_what_they_say(part: Any) -> None:
    answer_class = part("loads").Answer
    answer = answer_class(0, text="Hi", num_samples=2, speech=b"\1\0\2\0")
    assert answer.difference(answer) == 0
    assert answer.difference(answer_class(0, text="Hi", num_samples=2, speech=b"\1\0\xff\xff")) == 3
    assert answer.difference(answer_class(0, text="Ho", num_samples=2, speech=b"\1\0\2\0")) == float("inf")
    assert answer.difference(answer_class(0, text="Hi", num_samples=1, speech=b"\1\0")) == float("inf")
