# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the format of Hugging Face, each converted once from what a package of the index has.

vLLM reads such a folder. It is made in the user's cache, named after the package's version and the dtype. Each file in
it is complete, and its weights are the last; its configuration alone is made in seconds, for commands that only show
it. The dtype is that of the package or the one that is closest to its numbers, and a CPU computes from it as it is.
"""

import errno
import logging
import os
import shutil
from abc import ABC, abstractmethod
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

from safetensors import SafetensorError

from vllm_omni.distributed.locked_folder import LockedFolder, alone, user_cache
from vllm_omni.errors import PipelineStartError
from vllm_omni_talk.packages import require_packages

logger = logging.getLogger("vllm.omni.talk")

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def cache_folder() -> Path:
    """Where the parts of `talk` are kept: `~/.cache/vllm_omni/talk`, or the same below `XDG_CACHE_HOME`.

    Raises:
        PipelineStartError: The user has no home folder, as some in containers.
    """
    return user_cache("talk", "the parts of talk")


class MadeCheckpoint(ABC):
    """A checkpoint that is made once on a machine.

    Attributes:
        name: As in a stage configuration.
        modules: What has to be installed for it; the first is of the package whose version it has.
        distribution: That package.
        num_bytes: That the folder takes.
        seconds: That it takes to make, about.
    """

    name: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]
    distribution: ClassVar[str]
    num_bytes: ClassVar[int]
    seconds: ClassVar[int]

    @abstractmethod
    def convert_config(self, folder: Path) -> None:
        """Writes the configuration, equal to that of `convert`."""

    @abstractmethod
    def convert(self, folder: Path) -> None:
        """Writes the checkpoint, with all that a stage reads of it."""

    def folder(self, *, with_weights: bool) -> Path:
        """The folder of the checkpoint. The first call on a machine that needs the weights makes them.

        Args:
            with_weights: False: the folder may have only the configuration.

        Raises:
            MissingPackageError: A package that it is made of is not installed.
            PipelineStartError: The cache is full, cannot be written, or has no place.
        """
        require_packages(*self.modules)
        folder = cache_folder() / f"{self.name}-{version(self.distribution)}-float16"
        needed = folder / (_WEIGHTS if with_weights else _CONFIG)
        if not needed.is_file():
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                with alone(folder.with_name(f"{folder.name}.lock"), f"converts {self.name}", logger):
                    if not needed.is_file():
                        self._make(folder, with_weights)
            except (OSError, SafetensorError) as error:
                if (problem := self._explain(error)) is None:
                    raise
                raise PipelineStartError(
                    f"{folder.parent}: {problem}, or set XDG_CACHE_HOME to another folder"
                ) from error
        return folder

    def _make(self, folder: Path, with_weights: bool) -> None:
        """Converts beside `folder`, and moves what is complete there. Also removes what killed processes have left."""
        unfinished = LockedFolder(folder.parent, f".{folder.name}-")
        try:
            if with_weights:
                if shutil.disk_usage(folder.parent).free < self.num_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                logger.info("Converting %s to %s, once, about %d s", self.name, folder, self.seconds)
                self.convert(unfinished.path)
            else:
                self.convert_config(unfinished.path)
            folder.mkdir(exist_ok=True)
            for path in sorted(unfinished.path.iterdir(), key=lambda path: path.name == _WEIGHTS):
                path.replace(folder / path.name)
        finally:
            unfinished.remove()

    def _explain(self, error: OSError | SafetensorError) -> str | None:
        """The problem and its remedy; None if it is not the folder. The library that writes weights has the system's
        code in its message alone."""
        if any(code == getattr(error, "errno", None) or f"(os error {code})" in str(error) for code in _FULL):
            return f"there is too little space: {self.name} takes {self.num_bytes:,} bytes; free some"
        if getattr(error, "errno", None) in _UNWRITABLE:
            return f"{self.name} cannot be made there: {error}; make the folder writable"
        return None
