# SPDX-License-Identifier: Apache-2.0
"""Applications that all tests of a session share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from tests.entrypoints.openai.media_apps import serving, use_server_environment


@pytest.fixture(autouse=True)
def fresh_environment() -> None:
    use_server_environment()


@pytest.fixture(scope="session")
def image_app(tiny_diffusion: Callable[[str], Path]) -> Iterator[FastAPI]:
    """Of an image model that also takes images."""
    with serving(tiny_diffusion("z_image"), max_pixels=128 * 128) as app:
        yield app
