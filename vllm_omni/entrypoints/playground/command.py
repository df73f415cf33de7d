# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni playground URL`: the page beside a server, in a process of its own."""

import argparse
import os

import uvicorn
from fastapi import FastAPI

from vllm_omni.entrypoints.playground.client import Server
from vllm_omni.entrypoints.playground.page import add_page, read_auth


def run_playground(arguments: list[str]) -> None:
    """Serves the page until a signal ends it.

    Raises:
        UsageError: The command line is wrong, or no server answers at the address.
    """
    args = _make_parser().parse_args(arguments)
    server = Server(args.url, args.api_key or os.environ.get("VLLM_API_KEY"), verify=not args.insecure)
    app = add_page(FastAPI(), server, server.describe(), auth=read_auth(args.auth))
    print(f"The playground of {server.url} is at http://{args.host}:{args.port}", flush=True)
    uvicorn.run(
        app,
        host=args.host,
        port=args.port,
        root_path=args.root_path,
        log_level="warning",
        timeout_graceful_shutdown=1,  # A page that is open holds a connection, which must not hold the process.
    )


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
