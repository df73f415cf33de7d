# SPDX-License-Identifier: Apache-2.0
"""The denoiser of a diffusion stage in several processes, each with a device of its own.

The stage's process is rank 0 and runs the pipeline. Each other rank, a *follower*, has loaded the denoisers only, and
computes the calls that it receives. Ranks are in `data_parallel_size` groups of `context_parallel_size`: a group
computes a share of a batch's rows, its members together by diffusers' context parallelism.

A call and its result consist of a message over a pipe and one buffer with all tensors over torch.distributed. So
neither side waits for the other in a collective operation that the other may never enter: a pipe has an end of file.
Calls and replies are numbered. A rank that cannot finish an exchange, for lack of memory for instance, would take the
next message for that of another call: so the stage ends.
Inside a group ranks do wait for each other. There a rank that fails alone ends its process, and a thread of rank 0
detects the end of a follower.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from vllm.platforms import current_platform
from vllm.utils.system_utils import set_process_title

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.batched_call import RowParallelFunction
from vllm_omni.diffusion.context_parallel import enable_context_parallel
from vllm_omni.diffusion.loader import load_denoisers
from vllm_omni.errors import StageConfigError
from vllm_omni.metrics.logs import get_logger

logger = get_logger(__name__)

AGREE = timedelta(seconds=10)
"""The ranks of a group fail at the same point of a call, if all of them do."""
_END_S = 30.0
"""Seconds to wait for a killed process, which the system may take long to remove."""
_PLAIN = (bool, int, float, str, type(None))
_SEQUENCES: dict[str, Any] = {"Size": torch.Size, "tuple": tuple, "list": list, "set": set}


class FollowerError(RuntimeError):
    """A follower has ended, or the ranks do not compute the same: the stage cannot continue."""


def init_device(index: int, memory: float | int | None) -> torch.device:
    """Makes a device this process's own.

    Args:
        index: Among the visible ones; without an accelerator it is the CPU.
        memory: Share of its memory: a fraction, or bytes; None: all.
    """
    device = torch.device(current_platform.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        if memory is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(memory if isinstance(memory, float) else memory / total, device)
    return device


# Messages.


class _Started(msgspec.Struct, frozen=True, tag=True):
    """A follower's denoisers are loaded. `problem`: why they are not; then it ends."""

    problem: str | None = None


class _Tensor(msgspec.Struct, frozen=True, tag=True):
    """A tensor.

    Attributes:
        dtype: torch's name without the prefix.
        data: Its bytes; None: it is of the denoiser's device, and the next part of the buffer.
    """

    shape: list[int]
    dtype: str
    data: bytes | None


class _Dtype(msgspec.Struct, frozen=True, tag=True):
    name: str


class _Sequence(msgspec.Struct, frozen=True, tag=True):
    kind: Literal["Size", "tuple", "list", "set"]
    items: "list[_Value]"


class _Mapping(msgspec.Struct, frozen=True, tag=True):
    entries: "dict[int | str, _Value]"


_Value = bool | int | float | str | None | _Tensor | _Dtype | _Sequence | _Mapping
"""A subclass of a list, a tuple or a dict arrives as that: rank 0's own output shows the class of an output."""


class _Packed(msgspec.Struct, frozen=True):
    """A value without its tensors of the denoiser's device. `sizes`: their bytes in the buffer that follows."""

    value: _Value
    sizes: list[int]


class _DenoiserCall(msgspec.Struct, frozen=True, tag=True):
    """A call of a denoiser, given by the component's name. `arguments`: (args, kwargs)."""

    number: int
    name: str
    arguments: _Packed


class _DenoiserReply(msgspec.Struct, frozen=True, tag=True):
    """The end of a call, which has the same number.

    Attributes:
        output: None: another rank of the group returns the same.
        error: Of a call that raised.
    """

    number: int
    output: _Packed | None = None
    error: str | None = None


_Message = _Started | _DenoiserCall | _DenoiserReply
_DECODER: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(_Message)


def _send(pipe: Connection, message: _Message) -> None:
    pipe.send_bytes(msgspec.msgpack.encode(message))


def _receive(pipe: Connection) -> _Message:
    return _DECODER.decode(pipe.recv_bytes())


def pack(value: Any, device: torch.device) -> tuple[_Packed, torch.Tensor]:
    """A value as a part of a message, and a buffer (uint8, on the device) with all of its tensors on this device.

    Raises:
        TypeError: It has an object that is neither a tensor nor plain: the receiver could not share its state.
    """
    parts: list[torch.Tensor] = []
    described = _describe(value, device, parts)
    buffer = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
    return _Packed(described, [len(part) for part in parts]), buffer


def _describe(value: Any, device: torch.device, parts: list[torch.Tensor]) -> _Value:
    """Appends the bytes of tensors on this device to `parts`."""
    match value:
        case torch.Tensor():
            copy = value.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
            is_part = value.device == device
            if is_part:
                parts.append(copy)
            data = None if is_part else copy.cpu().numpy().tobytes()
            return _Tensor(list(value.shape), _name(value.dtype), data)
        case torch.dtype():
            return _Dtype(_name(value))
        case list() | tuple() | set():
            kind: Any = next(name for name, kind in _SEQUENCES.items() if isinstance(value, kind))
            return _Sequence(kind, [_describe(item, device, parts) for item in value])
        case dict() if all(type(key) in (int, str) for key in value):
            return _Mapping({key: _describe(item, device, parts) for key, item in value.items()})
        case _ if type(value) in _PLAIN:
            return value
    raise TypeError(f"a denoiser in several processes cannot share a {type(value).__name__} with its pipeline")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unpack(packed: _Packed, receive: Callable[[int], torch.Tensor]) -> Any:
    """The value of `pack`. `receive` returns the buffer, given its size."""
    return _restore(packed.value, iter(receive(sum(packed.sizes)).split(packed.sizes)))


def _restore(value: _Value, parts: Iterator[torch.Tensor]) -> Any:
    match value:
        case _Tensor():
            # A copy: a dtype needs an aligned address.
            data = next(parts).clone() if value.data is None else torch.tensor(np.frombuffer(value.data, np.uint8))
            return data.view(getattr(torch, value.dtype)).view(value.shape)
        case _Dtype():
            return getattr(torch, value.name)
        case _Sequence():
            return _SEQUENCES[value.kind]([_restore(item, parts) for item in value.items])
        case _Mapping():
            return {key: _restore(item, parts) for key, item in value.entries.items()}
        case _:
            return value


# All ranks.


@dataclass(frozen=True)
class _Start:
    """Start parameters of a follower.

    Attributes:
        memory: As in `init_device`.
        num_threads: For tensor operations.
        rendezvous: A file in which the ranks find each other.
    """

    rank: int
    model: str
    config: DiTConfig
    memory: float | int | None
    num_threads: int
    rendezvous: str


class _Group:
    """The torch.distributed group of all ranks, which this process has joined."""

    def __init__(self, start: _Start, denoisers: Mapping[str, torch.nn.Module], device: torch.device) -> None:
        """Waits for all ranks.

        Raises:
            StageConfigError: As `enable_context_parallel`.
        """
        config, self._device = start.config, device
        # Gloo would listen at the address of the host's name, which other hosts may reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            init_method=f"file://{start.rendezvous}",
            rank=start.rank,
            world_size=config.world_size,
        )
        self._agreement: Any = None
        size = config.context_parallel_size
        if size > 1:
            for index in range(config.data_parallel_size):
                ranks = list(range(index * size, (index + 1) * size))
                group = dist.new_group(ranks, backend="gloo", timeout=AGREE)
                if start.rank in ranks:
                    self._agreement = group
            try:
                for denoiser in denoisers.values():
                    enable_context_parallel(denoiser, config, device)
            except BaseException:
                self.leave()
                raise
        self._forwards = {name: denoiser.forward for name, denoiser in denoisers.items()}

    def call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """This rank's part of a call.

        Raises:
            FollowerError: The other ranks of its context parallel group have not failed as well.
            Exception: The denoiser's, in all of these ranks.
        """
        try:
            return self._forwards[name](*args, **kwargs)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            if self._agreement is not None:
                self._agree(error)
            raise

    def _agree(self, error: Exception) -> None:
        try:
            dist.monitored_barrier(self._agreement, AGREE)
        except RuntimeError as alone:
            raise FollowerError(f"one rank of a denoiser failed: {type(error).__name__}: {error}") from alone

    def send(self, buffer: torch.Tensor, rank: int) -> None:
        """
        Raises:
            FollowerError: The other rank has ended. `receive` raises it as well.
        """
        if len(buffer):
            try:
                dist.send(buffer, rank)
            except RuntimeError as error:
                raise FollowerError(f"rank {rank} of the denoiser has ended") from error

    def receive(self, size: int, rank: int) -> torch.Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        if size:
            try:
                dist.recv(buffer, rank)
            except RuntimeError as error:
                raise FollowerError(f"rank {rank} of the denoiser has ended") from error
        return buffer

    def leave(self) -> None:
        dist.destroy_process_group()


# A follower.


def run_follower(start: _Start, calls: Connection) -> None:
    """The main function of a follower. Ends the process when `calls` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the stage ends this one.
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    set_process_title(f"denoiser{start.rank}", prefix="vllm_omni")
    torch.set_num_threads(start.num_threads)
    with suppress(EOFError, ConnectionError), torch.no_grad():
        _serve(start, calls)
    os._exit(0)  # Faster than the interpreter's finalization.


def _serve(start: _Start, calls: Connection) -> None:
    """
    Raises:
        EOFError, ConnectionError: Rank 0 has closed the pipe.
        Exception: This rank cannot continue.
    """
    try:
        device = init_device(start.rank, start.memory)
        denoisers = load_denoisers(start.model, start.config, device)
    except StageConfigError as error:
        _send(calls, _Started(str(error)))
        return
    _send(calls, _Started())
    try:
        group = _Group(start, denoisers, device)
    except StageConfigError:
        _receive(calls)  # Rank 0 raises the same, and ends this process.
        return
    returns_output = start.rank % start.config.context_parallel_size == 0
    while True:
        call = _receive(calls)
        assert isinstance(call, _DenoiserCall)
        _compute(call, group, calls, device, returns_output)


def _exit_with_parent() -> None:
    """Exits with the parent, also in the middle of a call, and if the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _compute(call: _DenoiserCall, group: _Group, calls: Connection, device: torch.device, returns_output: bool) -> None:
    args, kwargs = unpack(call.arguments, lambda size: group.receive(size, 0))
    try:
        output = group.call(call.name, args, kwargs)
        message, buffer = pack(output, device) if returns_output else (None, None)
    except (torch.AcceleratorError, FollowerError):
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        _send(calls, _DenoiserReply(call.number, output=message))
        if buffer is not None:
            group.send(buffer, 0)
        return
    # After the except block: an exception that is being handled keeps the tensors of the call.
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    _send(calls, _DenoiserReply(call.number, error=text))


# Rank 0.


class _Follower:
    """Rank 0's handle of a follower."""

    def __init__(self, start: _Start) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = start.rank
        self._calls, its_calls = context.Pipe()
        self.process = context.Process(target=run_follower, args=(start, its_calls), daemon=True)
        self.process.start()
        its_calls.close()

    def send(self, message: _Message) -> None:
        """
        Raises:
            FollowerError: It has ended. `receive` raises it as well.
        """
        try:
            _send(self._calls, message)
        except OSError as error:
            raise FollowerError(f"rank {self.rank} of the denoiser has ended") from error

    def receive(self) -> Any:  # the message that is due
        try:
            return _receive(self._calls)
        except (EOFError, OSError) as error:
            raise FollowerError(f"rank {self.rank} of the denoiser has ended") from error

    def end(self) -> None:
        """Ends it at once: it has nothing to complete, and may wait for ranks that have failed."""
        self._calls.close()
        self.process.kill()
        self.process.join(_END_S)


class ParallelDenoisers:
    """The followers of this process, rank 0."""

    def __init__(
        self, model: str, config: DiTConfig, memory: float | int | None, on_failure: Callable[[], None]
    ) -> None:
        """Starts the followers, which load their denoisers.

        Args:
            memory: As in `init_device`, of each device.
            on_failure: Called from any thread when a follower has ended on its own.
        """
        self._config = config
        self._on_failure = on_failure
        self._failing = threading.Lock()
        self._is_closing = False
        self._number = 0  # of the last call
        self._folder = tempfile.TemporaryDirectory(prefix="denoiser-")
        num_threads = torch.get_num_threads()
        if current_platform.is_cpu():  # which all ranks share
            num_threads = max(1, num_threads // config.world_size)
        starts = [
            _Start(rank, model, config, memory, num_threads, str(Path(self._folder.name, "rendezvous")))
            for rank in range(config.world_size)
        ]
        self._start = starts[0]
        self._group: _Group | None = None
        self._followers: list[_Follower] = []
        for start in starts[1:]:
            self._followers.append(_Follower(start))

    def join(self, denoisers: Mapping[str, torch.nn.Module], device: torch.device) -> None:
        """Waits for the followers, and makes all ranks compute each call of these denoisers.

        Args:
            denoisers: On their device, by component.

        Raises:
            StageConfigError: A follower cannot load its denoisers, or diffusers cannot compute them together.
            FollowerError: A follower has ended.
        """
        for follower in self._followers:
            started = follower.receive()
            if started.problem is not None:
                raise StageConfigError(f"rank {follower.rank} of the denoiser: {started.problem}")
        threading.Thread(target=self._watch, name="denoiser-ranks", daemon=True).start()
        torch.set_num_threads(self._start.num_threads)
        self._group = _Group(self._start, denoisers, device)
        for name, denoiser in denoisers.items():
            denoiser.forward = _ParallelForward(self, name, self._config.data_parallel_size, device)

    def close(self) -> None:
        """Ends the followers."""
        self._is_closing = True
        for follower in self._followers:
            follower.end()
        if self._group is not None:
            self._group.leave()
        self._folder.cleanup()

    def _watch(self) -> None:
        wait([follower.process.sentinel for follower in self._followers])
        if not self._is_closing:
            self._fail()

    def _fail(self) -> None:
        with self._failing:  # One thread reports it; the process ends meanwhile.
            if not self._is_closing:
                self._is_closing = True
                codes = {follower.rank: follower.process.exitcode for follower in self._followers}
                logger.error("the denoiser's processes cannot continue; exit codes by rank: %s", codes)
                self._on_failure()

    def compute(self, name: str, shares: Sequence[tuple[tuple, dict[str, Any]]], device: torch.device) -> list[Any]:
        """Calls a denoiser with each of these arguments; the group of ranks with the same index computes them.

        Raises:
            FollowerError: A follower has ended, ranks do not compute the same, or an exchange with one failed.
            Exception: The first one of a call.
        """
        assert self._group is not None
        if self._is_closing:
            raise FollowerError("the denoiser's processes have ended")
        size = self._config.context_parallel_size
        packed = [pack(share, device) for share in shares]
        busy = [follower for follower in self._followers if follower.rank // size < len(shares)]
        self._number += 1
        try:
            for follower in busy:
                message, buffer = packed[follower.rank // size]
                follower.send(_DenoiserCall(self._number, name, message))
                self._group.send(buffer, follower.rank)
            errors: list[Exception] = []
            outputs: list[Any] = []
            try:
                outputs.append(self._group.call(name, *shares[0]))
            except (torch.AcceleratorError, FollowerError):
                raise
            except Exception as error:
                errors.append(error)
            for follower in busy:
                reply = follower.receive()
                if reply.number != self._number:
                    raise FollowerError(f"rank {follower.rank} of the denoiser is at another call")
                if reply.error is not None:
                    errors.append(RuntimeError(f"rank {follower.rank} of the denoiser: {reply.error}"))
                elif reply.output is not None:
                    outputs.append(unpack(reply.output, partial(self._group.receive, rank=follower.rank)))
        except torch.AcceleratorError:
            raise
        except Exception as error:
            self._fail()
            if isinstance(error, FollowerError):
                raise
            raise FollowerError(f"an exchange with a rank of the denoiser failed: {error}") from error
        if errors:
            raise errors[0]
        return outputs


class _ParallelForward(RowParallelFunction):
    """Replaces a denoiser's `forward`."""

    def __init__(self, ranks: ParallelDenoisers, name: str, num_shares: int, device: torch.device) -> None:
        self.num_shares = num_shares
        self._ranks = ranks
        self._name = name
        self._device = device

    def compute_shares(self, shares: Sequence[tuple[tuple, dict[str, Any]]]) -> list[Any]:
        return self._ranks.compute(self._name, shares, self._device)
