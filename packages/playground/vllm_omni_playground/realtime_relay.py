# SPDX-License-Identifier: Apache-2.0
"""Passes a realtime session on, between a browser and the server, which the browser may not reach itself."""

import asyncio
from collections import OrderedDict
from typing import Any

import websockets
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

from vllm_omni_playground.client import Server

_SUBPROTOCOL, _KEY_SUBPROTOCOL = "realtime", "openai-insecure-api-key."
_POLICY_VIOLATION = 1008
_MAX_KEYS = 1000


class RealtimeRelay:
    """The sessions of all visitors. Each opens with a key that was made for a visitor of the page, once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._keys: OrderedDict[str, None] = OrderedDict()

    def admit(self, key: str) -> None:
        """Allows a session with an ephemeral key of the server."""
        self._keys[key] = None
        while len(self._keys) > _MAX_KEYS:
            self._keys.popitem(last=False)

    def add_route(self, app: FastAPI, path: str) -> None:
        """Serves the sessions below the page, whose path ends with a slash."""
        app.add_api_websocket_route(f"{path}realtime", self._serve)

    async def _serve(self, browser: WebSocket) -> None:
        offered = browser.scope.get("subprotocols", ())
        keys = [name.removeprefix(_KEY_SUBPROTOCOL) for name in offered if name.startswith(_KEY_SUBPROTOCOL)]
        if not keys or keys[0] not in self._keys:
            await browser.close(_POLICY_VIOLATION)
            return
        del self._keys[keys[0]]
        await browser.accept(_SUBPROTOCOL)
        try:
            async with self._server.connect_realtime(keys[0]) as session:
                await _until_one_ends(_upwards(browser, session), _downwards(session, browser))
            await browser.close()
        except WebSocketDisconnect:
            return
        except (OSError, websockets.WebSocketException) as error:
            await browser.send_json({"type": "error", "error": {"message": self._server.explain(error)}})
            await browser.close()


async def _upwards(browser: WebSocket, session: Any) -> None:
    while True:
        await session.send(await browser.receive_text())


async def _downwards(session: Any, browser: WebSocket) -> None:
    async for message in session:
        await browser.send_text(message)


async def _until_one_ends(*directions: Any) -> None:
    tasks = [asyncio.create_task(direction) for direction in directions]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
