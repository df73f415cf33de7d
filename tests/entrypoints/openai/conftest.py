# SPDX-License-Identifier: Apache-2.0
"""Applications that are opened once and shared by all tests of a session."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from vllm import envs

from tests.entrypoints.openai.media_apps import serving
from vllm_omni.entrypoints.openai.media_connector import CONNECTOR_NAME


@pytest.fixture(autouse=True)
def fresh_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a server, whatever tests before have left: vLLM caches the environment from an engine's start on."""
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", CONNECTOR_NAME)


@pytest.fixture(scope="session")
def painting_app(tiny_diffusion: Callable[[str], Path]) -> Iterator[FastAPI]:
    """Of a model that paints, also after a picture."""
    with serving(tiny_diffusion("z_image"), max_pixels=128 * 128) as app:
        yield app
