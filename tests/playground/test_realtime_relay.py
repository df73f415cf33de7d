# SPDX-License-Identifier: Apache-2.0
"""Passing a realtime session on, from a server that echoes."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import pytest
import websockets
from fastapi import FastAPI

from tests.entrypoints.openai.fake_server import over_http
from vllm_omni_playground.client import Server
from vllm_omni_playground.realtime_relay import RealtimeRelay

KEYS = ["ek_1", "ek_2"]


async def echo(socket: Any) -> None:
    """Answers with the message and the subprotocols; `end` ends the session."""
    async for message in socket:
        if message == "end":
            return
        await socket.send(f"{message} {socket.request.headers['Sec-WebSocket-Protocol']}")


def crowded(connection: Any, request: Any) -> Any:
    body = json.dumps({"error": {"message": "the server has 128 sessions"}})
    return connection.respond(HTTPStatus.TOO_MANY_REQUESTS, body)


def relayed(main: Callable[[Callable[[str], Any]], Awaitable[None]], process_request: Any = None) -> None:
    """Runs `main` with a function that opens a session with a key, through the relay."""

    async def run() -> None:
        protocol: Any = "realtime"
        async with websockets.serve(
            echo, "127.0.0.1", 0, subprotocols=[protocol], process_request=process_request
        ) as server:
            port = server.sockets[0].getsockname()[1]
            relay, app = RealtimeRelay(Server(f"http://127.0.0.1:{port}")), FastAPI()
            relay.add_route(app, "/page/")
            for key in KEYS:
                relay.admit(key)

            def connect(key: str) -> Any:
                protocols: Any = ["realtime", f"openai-insecure-api-key.{key}"]
                return websockets.connect(f"{url.replace('http', 'ws')}/page/realtime", subprotocols=protocols)

            with over_http(app) as url:
                await main(connect)

    asyncio.run(run())


def test_a_session_is_passed_on_until_the_server_ends_it() -> None:
    async def main(connect: Callable[[str], Any]) -> None:
        async with connect("ek_1") as first, connect("ek_2") as second:
            await first.send("hello")
            await second.send("good day")
            assert await first.recv() == "hello realtime, openai-insecure-api-key.ek_1"
            assert await second.recv() == "good day realtime, openai-insecure-api-key.ek_2"
            await first.send("end")
            with pytest.raises(websockets.ConnectionClosedOK):
                await first.recv()

    relayed(main)


def test_a_key_opens_one_session() -> None:
    async def main(connect: Callable[[str], Any]) -> None:
        async with connect("ek_1"):
            pass
        for key in ("ek_1", "secret"):
            with pytest.raises(websockets.InvalidStatus):
                async with connect(key):
                    pass

    relayed(main)


def test_a_refusal_is_said_in_the_session() -> None:
    async def main(connect: Callable[[str], Any]) -> None:
        async with connect("ek_1") as session:
            event = json.loads(await session.recv())
        assert event["type"] == "error"
        assert event["error"]["message"] == "The server answered 429: the server has 128 sessions"

    relayed(main, crowded)


def test_a_server_that_is_gone() -> None:
    async def main() -> None:
        relay, app = RealtimeRelay(Server("http://127.0.0.1:9")), FastAPI()
        relay.add_route(app, "/")
        relay.admit("ek_1")
        protocols: Any = ["realtime", "openai-insecure-api-key.ek_1"]
        with over_http(app) as url:
            async with websockets.connect(f"{url.replace('http', 'ws')}/realtime", subprotocols=protocols) as session:
                assert "does not answer" in json.loads(await session.recv())["error"]["message"]

    asyncio.run(main())
