# SPDX-License-Identifier: Apache-2.0
"""Every exception that vllm_omni raises on purpose.

    OmniError
    ├── VllmRequirementError        vLLM is missing, or is another version          not recoverable
    ├── MissingPackageError         an optional package is not installed            not recoverable
    ├── UsageError                  the command line is wrong                       not recoverable
    ├── StageConfigError            a stage configuration cannot be used            not recoverable
    ├── PipelineStartError          it could not be opened; nothing is left of it   not recoverable
    │   └── StageStartError         a stage did not start
    ├── PipelineClosedError         used after close()                              not recoverable
    ├── PipelineFullError           the queue is full; try again later              recoverable
    ├── ControlError                a stage could not do what an operator asked     recoverable
    │   └── InvalidControlError     it does not know it, or an argument is wrong
    └── RequestError                one request failed; the pipeline continues      recoverable
        ├── InvalidRequestError     refused before it reached an engine
        ├── StageExecutionError     failed inside a stage
        │   └── StageCrashError     the stage's process died of it, twice
        ├── StageDeadError          the stage that held it died
        ├── RequestTimeoutError     its deadline passed
        └── RequestAbortedError     aborted by the caller or by close()

After a recoverable error the same object accepts the next request.
"""

import errno
from typing import Any

_REMEDIES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.ENOSPC: "free memory there; docker sets its size with --shm-size",
}


class OmniError(Exception):
    """Base of all errors raised by vllm_omni."""

    recoverable = False


class VllmRequirementError(OmniError, ImportError):
    """vLLM is missing or is not a version that this package was tested with."""


class MissingPackageError(OmniError, ImportError):
    """A part needs packages that are not installed. The message has the commands that install them."""


class UsageError(OmniError):
    """The command line is wrong; the command exits with 2."""


class StageConfigError(OmniError, ValueError):
    """A stage configuration is wrong. The message names the file, the key and the remedy."""


class PipelineStartError(OmniError, RuntimeError):
    """The pipeline could not be opened: the system refused a resource, or a stage failed. Nothing is left of it."""

    @classmethod
    def from_system(cls, error: Exception) -> "PipelineStartError":
        """Makes it of an error of the system or of ZMQ."""
        remedy = _REMEDIES.get(getattr(error, "errno", 0))
        return cls(f"the pipeline could not be opened: {error}" + (f"; {remedy}" if remedy else ""))


class StageStartError(PipelineStartError):
    """A stage failed to start, or took longer than its start-up limit."""

    def __init__(self, message: str, stage_id: int) -> None:
        super().__init__(message)
        self.stage_id = stage_id


class PipelineClosedError(OmniError, RuntimeError):
    """The pipeline was closed, or failed to start."""


class PipelineFullError(OmniError, RuntimeError):
    """The queue of waiting requests is full. Nothing of the refused request was kept.

    Attributes:
        retry_after_s: Seconds after which a retry is likely to succeed.
    """

    recoverable = True

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ControlError(OmniError, RuntimeError):
    """Stages could not do what an operator asked for. The pipeline continues; the message names the stage."""

    recoverable = True


class InvalidControlError(ControlError, ValueError):
    """What an operator asked for is wrong, or not for this pipeline."""


class RequestError(OmniError):
    """One request failed.

    Attributes:
        request_id: The caller's id of the request.
        stage_id: The stage it failed in; None if it reached no stage.
        stage_traceback: The traceback in the stage's process; empty if there is none.
        results: Outputs of the other prompts of the same `generate` call, which completed.
    """

    recoverable = True

    def __init__(self, message: str, request_id: str, stage_id: int | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.stage_id = stage_id
        self.stage_traceback = ""
        self.results: list[Any] = []


class InvalidRequestError(RequestError, ValueError):
    """The request itself is wrong, and was refused before it reached an engine."""


class StageExecutionError(RequestError, RuntimeError):
    """Processing the request failed inside a stage."""


class StageCrashError(StageExecutionError):
    """The stage's process died with the request, and again when it did nothing else. Sending it again does not help."""


class StageDeadError(RequestError, RuntimeError):
    """The process of the stage that held the request died, or the stage is dead.

    Attributes:
        retry_after_s: Seconds after which the stage probably works again; None: it is not restarted.
    """

    def __init__(
        self, message: str, request_id: str, stage_id: int | None = None, retry_after_s: float | None = 5.0
    ) -> None:
        super().__init__(message, request_id, stage_id)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(RequestError, TimeoutError):
    """The request was not complete after `request_timeout_s`, and was aborted."""


class RequestAbortedError(RequestError, RuntimeError):
    """The request was aborted before it completed."""
