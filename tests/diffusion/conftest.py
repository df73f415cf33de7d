# SPDX-License-Identifier: Apache-2.0
"""Tiny diffusers checkpoints, each written once for all tests here."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_diffusion(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint, by its name."""
    from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint  # imports torch

    @functools.cache
    def folder(name: str) -> Path:
        return write_tiny_checkpoint(name, tmp_path_factory.mktemp("checkpoints") / name)

    return folder
