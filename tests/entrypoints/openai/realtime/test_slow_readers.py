# SPDX-License-Identifier: Apache-2.0
"""Clients of sessions that read slowly or not at all."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import websockets

from tests.entrypoints.openai.fake_server import over_http
from tests.entrypoints.openai.realtime.fake_chat import MODEL, FakeChat, session_app
from tests.entrypoints.openai.realtime.sessions import opened, visit
from vllm_omni.entrypoints.openai.http_protocol import web_socket_protocol
from vllm_omni.entrypoints.openai.streamed_chat import MAX_UNSENT_BYTES, ChatDelta

LONG_TEXT = "x" * (1 << 20)
ITEM: Any = {"id": "a", "type": "message", "role": "user", "content": [{"type": "input_text", "text": LONG_TEXT}]}
CONTINUED, TEXT, PING = 0, 1, 9
RESPONSE: Any = {"conversation": "none", "input": [{"type": "item_reference", "id": "a"}]}


async def connect(url: str) -> websockets.ClientConnection:
    """A client whose system takes few bytes that it has not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    host, port = url.removeprefix("http://").split(":")
    sock.connect((host, int(port)))
    address = f"{url.replace('http', 'ws')}/v1/realtime?model={MODEL}"
    return await websockets.connect(address, sock=sock, max_queue=1, max_size=None, compression=None)


async def ask_for_much(client: websockets.ClientConnection, event: dict[str, Any]) -> None:
    for each in ({"type": "conversation.item.create", "item": ITEM}, *[event] * 16):
        await client.send(json.dumps(each))


@pytest.mark.parametrize(
    "event",
    [{"type": "conversation.item.retrieve", "item_id": "a"}, {"type": "response.create", "response": RESPONSE}],
    ids=["an event", "responses"],
)
@pytest.mark.parametrize(("watch_s", "deadline_s"), [(0.5, 600), (600, 0.5)], ids=["watched", "deadline"])
def test_a_session_whose_client_does_not_read_ends(event: dict[str, Any], watch_s: float, deadline_s: float) -> None:
    """The next client has its place."""
    app = session_app(FakeChat(), max_realtime_sessions=1, send_timeout_s=deadline_s)

    async def main(url: str) -> None:
        silent = await connect(url)
        await ask_for_much(silent, event)
        deadline = time.monotonic() + 60
        while True:
            try:
                async with opened(url, model=MODEL) as session:
                    await session.say("Hello")
                    assert (await session.respond())[-1].response.output
                break
            except websockets.exceptions.InvalidStatus as error:
                assert error.response.status_code == 429 and time.monotonic() < deadline
                await asyncio.sleep(0.02)  # There is no event for it.
        silent.transport.abort()

    visit(app, main, ws=web_socket_protocol(watch_s))


@contextmanager
def raw_session(**overrides: Any) -> Iterator[socket.socket]:
    """A client's socket, once its session is open. `overrides`: methods of the server's protocol."""
    protocol = type("Protocol", (web_socket_protocol(60),), overrides)
    with over_http(session_app(FakeChat(), send_timeout_s=60), ws=protocol) as url, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.settimeout(60)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        client.sendall(
            f"GET /v1/realtime?model={MODEL} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n".encode()
        )
        wait_for(client, b"session.created")
        yield client


def frame(opcode: int, payload: bytes, *, is_last: bool = True) -> bytes:
    """A frame of a client, with a mask that changes nothing."""
    size = len(payload).to_bytes(8) if len(payload) >= 126 else b""
    return bytes([is_last << 7 | opcode, 0x80 | (127 if size else len(payload))]) + size + bytes(4) + payload


def wait_for(client: socket.socket, words: bytes) -> None:
    received = b""
    while words not in received:
        part = client.recv(1 << 16)
        assert part, received
        received += part


def test_pings_of_a_client_that_does_not_read_take_no_memory() -> None:
    """Before, they are answered."""
    pings = frame(PING, bytes(125)) * ((8 << 20) // 125)
    sizes: list[int] = []
    num_received, has_all = 0, threading.Event()

    def data_received(self: Any, data: bytes) -> None:
        nonlocal num_received
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        super(type(self), self).data_received(data)
        sizes.append(self.transport.get_write_buffer_size())
        num_received += len(data)
        if num_received > len(pings):
            has_all.set()

    with raw_session(data_received=data_received) as client:
        client.sendall(frame(PING, b"Hello?"))
        wait_for(client, b"Hello?")
        client.sendall(frame(TEXT, json.dumps({"type": "conversation.item.create", "item": ITEM}).encode()))
        wait_for(client, b"conversation.item.added")
        client.sendall(pings)
        assert has_all.wait(60)
    assert len(LONG_TEXT) / 2 < max(sizes) < 2 * len(LONG_TEXT), "the answer to the event, and no more"


def test_a_message_in_many_parts_takes_no_more_memory_than_in_one() -> None:
    num_parts: list[int] = []

    def handle_ping(self: Any) -> None:
        num_parts.append(len(self.frames))
        super(type(self), self).handle_ping()

    event = {
        "type": "conversation.item.create",
        "item": {**ITEM, "content": [{"type": "input_text", "text": "é" * 10}]},
    }
    first, *others, last = (bytes([byte]) for byte in json.dumps(event, ensure_ascii=False).encode())
    parts = [frame(CONTINUED, part, is_last=False) for part in [*others, *[b""] * 50_000]]
    with raw_session(handle_ping=handle_ping) as client:
        client.sendall(frame(TEXT, first, is_last=False) + b"".join(parts) + frame(PING, b"Read?"))
        wait_for(client, b"Read?")
        assert num_parts == [1]
        client.sendall(frame(CONTINUED, last))
        wait_for(client, ("é" * 10).encode())
        client.sendall(frame(TEXT, json.dumps({"type": "conversation.item.delete", "item_id": "a"}).encode()))
        wait_for(client, b"conversation.item.deleted")


def test_a_client_that_reads_late_gets_everything() -> None:
    app = session_app(FakeChat(), send_timeout_s=60)

    async def main(url: str) -> None:
        client = await connect(url)
        await ask_for_much(client, {"type": "conversation.item.retrieve", "item_id": "a"})
        types: list[str] = []
        while types.count("conversation.item.retrieved") < 16:
            types.append(json.loads(await client.recv())["type"])
        await client.close()

    visit(app, main, ws=web_socket_protocol(60))


def test_a_long_story_waits_for_a_client_that_reads_nothing() -> None:
    """So it keeps its request, and its slot, open; what waits is counted, and nothing of it is lost."""
    piece, num_pieces, num_read = "x" * (MAX_UNSENT_BYTES // 8), 100, 0

    def answer(messages: list[Any]) -> Iterator[ChatDelta]:
        nonlocal num_read
        for _ in range(num_pieces):
            num_read += 1
            yield ChatDelta(text=piece)

    chat = FakeChat()
    chat.answer = answer
    app = session_app(chat, send_timeout_s=60)

    async def main(url: str) -> None:
        client = await connect(url)
        story: Any = {"output_modalities": ["text"], "conversation": "none", "input": []}
        await client.send(json.dumps({"type": "response.create", "response": story}))
        while num_read < 8 or app.state.omni_sessions.budget.num_bytes <= 2 * MAX_UNSENT_BYTES:
            await asyncio.sleep(0.01)
        chat.answer = lambda messages: [ChatDelta(text="Yes.")]
        async with opened(url, model=MODEL) as other:  # The server's loop turns.
            await other.say("Hello")
            assert (await other.respond())[-1].response.output
        assert num_read <= 20
        text = ""
        while (event := json.loads(await client.recv()))["type"] != "response.done":
            text += event.get("delta", "")
        assert text == piece * num_pieces
        await client.close()

    visit(app, main, ws=web_socket_protocol(60))
