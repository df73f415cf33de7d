# SPDX-License-Identifier: Apache-2.0
"""Loggers, the request and stage that a log line names, and what a server logs while it starts.

All modules log below `vllm.omni`, so that vLLM's handler, format and `VLLM_LOGGING_LEVEL` apply to them. Imports
neither other modules of the package nor vLLM.
"""

import ctypes
import json
import logging
import logging.config
import os
import sys
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_QUIET_CONFIG = Path(__file__).with_name("quiet_logging.json")
_CONFIG_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
_VARIABLES = (_CONFIG_VARIABLE, "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM", "VLLM_CONFIGURE_LOGGING")
_LIBRARIES = {"TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Read when they are imported."""
_TORCH_ERROR = 2
"""Of torch's levels: its C++ code logs warnings with 1."""


def log_to_stderr() -> None:
    """Has vLLM's log lines, and those of stages that are started later, go to stderr, unless vLLM's variables say where
    they go: by default they are between the lines that a program prints."""
    if {"VLLM_LOGGING_STREAM", _CONFIG_VARIABLE} & os.environ.keys():
        return
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    for handler in logging.getLogger("vllm").handlers:  # where vLLM was imported before
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)


def get_logger(module: str) -> logging.Logger:
    """The logger of a module of the package: `vllm_omni.stage.shell` logs as `vllm.omni.stage.shell`."""
    return logging.getLogger("vllm.omni" + module.removeprefix("vllm_omni"))


class ContextLogger(logging.LoggerAdapter):
    """A logger whose lines start with a request and a stage: `request 7, stage 1 (talker): ...`.

    log = about(logger, stage=stage.label)
    log.warning("...")
    about(log, request_id=request_id).error("...")
    """

    def __init__(self, logger: logging.Logger, request_id: str | None, stage: str | None) -> None:
        super().__init__(logger, {})
        self.request_id = request_id
        self.stage = stage
        about = [f"request {_printable(request_id)}"] if request_id is not None else []
        self._prefix = ", ".join([*about, stage] if stage is not None else about)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{self._prefix}: {msg}", kwargs


def about(
    logger: logging.Logger | ContextLogger, *, request_id: str | None = None, stage: str | None = None
) -> ContextLogger:
    """A logger for lines about a request, a stage (its label, `stage 1 (talker)`), or both.

    What `logger` already names is kept.
    """
    if isinstance(logger, ContextLogger):
        return ContextLogger(logger.logger, request_id or logger.request_id, stage or logger.stage)
    return ContextLogger(logger, request_id, stage)


def _printable(request_id: str) -> str:
    """The caller chooses the id: it must neither start a new line nor act as a format string."""
    return "".join(c if c.isprintable() and c != "%" else "?" for c in request_id)


def log_quietly() -> None:
    """While a server starts, it logs what this package reports, and errors of vLLM; see `log_warnings`.

    Holds for this process and for those that it starts. For a command line, as early as possible. No effect where the
    environment configures vLLM's logging.
    """
    if any(name in os.environ for name in _VARIABLES):
        return
    os.environ[_CONFIG_VARIABLE] = str(_QUIET_CONFIG)
    for name, level in _LIBRARIES.items():
        os.environ.setdefault(name, level)
    if "torch" in sys.modules:
        _limit_torch_log()
    configure_process()


@contextmanager
def handle_import_warnings() -> Iterator[None]:
    """While vLLM is imported, which configures its loggers later: Python itself would print what they warn of, which is
    about other packages."""
    logger, handler = logging.getLogger("vllm"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def log_loudly() -> None:
    """Undoes `log_quietly`, for a command line that turns out to configure vLLM's logging."""
    if is_quiet():
        del os.environ[_CONFIG_VARIABLE]


def configure_process() -> None:
    """Configures a process whose parent called `log_quietly`: vLLM may have configured its logging before."""
    if is_quiet():
        logging.config.dictConfig(json.loads(_QUIET_CONFIG.read_text()))
        warnings.filterwarnings("ignore", category=FutureWarning)  # about code of others


def log_warnings() -> None:
    """Logs vLLM's warnings from now on: after the start they are about requests, not about settings of this package."""
    if is_quiet():
        logging.getLogger("vllm").setLevel(logging.WARNING)
        # For each sound it warns that torchcodec is not there, which is about the installation, and needed by nothing.
        logging.getLogger("vllm.multimodal.media.audio").setLevel(logging.ERROR)


def _limit_torch_log() -> None:
    """Does what torch's variable does, in a process that has imported torch, which read it then."""
    with suppress(OSError, ValueError):  # It has no such library, or that has no such variable.
        library = ctypes.CDLL(str(Path(sys.modules["torch"].__file__ or "").parent / "lib" / "libc10.so"))
        ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = _TORCH_ERROR


def is_quiet() -> bool:
    """Whether this process, or one that started it, has called `log_quietly`."""
    return os.environ.get(_CONFIG_VARIABLE) == str(_QUIET_CONFIG)
