# SPDX-License-Identifier: Apache-2.0
"""Loggers, the request and stage that a log line names, and what a server or a program logs while its stages start.

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
from typing import Any, TextIO

_SERVER_CONFIG = str(Path(__file__).with_name("quiet_server.json"))
_PROGRAM_CONFIG = str(Path(__file__).with_name("quiet_program.json"))
"""Logs to stderr, and leaves uvicorn's logger to the program."""
_CONFIG_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
_VARIABLES = (_CONFIG_VARIABLE, "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM", "VLLM_CONFIGURE_LOGGING")
_LIBRARIES = {"TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Read when they are imported."""
_VLLM_HANDLER = "vllm"
"""The name of the handler that vLLM makes when it is imported."""
_TORCH_ERROR = 2
"""Of torch's levels: its C++ code logs warnings with 1."""


def log_to_stderr() -> None:
    """Has vLLM's log lines, and those of stages that are started later, go to stderr, unless vLLM's variables say where
    they go: by default they are between the lines that a program prints."""
    if {"VLLM_LOGGING_STREAM", _CONFIG_VARIABLE} & os.environ.keys():
        return
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    for handler in _vllm_handlers():
        if handler.stream is sys.stdout:
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
    if not any(name in os.environ for name in _VARIABLES):
        _set_environment(_SERVER_CONFIG)
        configure_process()


@contextmanager
def quiet_start() -> Iterator[None]:
    """While a program opens a pipeline, it and the stages log on stderr what a server does while it starts, and from
    then on vLLM's warnings, too.

    vLLM's own lines come where the environment or the program configures its logging, and stay as they are in a server.
    """
    logger = logging.getLogger("vllm")
    if not any(name in os.environ for name in _VARIABLES) and _is_as_imported(logger):
        _set_environment(_PROGRAM_CONFIG)
    if os.environ.get(_CONFIG_VARIABLE) != _PROGRAM_CONFIG:
        yield
        return
    formats = json.loads(Path(_PROGRAM_CONFIG).read_text())["formatters"]["omni"]
    if not logger.handlers:  # vLLM is imported while the stages start, and makes its own then.
        logger.addHandler(logging.StreamHandler())
        logger.handlers[0].name, logger.propagate = _VLLM_HANDLER, False
    for handler in _vllm_handlers():  # `dictConfig` would close the program's.
        handler.setStream(sys.stderr)
        handler.setFormatter(logging.Formatter(formats["format"], formats["datefmt"]))
    logger.setLevel(logging.ERROR)
    if (own := logging.getLogger("vllm.omni")).level == logging.NOTSET:
        own.setLevel(logging.INFO)
    try:
        yield
    finally:
        log_warnings()


def _vllm_handlers() -> list[logging.StreamHandler[TextIO]]:
    """The one that vLLM has made, where it was imported before."""
    handlers = logging.getLogger("vllm").handlers
    return [
        handler for handler in handlers if isinstance(handler, logging.StreamHandler) and handler.name == _VLLM_HANDLER
    ]


def _is_as_imported(logger: logging.Logger) -> bool:
    """Whether nobody but vLLM has configured its logger, if that."""
    names = [handler.name for handler in logger.handlers]
    return (logger.level, names) in ((logging.NOTSET, []), (logging.INFO, [_VLLM_HANDLER]))


def _set_environment(config: str) -> None:
    os.environ[_CONFIG_VARIABLE] = config
    for name, level in _LIBRARIES.items():
        library = logging.getLogger(name.lower().removesuffix("_verbosity"))
        if name not in os.environ and library.level == logging.WARNING:  # It was imported before, and nobody set it.
            library.setLevel(logging.ERROR)
        os.environ.setdefault(name, level)
    if "torch" in sys.modules:
        _limit_torch_log()


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
    """Configures a process of a server, or of a stage: vLLM may have configured its logging before."""
    if is_quiet():
        logging.config.dictConfig(json.loads(Path(os.environ[_CONFIG_VARIABLE]).read_text()))
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
    """Whether this process, or one that started it, logs quietly: `log_quietly`, `quiet_start`."""
    return os.environ.get(_CONFIG_VARIABLE) in (_SERVER_CONFIG, _PROGRAM_CONFIG)


def quiet_stream() -> TextIO:
    """Where a quiet process logs."""
    return sys.stderr if os.environ.get(_CONFIG_VARIABLE) == _PROGRAM_CONFIG else sys.stdout
