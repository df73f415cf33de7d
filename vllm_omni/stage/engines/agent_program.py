# SPDX-License-Identifier: Apache-2.0
"""The agent of a function stage: a program that computes it in a Python of its own, without this package.

It runs by its path on Python 3.9 or newer with numpy and nothing else, so it imports only these. The stage's process
(`stage.engines.agent`) sends calls over a socket for each thread and waits for their replies; end-of-file ends the
agent. The user's module finds here the few names of `vllm_omni` that a `FunctionStage` needs.

A frame is the length of its header in 4 bytes, the header, which is JSON of `[value, [[dtype, shape], ...]]`, and the
bytes of those arrays. Both sides read and write frames with the code below.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

OLDEST = (3, 9)
"""The oldest Python that an agent runs on."""
_length = struct.Struct("<I")
_REFERENCES = ("array", "bytes", "items")
_NUMBERS = "biufc"
"""Kinds of numpy's types that a frame can have."""
_PR_SET_PDEATHSIG = 1


class DisconnectedError(Exception):
    """The other side is gone."""


class Channel:
    """A connection of one thread of the stage with one of the agent. Only one side sends at a time."""

    def __init__(self, sock: socket.socket, wait_s: float = 0.0, on_wait: Callable[[], None] | None = None) -> None:
        """
        Args:
            wait_s: Seconds that the other side may take; 0: any time.
            on_wait: Called each time that it has taken as long.
        """
        self._sock = sock
        self._wait_ms = 1000 * wait_s or None
        self._on_wait = on_wait
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)

    def send(self, value: Any) -> None:
        """
        Raises:
            TypeError: A part of the value is neither plain nor an array; nothing is sent.
            DisconnectedError: The other side is gone.
        """
        arrays: list[np.ndarray] = []
        plain = _encode(value, arrays)
        header = json.dumps([plain, [(array.dtype.str, array.shape) for array in arrays]]).encode()
        try:
            self._sock.sendall(_length.pack(len(header)) + header)
            for array in arrays:
                self._sock.sendall(_bytes_of(array))
        except OSError as error:
            raise DisconnectedError(str(error)) from error

    def receive(self) -> Any:
        """
        Raises:
            DisconnectedError: The other side is gone.
        """
        (length,) = _length.unpack(self._read(bytearray(_length.size)))
        plain, described = json.loads(self._read(bytearray(length)))
        arrays = [np.empty(shape, dtype) for dtype, shape in described]
        for array in arrays:
            self._read(_bytes_of(array))
        return _decode(plain, arrays)

    def _read(self, buffer: Any) -> Any:
        """Fills a buffer, and returns it."""
        view = memoryview(buffer)
        while view.nbytes:
            while not self._poller.poll(self._wait_ms):
                if self._on_wait is not None:
                    self._on_wait()
            try:
                size = self._sock.recv_into(view)
            except OSError:
                size = 0
            if not size:
                raise DisconnectedError("the other side is gone")
            view = view[size:]
        return buffer

    def close(self) -> None:
        # A thread that waits for the other side is woken, too.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _encode(value: Any, arrays: list[np.ndarray]) -> Any:
    """A value in JSON's types; its arrays are appended to the list."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, (bytes, bytearray, memoryview)):
        arrays.append(np.frombuffer(value, np.uint8))
        return {"bytes": len(arrays) - 1}
    if isinstance(value, (list, tuple)):
        return [_encode(item, arrays) for item in value]
    if isinstance(value, Mapping):
        is_reference = len(value) == 1 and next(iter(value)) in _REFERENCES
        if all(isinstance(key, str) for key in value) and not is_reference:
            return {key: _encode(item, arrays) for key, item in value.items()}
        return {"items": [[_encode(key, arrays), _encode(item, arrays)] for key, item in value.items()]}
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "detach"):  # a tensor of torch, which need not be installed
        value = value.detach().cpu()
        value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()  # numpy has no bfloat16
    if isinstance(value, np.ndarray) and value.dtype.kind in _NUMBERS:
        arrays.append(np.asarray(value, value.dtype.newbyteorder("="), order="C"))
        return {"array": len(arrays) - 1}
    what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise TypeError(f"{what} cannot pass between the stage and its Python; plain values, bytes, arrays and tensors can")


def _decode(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind == "array":
            return arrays[content]
        if kind == "bytes":
            return arrays[content].tobytes()
        if kind == "items":
            return {_decode(key, arrays): _decode(item, arrays) for key, item in content}
    return {key: _decode(item, arrays) for key, item in value.items()}


# What follows runs in the agent only.


class _Fields:
    """An object with the fields that it is given."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{type(self).__name__} has no {name!r} in a Python of its own")

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({fields})"


class StageRequest(_Fields):
    pass


class StageOutput(_Fields):
    @property
    def first_completion(self) -> Any:
        return next((completion for completion in self.completions if completion.index == 0), None)

    @property
    def finish_reason(self) -> Any:
        first = self.first_completion
        return None if first is None else first.finish_reason


class Completion(_Fields):
    pass


class OmniStageConfig(_Fields):
    def checkpoint(self, model: str) -> Any:
        return self.engine_args.get("model") or model


class StageRuntimeConfig(_Fields):
    pass


class OmniError(Exception):
    pass


class RequestError(OmniError):
    def __init__(self, message: str, request_id: str, stage_id: int | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class InvalidRequestError(RequestError, ValueError):
    pass


class NoParameters(_Fields):
    pass


class FunctionStage:
    """`vllm_omni.function_stage.FunctionStage`, whose docstrings describe the methods."""

    parameters: Any = NoParameters
    model_kind: str | None = None

    def __init__(self, stage: OmniStageConfig, model: str) -> None:
        self.stage = stage
        self.model = model

    @classmethod
    def voices(cls) -> Sequence[str]:
        return ()

    def start(self) -> None:
        pass

    def begin(self, request: StageRequest, parameters: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.begin")

    def window(self, state: Any, sources: Mapping[int, StageOutput]) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.window")

    def end(self, state: Any) -> Any:
        return None

    def abort(self, state: Any) -> None:
        pass


class Struct(_Fields):
    """Stands for the class of msgspec where that is not installed. Values come checked, and complete."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()


class Meta(_Fields):
    pass


def field(**options: Any) -> Any:
    return None


_NAMES: dict[str, dict[str, Any]] = {
    "vllm_omni.function_stage": {
        **{"FunctionStage": FunctionStage, "NoParameters": NoParameters, "Values": object},
        **{"CALLER": -1, "SOUND_RATE": 16_000},
    },
    "vllm_omni.inputs": {"StageRequest": StageRequest},
    "vllm_omni.outputs": {"StageOutput": StageOutput, "Completion": Completion},
    "vllm_omni.errors": {
        **{"OmniError": OmniError, "RequestError": RequestError, "InvalidRequestError": InvalidRequestError},
    },
    "vllm_omni.config": {},
    "vllm_omni.config.stage": {"OmniStageConfig": OmniStageConfig},
    "vllm_omni.config.stage_config": {"OmniStageConfig": OmniStageConfig},
    "vllm_omni": {
        **{"FunctionStage": FunctionStage, "OmniStageConfig": OmniStageConfig},
        **{"StageRequest": StageRequest, "StageOutput": StageOutput},
    },
}


def _provide(name: str, names: dict[str, Any]) -> None:
    module = types.ModuleType(name, "What a function stage needs of it, in a Python of its own.")
    module.__dict__.update(names)
    module.__path__ = []  # A module of it that is not here is not found, rather than found elsewhere.
    parent, _, own = name.rpartition(".")
    sys.modules[name] = module
    if parent in sys.modules:
        setattr(sys.modules[parent], own, module)


def _provide_modules() -> None:
    for name in sorted(_NAMES):
        _provide(name, _NAMES[name])
    if importlib.util.find_spec("msgspec") is None:
        _provide("msgspec", {"Struct": Struct, "Meta": Meta, "field": field})


class _ModuleOf:
    """Finds the user's module or package in its folder, and nothing else there: that may be a `site-packages`. Refuses
    what `_NAMES` does not have: the package may be installed here, without what it needs."""

    def __init__(self, name: str, folder: str) -> None:
        self._name = name
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.startswith("vllm_omni."):
            raise ModuleNotFoundError(
                f"No module named {name!r} in a Python of a stage's own, which has of it {', '.join(_NAMES)}", name=name
            )
        return importlib.machinery.PathFinder.find_spec(name, [self._folder]) if name == self._name else None


_Sources = dict  # Outputs by stage id, each a dict of its fields.


class _Agent:
    """The stage in this process, and the states of its requests."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Imports and starts the stage. Raises whatever that raises."""
        _provide_modules()
        module, _, name = job["function"].rpartition(".")
        sys.meta_path.insert(0, _ModuleOf(module.partition(".")[0], job["folder"]))
        sys.path += job["path"]
        found = getattr(importlib.import_module(module), name)
        self._states: dict[int, Any] = {}
        self._function = found
        if isinstance(found, type):
            config = job["stage"]
            config["runtime"] = StageRuntimeConfig(**config["runtime"])
            self._stage = found(OmniStageConfig(**config), job["model"])
            self._stage.start()

    def begin(self, key: int, request: dict[str, Any], parameters: dict[str, Any]) -> None:
        self._states[key] = self._stage.begin(StageRequest(**request), self._parameters(parameters))

    def window(self, key: int, sources: _Sources) -> Any:
        return self._stage.window(self._states[key], _read_sources(sources))

    def end(self, key: int) -> Any:
        value = self._stage.end(self._states[key])
        del self._states[key]  # After an error `abort` follows.
        return value

    def abort(self, key: int) -> None:
        self._stage.abort(self._states.pop(key))

    def call(self, request: dict[str, Any], sources: _Sources) -> Any:
        return self._function(StageRequest(**request), _read_sources(sources))

    def call_batch(self, requests: list[dict[str, Any]], sources: list[_Sources]) -> Any:
        return self._function([StageRequest(**each) for each in requests], [_read_sources(each) for each in sources])

    def _parameters(self, values: dict[str, Any]) -> Any:
        declared = self._stage.parameters
        if hasattr(declared, "__struct_fields__"):  # msgspec is installed here
            return sys.modules["msgspec"].convert(values, declared)
        return declared(**values)

    def serve(self, channel: Channel) -> None:
        """Answers the calls of one thread until the stage ends, or an error that is no exception ends this process."""
        try:
            while True:
                name, arguments = channel.receive()
                _answer(channel, getattr(self, name), arguments)
        except DisconnectedError:
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)


def _answer(channel: Channel, method: Callable[..., Any], arguments: list[Any]) -> None:
    try:
        value = method(*arguments)
        if isinstance(value, Iterator):
            _stream(channel, value)
        elif method.__name__ == "call_batch" and isinstance(value, Sequence):
            channel.send({"results": [_result(item) for item in value]})
        else:
            channel.send({"value": value})
    except DisconnectedError:
        raise
    except Exception as error:
        channel.send(describe(error))


def _stream(channel: Channel, pieces: Iterator[Any]) -> None:
    """Each piece is made when the stage asks for it."""
    channel.send({"stream": True})
    try:
        while channel.receive():
            try:
                piece = next(pieces)
            except StopIteration:
                break
            channel.send({"value": piece})
    finally:
        if hasattr(pieces, "close"):
            pieces.close()
    channel.send({"end": True})


def _result(value: Any) -> dict[str, Any]:
    return describe(value) if isinstance(value, Exception) else {"value": value}


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as plain data."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    is_invalid = isinstance(error, InvalidRequestError)
    return {"error": {"kind": type(error).__name__, "message": str(error), "traceback": text, "invalid": is_invalid}}


def _read_sources(sources: _Sources) -> dict[int, StageOutput]:
    return {
        stage_id: StageOutput(**{**output, "completions": [Completion(**each) for each in output["completions"]]})
        for stage_id, output in sources.items()
    }


def _end_with_parent(parent: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Arguments: the stage's process id, and the numbers of its sockets."""
    parent, *numbers = map(int, sys.argv[1:])
    _end_with_parent(parent)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the caller handles it.
    faulthandler.register(signal.SIGUSR1)  # The stage asks for the stacks of a call that takes long.
    first, *others = [Channel(socket.socket(fileno=number)) for number in numbers]
    try:
        job = first.receive()
        agent = _Agent(job)
        version = ".".join(map(str, sys.version_info[:3]))
        first.send({"value": {"python": version, "numpy": np.__version__}})
    except Exception as error:
        first.send(describe(error))
        os._exit(1)
    for channel in others:
        threading.Thread(target=agent.serve, args=(channel,), daemon=True).start()
    agent.serve(first)


if __name__ == "__main__":
    main()
