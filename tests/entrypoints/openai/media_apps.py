# SPDX-License-Identifier: Apache-2.0
"""The server's application in this process, for pipelines of tiny diffusion models; and OpenAI's client for it."""

import asyncio
import io
import os
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import httpx2
import openai
from fastapi import FastAPI
from PIL import Image
from vllm import envs
from vllm.sampling_params import StructuredOutputsParams

from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.cli.serve import OmniServeCommand
from vllm_omni.entrypoints.openai.api_server import build_omni_app
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.media_input import install

Result = TypeVar("Result")
MODEL = "tiny"
TOOL_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")


@contextmanager
def serving(model: Path, **arguments: Any) -> Iterator[FastAPI]:
    """`arguments` are those of `AsyncOmniLLM`."""
    envs.disable_envs_cache()  # An earlier test may have started an engine, from when on vLLM caches it.
    llm = AsyncOmniLLM(str(model), **arguments)
    with llm, mock.patch.dict(os.environ):  # `install` sets vLLM's media connector.
        args = server_args(model)
        install(args)
        yield asyncio.run(build_omni_app(OmniEngineClient(llm), args))


def app_of(client: OmniEngineClient, model: Path, *flags: str) -> FastAPI:
    """The application of a pipeline that runs already."""
    envs.disable_envs_cache()  # as above
    return asyncio.run(build_omni_app(client, server_args(model, *flags)))


def app_that_writes(llm: AsyncOmniLLM, model: Path, text: str, *flags: str) -> FastAPI:
    """The application of a pipeline whose model can write only this, with calls of tools."""
    client = OmniEngineClient(llm)
    client.default_sampling_params["structured_outputs"] = StructuredOutputsParams(choice=[text])
    return app_of(client, model, *TOOL_FLAGS, *flags)


def server_args(model: Path | str, *flags: str) -> Namespace:
    return OmniServeCommand().parse([str(model), "--served-model-name", MODEL, *flags]).args


def with_flags(app: FastAPI, *flags: str) -> FastAPI:
    """Another application for the same pipeline."""
    return app_of(app.state.engine_client, app.state.args.model, *flags)


def use(app: FastAPI, main: Callable[[openai.AsyncOpenAI], Awaitable[Result]]) -> Result:
    """Runs `main` with a client of the application."""

    async def run() -> Result:
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with (
            httpx2.AsyncClient(transport=transport, base_url="http://server") as http,
            openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", max_retries=0, http_client=http) as client,
        ):
            return await main(client)

    return asyncio.run(run())


def send(app: FastAPI, method: str, path: str, **request: Any) -> httpx2.Response:
    """One request without OpenAI's client."""

    async def main(client: openai.AsyncOpenAI) -> httpx2.Response:
        return await client._client.request(method, path, **request)

    return use(app, main)


def png(width: int = 32, height: int = 32, color: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()
