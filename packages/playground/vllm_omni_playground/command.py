# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni playground URL`: the page beside a server, in a process of its own."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from vllm_omni.entrypoints.root_path import RootPathMiddleware, as_root_path
from vllm_omni.errors import UsageError
from vllm_omni.extras import install_command
from vllm_omni.metrics.status_line import waiting

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vllm_omni_playground.client import Description, Server


def run_playground(arguments: list[str]) -> None:
    """Serves the page until a signal ends it.

    Raises:
        UsageError: The command line is wrong, Gradio is not installed, or no server answers at the address.
    """
    args = _make_parser().parse_args(arguments)
    try:
        with waiting("importing Gradio"):
            import gradio  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"the playground needs Gradio: {install_command('ui')}") from error
    import uvicorn

    from vllm_omni_playground.client import Server
    from vllm_omni_playground.page import read_auth

    server = Server(args.url, args.api_key or os.environ.get("VLLM_API_KEY"), verify=not args.insecure)
    app = make_app(server, server.describe(), read_auth(args.auth), as_root_path(args.root_path))
    print(f"The playground of {server.url} is at http://{args.host}:{args.port}", flush=True)
    uvicorn.run(
        app,
        host=args.host,
        port=args.port,
        log_level="warning",
        timeout_graceful_shutdown=1,  # A page that is open holds a connection, which must not hold the process.
    )


def make_app(server: Server, description: Description, auth: tuple[str, str] | None, root_path: str) -> FastAPI:
    """The application that has the page alone; for the arguments see `add_page`."""
    from fastapi import FastAPI

    from vllm_omni_playground.page import add_page

    app = FastAPI(root_path=root_path)
    app.add_middleware(RootPathMiddleware)
    return add_page(app, server, description, auth=auth, root_path=root_path)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-omni playground",
        description="A page to try the model of a running server in a browser. It needs the extra `ui`.",
    )
    parser.add_argument("url", help="of the server: http://localhost:8000")
    parser.add_argument("--host", default="127.0.0.1", help="where the page listens; default: 127.0.0.1")
    parser.add_argument("--port", type=int, default=7860, help="default: 7860")
    parser.add_argument("--api-key", help="of the server; default: VLLM_API_KEY. Browsers do not get it.")
    parser.add_argument("--auth", metavar="NAME:PASSWORD", help="ask visitors for this name and password")
    parser.add_argument("--root-path", default="", help="path of the page behind a proxy")
    parser.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    return parser
