# SPDX-License-Identifier: Apache-2.0
"""Loggers, and the request and stage that a log line names.

All modules log below `vllm.omni`, so that vLLM's handler, format and `VLLM_LOGGING_LEVEL` apply to them. Imports
neither other modules of the package nor vLLM.
"""

import logging
from collections.abc import MutableMapping
from typing import Any


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
