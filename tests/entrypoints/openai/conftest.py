# SPDX-License-Identifier: Apache-2.0
"""Applications that all tests of a session share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from vllm import envs

from tests.entrypoints.openai.media_apps import server_args, serving
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
