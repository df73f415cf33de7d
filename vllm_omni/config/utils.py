# SPDX-License-Identifier: Apache-2.0
"""Helpers: hints for misspelled names, sizes in bytes, conversion to typed structs, and the files of the shipped
configurations."""

import dataclasses
import difflib
import enum
import re
import threading
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from vllm_omni.errors import MissingPackageError, StageConfigError
from vllm_omni.model_packages import PACKAGES_OF_REPOSITORY, find_models

_T = TypeVar("_T")

# msgspec publishes a type's description before it is complete, and several threads may open pipelines.
_convert_lock = threading.Lock()

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE]\+?[0-9]{1,3})?)\s*([A-Za-z]*)", re.ASCII)
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base in (("ib", 1024), ("b", 1000))
}
_VLLM_UNITS = {
    letter: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for letter, base in ((prefix, 1000), (prefix.upper(), 1024))
}
_BYTES = "_bytes"
_NEAR = 0.75
"""How alike a mistyped name of a checkpoint is, from 0 to 1."""
_MAX_BYTES = 2**63 - 1


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the closest known name, or an empty string if none is close."""
    matches = difflib.get_close_matches(name[:100], [other for other in known if other != name], n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def parse_bytes(size: str | float) -> int:
    """A number of bytes: plain (`4096`), with a unit (`4GiB`, `512 MiB`, `1.5GB`), or as vLLM has it: `4G` is 4GiB, and
    `4g` is 4GB.

    Raises:
        ValueError: It is something else.
    """
    match = _SIZE.fullmatch(str(size).strip())
    unit = None if match is None else _VLLM_UNITS.get(match[2]) or _UNITS.get(match[2].casefold())
    value = None if match is None or unit is None else Decimal(match[1]) * unit
    if value is None or (unit == 1 and value % 1):
        raise ValueError(f"{size!r} is not a number of bytes; write 4096, 512MiB or 4GiB")
    if value > _MAX_BYTES:
        raise ValueError(f"{size!r} is more bytes than any machine has")
    return int(value)


def parse_sizes(values: Any, where: str = "") -> Any:
    """Plain values with numbers in place of sizes such as `4GiB`: in the keys whose names end with `_bytes`, at any
    depth.

    Raises:
        ValueError: One cannot be read; the message starts with its key.
    """
    if isinstance(values, list):
        return [parse_sizes(value, f"{where}[{place}]") for place, value in enumerate(values)]
    if not isinstance(values, Mapping):
        return values
    parsed = {}
    for key, value in values.items():
        at = f"{where}.{key}" if where else str(key)
        if isinstance(value, str) and str(key).replace("-", "_").endswith(_BYTES):
            try:
                value = parse_bytes(value)
            except ValueError as error:
                raise ValueError(f"{at}: {error}") from error
        parsed[key] = parse_sizes(value, at)
    return parsed


def convert(raw: Any, cls: type[_T]) -> _T:
    """Converts plain values, as YAML and callers provide them, to a typed struct.

    Raises:
        msgspec.ValidationError: A value has the wrong type, or a key is unknown; see `split_error`.
    """
    with _convert_lock:
        return msgspec.convert(raw, cls)


def convert_config(raw: Any, cls: type[_T]) -> _T:
    """Converts a configuration, which may have sizes as `parse_sizes` reads them, as `convert` does."""
    try:
        raw = parse_sizes(raw)
    except ValueError as error:
        where, _, problem = str(error).partition(": ")
        raise msgspec.ValidationError(f"{problem} - at `$.{where}`") from error
    return convert(raw, cls)


def split_error(error: msgspec.ValidationError) -> tuple[str, str]:
    """The problem, and its location (`stage_args[0].runtime`); the location is empty for the top level."""
    message = str(error)
    where = re.search(r" - at `\$(.*)`", message)
    return message.split(" - at ")[0], where.group(1).lstrip(".") if where else ""


def given_value(error: msgspec.ValidationError, raw: Any) -> str:
    """`, not 7`, or, behind its type, ` 'seven'`: what was given at the error's location; an empty string where that is
    not one number or text, or the error has it."""
    problem, location = split_error(error)
    try:
        for key, index in re.findall(r"(\w+)|\[(\d+|\.\.\.)]", location):
            raw = raw[key] if key else raw[int(index)]
    except (LookupError, TypeError, ValueError):  # msgspec does not tell the key of a dict.
        return ""
    if not isinstance(raw, (str, int, float)) or "enum value" in problem:
        return ""
    return f"{' ' if 'got' in problem else ', not '}{raw!r:.100}"


def parse_engine_args(engine_args: Mapping[str, Any], cls: type[_T], where: str, kind: str) -> _T:
    """The engine arguments of a stage as the dataclass of its kind.

    Args:
        where, kind: The stage's place, and its kind, for messages.

    Raises:
        StageConfigError: A key is unknown (names the nearest), or a value has the wrong type.
    """
    names = list(cls.__annotations__)
    for key in engine_args:
        if key not in names:
            raise StageConfigError(
                f"{where}: a {kind} stage has no {key!r}{nearest(key, names)} (known here: {', '.join(names)})"
            )
    try:
        return convert_config(dict(engine_args), cls)
    except msgspec.ValidationError as error:
        problem, key = split_error(error)
        hint = cls.__annotations__.get(key)
        values = [value for one in (hint, *get_args(hint)) if get_origin(one) is Literal for value in get_args(one)]
        known = f" (known here: {', '.join(values)})" if values else ""
        raise StageConfigError(f"{where}.{key or '?'}: {problem}{given_value(error, engine_args)}{known}") from error


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
        StageConfigError: It is nearly the name of such a checkpoint, and nothing else. The hub is not asked about it.
    """
    models = find_models()
    if model in models.checkpoints:
        return str(models.checkpoints[model])
    if package := PACKAGES_OF_REPOSITORY.get(model):
        raise MissingPackageError(
            f"no installed package has the checkpoint {model!r}; in a checkout of vllm_omni: "
            f"pip install ./packages/{package}\n{models.describe_packages()}"
        )
    if "/" not in model and not Path(model).exists():
        known = {*models.checkpoints, *PACKAGES_OF_REPOSITORY}
        if near := difflib.get_close_matches(model[:100].casefold(), sorted(known), 1, _NEAR):
            raise StageConfigError(
                f"there is no checkpoint {model!r}; did you mean {near[0]!r}? (A folder is ./NAME, a model on the "
                "Hugging Face hub ORGANIZATION/NAME.)"
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


def as_plain(value: Any) -> Any:
    """A value in YAML's types; of vLLM's configuration objects, the fields that differ from their defaults."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, msgspec.Struct):
        items = ((field.encode_name, getattr(value, field.name)) for field in msgspec.structs.fields(value))
        return {key: as_plain(item) for key, item in items if item is not None}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {field: vars(value).get(field.name) for field in dataclasses.fields(value)}
        return {field.name: as_plain(item) for field, item in values.items() if item != _default(field)}
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [as_plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _default(field: dataclasses.Field) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()
