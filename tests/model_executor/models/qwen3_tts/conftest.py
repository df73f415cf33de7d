# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of Qwen3-TTS."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of a checkpoint by kind and size; each is written once."""

    @functools.cache
    def write(kind: str, size: str) -> Path:
        return write_tiny_checkpoint(kind, tmp_path_factory.mktemp(f"{kind}-{size}"), size=size)

    return write
