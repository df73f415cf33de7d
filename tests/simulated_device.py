# SPDX-License-Identifier: Apache-2.0
"""A simulated device. Its tensors have real values; mixing them with CPU tensors raises.

torch's `FakeTensorMode` detects mixed devices too, but its tensors have no values: code that reads one (`tolist`, a
boolean index, the length of a reply) fails, vLLM's kernels have no rule for it, and results cannot be compared. Here
each operation runs on the CPU, so that whole modules run, with the results of a CPU.

For torch the tensors are on `meta`, the only device besides the CPU that every build can name, move modules to and
create tensors on; `is_cuda` is true. CUDA kernels, streams and graphs are not run, and neither is inference mode, which
torch does not support for such tensors.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

DEVICE = torch.device("meta")

_aten = torch.ops.aten
# Copies between devices.
_COPIES = {_aten._to_copy.default, _aten.copy_.default, _aten.copy.default}
# CPU tensors may be indices of a device's tensor; torch copies them.
_INDEXING = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}
# These synchronize: their result, or its size, is needed on the CPU.
_WAITING = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default, _aten.equal.default}


class DeviceTensor(torch.Tensor):
    """A tensor on the simulated device; `values` are on the CPU."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "DeviceTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
            requires_grad=values.requires_grad,
        )
        tensor.values = values
        return tensor

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, other: "DeviceTensor") -> None:
        self.values = other.values

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_as_index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_as_index(index), value)

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **kwargs: Any) -> Any:
        raise TypeError("can't convert a device's tensor to numpy; use Tensor.cpu()")

    def __repr__(self, **kwargs: Any) -> str:
        return f"DeviceTensor({self.values!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _run(func, args, kwargs or {})


class _FromPython(TorchFunctionMode):
    """Calls that are no operations: `torch.tensor(..., device="meta")`, and generators, which lose their class."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        if isinstance(kwargs.get("generator"), _Generator):
            where = args[0].device if isinstance(args[0], torch.Tensor) else kwargs.get("device") or "cpu"
            if torch.device(where).type != kwargs["generator"].device.type:
                raise RuntimeError(f"{func}: the tensor is on {where}, the generator on {kwargs['generator'].device}")
        return func(*args, **kwargs)


class _Generator(torch.Generator):
    """torch's, also for the simulated device."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls)

    def __init__(self, device: Any = "cpu") -> None:
        self._device = torch.device(device)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device


def _as_index(index: Any) -> Any:
    """Lists of numbers as tensors, which torch would create without an operation."""
    if isinstance(index, tuple):
        return tuple(_as_index(part) for part in index)
    return torch.tensor(index, dtype=torch.int64) if isinstance(index, list) else index


class SimulatedDevice(TorchDispatchMode):
    """Inside, `DEVICE` can run operations.

    Attributes:
        num_waits: Number of times that the CPU waited for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        self.num_waits += _waits(func, args, kwargs)
        return _run(func, args, kwargs)


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    is_on_device = any(isinstance(leaf, DeviceTensor) for leaf in leaves)
    if is_on_device:
        _refuse_mixture(func, args, leaves)
    assert all(isinstance(leaf, DeviceTensor) or not leaf.is_meta for leaf in leaves if isinstance(leaf, torch.Tensor))
    device = kwargs.get("device")
    if device is not None:
        is_on_device = torch.device(device).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    on_cpu = {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs
    out = func(*pytree.tree_map(_values, args), **pytree.tree_map(_values, on_cpu))
    if func is _aten.copy_.default:
        return args[0]
    if not is_on_device:
        return out
    out = pytree.tree_map(lambda leaf: DeviceTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


def _refuse_mixture(func: Any, args: tuple, leaves: list[Any]) -> None:
    """As torch does on a GPU.

    Raises:
        RuntimeError: An operation of several tensors has some on the device and some on the CPU.
    """
    if func in _COPIES:
        return
    if func in _INDEXING:
        leaves = [args[0], *args[2:]] if isinstance(args[0], DeviceTensor) else leaves
    for leaf in leaves:
        # 0-dimensional tensors work with any device.
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor) and leaf.ndim > 0:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {DEVICE} and cpu")


def _waits(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    leaves = pytree.tree_leaves(args)
    if not any(isinstance(leaf, DeviceTensor) for leaf in leaves):
        return False
    if func is _aten._to_copy.default:
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "cpu" and not kwargs.get("non_blocking")
    if func is _aten.copy_.default:
        return not isinstance(args[0], DeviceTensor) and not (len(args) > 2 and args[2])
    has_mask = func in _INDEXING and any(index is not None and index.dtype is torch.bool for index in args[1])
    return func in _WAITING or has_mask


def _values(leaf: Any) -> Any:
    return leaf.values if isinstance(leaf, DeviceTensor) else leaf


def on_cpu(tree: Any) -> Any:
    """The same, tensors of the simulated device on the CPU.

    Raises:
        AssertionError: There is none.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    assert leaves and all(isinstance(leaf, DeviceTensor) for leaf in leaves), "a tensor left the device"
    return pytree.tree_map(_values, tree)


class _Event:
    """An event of the device, whose operations are synchronous."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def simulate_device() -> Iterator[SimulatedDevice]:
    """The value of the fixture `device`."""
    with pytest.MonkeyPatch.context() as patch, _FromPython(), SimulatedDevice() as mode:
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(torch.cuda, "Event", _Event)
        yield mode
