# SPDX-License-Identifier: Apache-2.0
"""Helpers: hints for misspelled names, conversion to typed structs, and the files of the shipped configurations."""

import difflib
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vllm_omni.errors import MissingPackageError
from vllm_omni.model_packages import PACKAGES_OF_REPOSITORY, find_models

_T = TypeVar("_T")

# msgspec publishes a type's description before it is complete, and several threads may open pipelines.
_convert_lock = threading.Lock()


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the closest known name, or an empty string if none is close."""
    matches = difflib.get_close_matches(name[:100], [other for other in known if other != name], n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def convert(raw: Any, cls: type[_T]) -> _T:
    """Converts plain values, as YAML and callers provide them, to a typed struct.

    Raises:
        msgspec.ValidationError: A value has the wrong type, or a key is unknown; see `split_error`.
    """
    with _convert_lock:
        return msgspec.convert(raw, cls)


def split_error(error: msgspec.ValidationError) -> tuple[str, str]:
    """The problem, and its location (`stage_args[0].runtime`); the location is empty for the top level."""
    message = str(error)
    where = re.search(r" - at `\$(.*)`", message)
    return message.split(" - at ")[0], where.group(1).lstrip(".") if where else ""


def stage_configs_dir() -> Path:
    """The directory of the shipped stage configurations: one YAML for each model, and variants for other machines.

    The same place in a wheel, in an editable install and in a checkout on `PYTHONPATH`.
    """
    return Path(__file__).parents[1] / "stage_configs"


def find_stage_configs(path: str) -> Path:
    """The file of a stage configuration, given by the name of one of a package without `.yaml`, or by its path: a file
    of such a name is `./NAME`."""
    return find_models().stage_configs.get(path) or Path(path)


def find_checkpoint(model: str) -> str:
    """The folder of a checkpoint of an installed package, given by its name; any other model as it is: a folder of such
    a name is `./NAME`.

    Raises:
        MissingPackageError: It is one of a package in the repository of vllm_omni that is not installed.
    """
    models = find_models()
    if model in models.checkpoints:
        return str(models.checkpoints[model])
    if package := PACKAGES_OF_REPOSITORY.get(model):
        raise MissingPackageError(
            f"no installed package has the checkpoint {model!r}; in a checkout of vllm_omni: "
            f"pip install ./packages/{package}\n{models.describe_packages()}"
        )
    return model


def is_shipped(checkpoint: Path) -> bool:
    """Whether a folder is that of an installed package's checkpoint, which is trusted as the package's code is."""
    return checkpoint in find_models().checkpoints.values()


def shipped_variants(path: Path | None) -> list[Path]:
    """The configurations that a package has of the same model for other machines: `MODEL_MACHINE.yaml`.

    Args:
        path: A stage configuration. One of no package has no variants.
    """
    if path is None or find_models().stage_configs.get(path.stem) != path:
        return []
    shipped = sorted(path.parent.glob("*.yaml"))
    stems = [other.stem for other in shipped if path.stem == other.stem or path.stem.startswith(f"{other.stem}_")]
    model = min(stems, key=len)
    return [other for other in shipped if other != path and (other.stem == model or other.stem.startswith(f"{model}_"))]
