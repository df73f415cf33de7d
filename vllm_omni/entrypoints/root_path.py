# SPDX-License-Identifier: Apache-2.0
"""`--root-path`: the path of an application behind a proxy, which removes it from requests or leaves it. Imports
no web framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


def as_root_path(path: str) -> str:
    """The path as web frameworks read it: `/a/b`, or nothing."""
    return "".join(f"/{part}" for part in path.split("/") if part)


class RootPathMiddleware:
    """Completes the path of a request whose proxy has removed `--root-path`: a mounted application, such as the page,
    finds its own part of a path behind it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not f"{scope['path']}/".startswith(f"{scope['root_path']}/"):
            scope = {**scope, "path": scope["root_path"] + scope["path"]}
        await self.app(scope, receive, send)
