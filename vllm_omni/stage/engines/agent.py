# SPDX-License-Identifier: Apache-2.0
"""Function stages in a Python of their own: the stage's process starts an agent there, and passes it all calls.

The engine is that of any function stage. What it calls is here: an object whose methods send their arguments to the
agent (`agent_program`) and wait for the value, or for each piece of a stream. Each thread of the engine has a socket of
its own to a thread of the agent.
"""

import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch

from vllm_omni.config.stage import OmniStageConfig
from vllm_omni.errors import InvalidRequestError
from vllm_omni.function_stage import FunctionStage
from vllm_omni.inputs import StageRequest
from vllm_omni.metrics.logs import get_logger
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines import agent_program
from vllm_omni.stage.engines.agent_program import Channel, DisconnectedError
from vllm_omni.stage.engines.base import Outbox
from vllm_omni.stage.engines.function import BatchFunction, FunctionStageEngine, PlainFunction, Sources
from vllm_omni.stage.python import find_python, make_environment

logger = get_logger(__name__)

_REQUEST = (
    *("request_id", "modalities", "prompt", "prompt_token_ids", "mm_metadata", "options", "parameters"),
    *("is_complete", "priority", "cache_salt"),
)
_OUTPUT = ("request_id", "stage_id", "prompt", "prompt_token_ids", "tensors", "data", "start", "context", "is_last")
_COMPLETION = ("index", "text", "token_ids", "cumulative_logprob", "finish_reason", "stop_reason")
"""Fields that an agent's objects have."""
_STACKS_AFTER = 0.9
"""Of `runtime.step_timeout_s`: then the log shows where the agent is, which ends with the stage's process."""
_END_S = 5.0


class AgentDiedError(BaseException):
    """The process of a stage's agent ended. No exception of one request: the stage's process ends, too."""


class _AgentTraceback(Exception):
    """The traceback of an error in the agent, as the cause of the error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Agent:
    """The process that computes a stage, and the connections with its threads."""

    def __init__(self, stage: OmniStageConfig, model: str, num_threads: int) -> None:
        """
        Args:
            num_threads: Calls at the same time.
        """
        self._stage = stage
        self._model = model
        self._num_threads = max(1, num_threads)
        self._idle: queue.LifoQueue[Channel] = queue.LifoQueue()
        self._channels: list[Channel] = []
        self._last_lines: deque[str] = deque(maxlen=1)
        self._is_started = False
        self._is_closing = False
        self._ended = threading.Event()

    def start(self, on_death: Any) -> None:
        """Starts the process, and the stage in it; returns when that is ready.

        Args:
            on_death: Called with an `AgentDiedError`, from another thread, if the process ends before `close`.

        Raises:
            StageConfigError: The Python is not there, or too old, or lacks numpy.
            PipelineStartError: The environment of its packages could not be made.
            Exception: The stage's module or its `start` raised it; named as there, with the traceback there.
            AgentDiedError: The process ended.
        """
        runtime, where = self._stage.runtime, self._stage.label
        if runtime.python is None:
            self._python = find_python(str(make_environment(runtime.packages, where)), where)
        else:
            self._python = find_python(runtime.python, where)
        wait_s = _STACKS_AFTER * runtime.step_timeout_s
        ours, theirs = zip(*(socket.socketpair() for _ in range(self._num_threads)), strict=True)
        self._channels = [Channel(sock, wait_s, self._show_stacks) for sock in ours]
        numbers = [sock.fileno() for sock in theirs]
        self._process = subprocess.Popen(
            [self._python.path, "-Iu", agent_program.__file__, str(os.getpid()), *map(str, numbers)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": str(torch.get_num_threads())} | self._python.environment(),
        )
        for sock in theirs:
            sock.close()
        threading.Thread(target=self._watch, args=(on_death,), name="agent", daemon=True).start()
        _value(self._exchange(self._channels[0], _job(self._stage, self._model)))
        self._is_started = True
        for channel in self._channels:
            self._idle.put(channel)
        logger.info("%s: runs in %s, as process %d", where, self._python, self._process.pid)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a method of the agent; returns its value, or an iterator of the values of a stream.

        Raises:
            InvalidRequestError, Exception: The method raised it; of other classes, one with the same name.
            AgentDiedError: The process ended.
        """
        channel = self._idle.get()
        reply: dict[str, Any] = {}
        try:
            reply = self._exchange(channel, [name, arguments])
        finally:
            if "stream" not in reply:
                self._idle.put(channel)
        if "stream" in reply:
            return self._pieces(channel)
        return [_value_or_error(each) for each in reply["results"]] if "results" in reply else _value(reply)

    def _pieces(self, channel: Channel) -> Iterator[Any]:
        reply: dict[str, Any] = {}
        try:
            while "value" in (reply := self._exchange(channel, True)):
                yield reply["value"]
        finally:
            if "value" in reply:  # The reader has stopped between two pieces.
                reply = self._exchange(channel, False)
            self._idle.put(channel)
        if "error" in reply:
            _value(reply)

    def _exchange(self, channel: Channel, message: Any) -> Any:
        try:
            channel.send(message)
            return channel.receive()
        except DisconnectedError:
            self._ended.wait()
            raise self._death() from None

    def _death(self) -> AgentDiedError:
        status = self._process.returncode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        last = f"; it printed last: {self._last_lines[0]}" if self._last_lines else ""
        return AgentDiedError(f"{self._stage.label}: its Python, {self._python.path}, {how}{last}")

    def _watch(self, on_death: Any) -> None:
        """Prints what the process prints, in the stage's log, until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace")
            if text.strip():
                self._last_lines.append(text.strip())
            sys.stderr.write(text)
        self._process.wait()
        self._ended.set()
        if not self._is_closing:
            on_death(self._death())

    def _show_stacks(self) -> None:
        """A call takes long: the process prints where each of its threads is."""
        if self._is_started and not self._ended.is_set():
            logger.warning("%s: a call in %s takes long; it is here:", self._stage.label, self._python.path)
            self._process.send_signal(signal.SIGUSR1)

    def close(self) -> None:
        """Ends the process."""
        self._is_closing = True
        for channel in self._channels:
            channel.close()
        if self._channels and not self._ended.wait(_END_S):
            self._process.kill()
            self._ended.wait()


class AgentStage(FunctionStage):
    """A `FunctionStage` that is in an agent. The state of a request here is its number there."""

    def __init__(self, stage: OmniStageConfig, model: str, agent: Agent) -> None:
        super().__init__(stage, model)
        self._agent = agent
        self._numbers = itertools.count()

    def begin(self, request: StageRequest, parameters: Any) -> int:
        number = next(self._numbers)
        self._agent.call(
            "begin", number, _fields(request, _REQUEST), msgspec.to_builtins(parameters, builtin_types=(bytes,))
        )
        return number

    def window(self, state: int, sources: Sources) -> Any:
        return self._agent.call("window", state, _sources(sources))

    def end(self, state: int) -> Any:
        return self._agent.call("end", state)

    def abort(self, state: int) -> None:
        self._agent.call("abort", state)


class AgentEngine(FunctionStageEngine):
    """Runs a function stage whose calls an agent computes."""

    def __init__(
        self, outbox: Outbox, stage: OmniStageConfig, model: str, declared: type[FunctionStage] | None
    ) -> None:
        """
        Args:
            declared: The stage's class; None: it is a plain function.
        """
        num_threads = 0 if declared is None else stage.runtime.max_batch_size or 1
        self._agent = Agent(stage, model, num_threads)
        super().__init__(outbox, self._make_function(stage, model, declared), num_threads)

    def _make_function(self, stage: OmniStageConfig, model: str, declared: type[FunctionStage] | None) -> FunctionStage:
        if declared is not None:
            # Messages have the name of the class, and requests its parameters.
            proxy = type(declared.__name__, (AgentStage,), {"parameters": declared.parameters})
            return proxy(stage, model, self._agent)
        if stage.batch_function is None:
            return PlainFunction(stage, model, self._one_call)
        return BatchFunction(stage, model, self._batch_call)

    def _one_call(self, request: StageRequest, sources: Sources) -> Any:
        return self._agent.call("call", _fields(request, _REQUEST), _sources(sources))

    def _batch_call(self, requests: Sequence[StageRequest], sources: Sequence[Sources]) -> Any:
        given = [_fields(request, _REQUEST) for request in requests]
        return self._agent.call("call_batch", given, [_sources(each) for each in sources])

    def start(self) -> None:
        self._agent.start(lambda error: self.inbox.put(partial(_raise, error)))
        self.processes = (self._agent.process_id,)

    def close(self) -> None:
        self._agent.close()


def _raise(error: BaseException) -> NoReturn:
    raise error


def _job(stage: OmniStageConfig, model: str) -> dict[str, Any]:
    """What an agent needs to know of its stage."""
    path = stage.function or stage.batch_function
    assert path is not None
    folder = _folder_of(path.partition(".")[0])
    return {
        "function": path,
        "folder": str(folder),
        # Its neighbours may be imported, too, unless they are the packages of this Python.
        "path": [] if folder in _own_packages() else [str(folder)],
        "stage": {**msgspec.to_builtins(stage), "label": stage.label, "name": stage.name},
        "model": stage.checkpoint(model),
    }


def _folder_of(module: str) -> Path:
    """Where a top-level module or package is, which this process has imported."""
    found = sys.modules[module]
    path = next(iter(found.__path__)) if hasattr(found, "__path__") else str(found.__file__)
    return Path(path).resolve().parent


def _own_packages() -> set[Path]:
    return {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")}


def _fields(struct: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in names}


def _sources(sources: Mapping[int, StageOutput]) -> dict[int, dict[str, Any]]:
    return {
        stage_id: _fields(output, _OUTPUT)
        | {"completions": [_fields(completion, _COMPLETION) for completion in output.completions]}
        for stage_id, output in sources.items()
    }


def _value_or_error(reply: dict[str, Any]) -> Any:
    try:
        return _value(reply)
    except Exception as error:
        return error


def _value(reply: dict[str, Any]) -> Any:
    """The value of a reply. Raises the error that it has instead."""
    if "error" not in reply:
        return reply["value"]
    error = reply["error"]
    raised: Exception
    if error["invalid"]:
        raised = InvalidRequestError(error["message"], "")
    else:
        raised = type(error["kind"], (Exception,), {})(error["message"])
    raise raised from _AgentTraceback(error["traceback"])
