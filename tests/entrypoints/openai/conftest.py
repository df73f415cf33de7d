# SPDX-License-Identifier: Apache-2.0
"""Applications that tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from vllm import envs

from tests.entrypoints.openai.fake_server import FakeServer
from tests.entrypoints.openai.media_apps import app_of, server_args, serving
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.media_input import CONNECTOR_NAME, install


@pytest.fixture(scope="session", autouse=True)
def media_connector() -> Iterator[None]:
    """As at the start of a server, for the tests of this folder; before applications, which end before it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_MEDIA_CONNECTOR", CONNECTOR_NAME)
        install(server_args("model"))
        yield


@pytest.fixture(autouse=True)
def fresh_environment() -> None:
    """Independent of earlier tests: vLLM caches the environment when an engine starts."""
    envs.disable_envs_cache()


@pytest.fixture(scope="session")
def image_app(tiny_diffusion: Callable[[str], Path]) -> Iterator[FastAPI]:
    """Of an image model that also takes images."""
    with serving(tiny_diffusion("z_image"), max_pixels=128 * 128) as app:
        yield app


@pytest.fixture(scope="module")
def omni_app(talking_async_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Path) -> FastAPI:
    return app_of(OmniEngineClient(talking_async_llm), tiny_qwen3_omni_moe)


@pytest.fixture(scope="module")
def text_app(text_async_llm: AsyncOmniLLM, tiny_qwen3: Path) -> FastAPI:
    return app_of(OmniEngineClient(text_async_llm), tiny_qwen3)


@pytest.fixture(scope="module")
def server(llm: AsyncOmniLLM) -> FakeServer:
    """Of the module's own pipeline."""
    return FakeServer(llm)
