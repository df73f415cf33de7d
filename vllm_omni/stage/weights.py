# SPDX-License-Identifier: Apache-2.0
"""New weights of a checkpoint: a folder of safetensors, compared with it, and made a checkpoint to load from.

The folder is laid out as the checkpoint is; a diffusers pipeline has a folder for each network. What of it is not there
stays as it was. On a memory file system it is how a trainer of this machine hands tensors over. Reads no tensors, and
knows no model and no engine.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from vllm_omni.checkpoint_weights import INDEX, WeightTensors, checkpoint_folder, read_tensors

_WEIGHTS = (".safetensors", INDEX)

Parts = set[tuple[str, str]]
"""Folders in a checkpoint, and beginnings of the names of tensors in them."""


class WeightFolder:
    """Compares folders of new weights with one checkpoint.

    Attributes:
        changed: The parts that are not those of the checkpoint any more.
    """

    def __init__(self, checkpoint: str, revision: str | None = None, part: str = "") -> None:
        """
        Args:
            checkpoint: A folder, or the name of a repository on the hub that has been downloaded.
            part: The beginning of the names of a stage's tensors. If there are any, the checkpoint is one of several
                stages, and may be changed in parts: those of the first words of the names.
        """
        self._checkpoint = checkpoint
        self._revision = revision
        self._part = part
        self.changed: Parts = set()

    @cached_property
    def _folder(self) -> Path:
        return checkpoint_folder(self._checkpoint, self._revision)

    @cached_property
    def _known(self) -> dict[str, WeightTensors]:
        return read_tensors(self._folder)

    def check(self, weights_path: str) -> Parts:
        """
        Returns:
            What of the checkpoint it changes.

        Raises:
            ValueError: It does not fit; names the first tensor that is wrong.
        """
        try:
            new = read_tensors(Path(weights_path))
        except OSError as error:
            raise ValueError(f"{weights_path}: cannot be read: {error.strerror}") from error
        if not new:
            raise ValueError(f"{weights_path}: there is no such folder with .safetensors files")
        for folder, tensors in sorted(new.items()):
            if folder not in self._known:
                raise ValueError(f"{Path(weights_path, folder)}: the checkpoint has no weights in a folder {folder!r}")
            _compare(self._known[folder], tensors, self._parts(folder, tensors), Path(weights_path, folder))
        parts = {(folder, part) for folder, tensors in new.items() for part in self._parts(folder, tensors)}
        lacking = sorted(self.changed - parts)
        if lacking:
            missing = "/".join(filter(None, lacking[0]))
            raise ValueError(f"{weights_path}: {missing} is missing, which an earlier update has changed")
        return parts

    def _parts(self, folder: str, tensors: WeightTensors) -> set[str]:
        """The beginnings of names of which a folder has to have all tensors."""
        is_shared = bool(self._part) and any(name.startswith(self._part) for name in self._known.get(folder, ()))
        return {name.partition(".")[0] + "." for name in tensors} if is_shared else {""}

    @contextlib.contextmanager
    def overlay(self, weights_path: str) -> Iterator[Path]:
        """A folder with the checkpoint's files, and with the new weights in place of its own. `check` has passed.

        It is made of links, and removed afterwards.
        """
        new = read_tensors(Path(weights_path))
        with tempfile.TemporaryDirectory(prefix="weights-") as made:
            for file in self._folder.rglob("*"):
                place = file.relative_to(self._folder)
                if file.is_file() and not (_name(place.parent) in new and place.name.endswith(_WEIGHTS)):
                    Path(made, place).parent.mkdir(parents=True, exist_ok=True)
                    Path(made, place).symlink_to(file.resolve())
            for folder, tensors in new.items():
                self._link(folder, tensors, Path(made, folder))
            yield Path(made)

    def _link(self, folder: str, tensors: WeightTensors, made: Path) -> None:
        made.mkdir(parents=True, exist_ok=True)
        known = self._known[folder]
        before, files = {tensor.file for tensor in known.values()}, {tensor.file for tensor in tensors.values()}
        parts = tuple(self._parts(folder, tensors))
        if parts == ("",) and len(before) == len(files) == 1:  # Libraries look for the name.
            (made / before.pop().name).symlink_to(files.pop().resolve())
            return
        indices = [] if any(parts) else next(iter(files)).parent.glob(f"*{INDEX}")  # None has what is unchanged.
        for file in (*files, *indices):
            (made / file.name).symlink_to(file.resolve())
        for file in before:
            kept = [name for name, tensor in known.items() if tensor.file == file and not name.startswith(parts)]
            if kept:
                with safe_open(file, framework="pt") as opened:
                    save_file({name: opened.get_tensor(name) for name in kept}, made / f"unchanged-{file.name}")


def _name(folder: Path) -> str:
    return "" if folder == Path() else str(folder)


def _compare(known: WeightTensors, new: WeightTensors, parts: set[str], where: Path) -> None:
    """
    Raises:
        ValueError: Names the first tensor, by name, that is missing, unknown or of another shape or kind.
    """
    wanted = {name for name in known if name.startswith(tuple(parts))}
    for name in sorted(wanted | new.keys()):
        if name not in new:
            raise ValueError(f"{where}: {name} is missing")
        if name not in known:
            raise ValueError(f"{where}: {name} is no tensor of the checkpoint")
        old, given = known[name], new[name]
        if old.shape != given.shape:
            raise ValueError(f"{where}: {name} has the shape {list(given.shape)}, not {list(old.shape)}")
        if old.kind != given.kind:
            raise ValueError(f"{where}: {name} is {given.dtype}, not {old.dtype}")
