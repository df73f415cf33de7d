# SPDX-License-Identifier: Apache-2.0
"""A fake cache of the Hugging Face hub: its checkpoints can be opened offline by name and revision."""

import hashlib
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

NAME = "organization/tiny"


class HubCache:
    """The cache of this process while the test runs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
        self._folder = folder

    def add(self, checkpoint: Path, revision: str, name: str = NAME) -> Path:
        """Adds a copy of a checkpoint as a revision; returns the copy, which tests may change."""
        repository = self._folder / f"models--{name.replace('/', '--')}"
        commit = hashlib.sha1(revision.encode()).hexdigest()
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
        return Path(shutil.copytree(checkpoint, repository / "snapshots" / commit))
