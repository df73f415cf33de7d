# SPDX-License-Identifier: Apache-2.0
"""Applications that are opened once and shared by all tests of a session."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from tests.entrypoints.openai.media_apps import serving, use_server_environment


@pytest.fixture(autouse=True)
def fresh_environment() -> None:
    use_server_environment()


@pytest.fixture(scope="session")
def painting_app(tiny_diffusion: Callable[[str], Path]) -> Iterator[FastAPI]:
    """Of a model that paints, also after a picture."""
    with serving(tiny_diffusion("z_image"), max_pixels=128 * 128) as app:
        yield app
