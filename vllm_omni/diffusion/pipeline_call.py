# SPDX-License-Identifier: Apache-2.0
"""One call of a diffusers pipeline that is interrupted wherever it calls one of its modules.

The pipeline runs unchanged, in a coroutine of its own (a greenlet: a pipeline is an ordinary function, which cannot
`await`). The caller that resumes it gets its module calls, and decides when, and with which others, they are computed.
Knows no pipeline by name.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import greenlet
import torch
from diffusers import DiffusionPipeline, ModelMixin, ModularPipelineBlocks, SchedulerMixin
from diffusers.guiders import BaseGuidance
from torch.utils.hooks import RemovableHandle

from vllm_omni.diffusion.batched_call import ModuleCall, SharedTensors
from vllm_omni.diffusion.cache_state import Caches, CacheState


class CallAborted(BaseException):
    """Thrown into a call to abort it. No `except Exception` of a pipeline catches it."""


class PipelineCall:
    """A call of a pipeline, on its own copy of it: modules are shared; scheduler, guider, blocks and settings are not.

    It has its own grad mode too: a pipeline sets the thread's when it is called and restores it when it ends, while
    other calls are running. Hooks that it puts on a module see its own calls of modules only, and so do caches.

    Attributes:
        pipe: The copy.
        result: What the pipeline returned.
    """

    result: Any = None

    def __init__(self, pipe: DiffusionPipeline, caches: Caches | None = None) -> None:
        """
        Args:
            caches: Of the pipeline's denoisers.
        """
        copies: dict[int, Any] = {}
        self.pipe = _copy_pipe(pipe, copies)
        self._copies = list(copies.values())
        self._shared = SharedTensors()
        self._hooks = _CallHooks(pipe)
        self._cache = None if caches is None else CacheState(caches, self.pipe)
        self._greenlet: _CallGreenlet

    def start(self, arguments: dict[str, Any]) -> ModuleCall | None:
        """Calls the pipeline; returns its first module call, or None if it ends without any.

        Raises:
            Exception: The pipeline's.
        """
        self._greenlet = _CallGreenlet(self, lambda: self.pipe(**arguments))
        return self._advance(self._greenlet.switch)

    def resume(self, output: Any) -> ModuleCall | None:
        """Passes the output of the module call that it waits for; returns the next one. Raises as `start`."""
        return self._advance(lambda: self._greenlet.switch(output))

    def throw(self, error: BaseException) -> ModuleCall | None:
        """Makes the module call that it waits for raise; the pipeline unwinds. Raises as `start`."""
        return self._advance(lambda: self._greenlet.throw(error))

    def close(self) -> None:
        """Clears the copies: their hooks refer to them, and they refer to all tensors of the call."""
        for copied in self._copies:
            vars(copied).clear()
        del self.pipe, self._copies, self._hooks, self._cache, self._greenlet

    def _advance(self, switch: Callable[[], Any]) -> ModuleCall | None:
        cache = contextlib.nullcontext() if self._cache is None else self._cache.in_place()
        with torch.no_grad(), self._hooks.in_place(), cache:
            value = switch()
        if not self._greenlet.dead:
            return value
        self.result = value
        return None

    def wait_for(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Called in the coroutine, instead of `function`; returns its output."""
        call = ModuleCall.describe(self._hooks.bind(function), args, kwargs, self._shared)
        if self._cache is not None:
            call = dataclasses.replace(call, function=self._cache.bind(call.function))
        assert self._greenlet.parent is not None
        return self._greenlet.parent.switch(call)


def _copy_pipe(pipe: DiffusionPipeline, copies: dict[int, Any]) -> DiffusionPipeline:
    """A copy of a pipeline, and of pipelines in it, which may have one scheduler between them.

    Args:
        copies: By the id of the original; the new ones are added.
    """
    copied = copies[id(pipe)] = copy.copy(pipe)
    for name, component in vars(pipe).items():  # `components` would look at the class's signature first
        if isinstance(component, DiffusionPipeline):
            setattr(copied, name, copies.get(id(component)) or _copy_pipe(component, copies))
        elif isinstance(component, (SchedulerMixin, BaseGuidance, ModularPipelineBlocks)):
            if id(component) not in copies:
                copies[id(component)] = copy.deepcopy(component)
            setattr(copied, name, copies[id(component)])
    return copied


_PERMANENT_HOOKS = "transformers."
"""Modules with this prefix put hooks on a network once, for all of its calls (`output_hidden_states`)."""


class _CallHooks:
    """The hooks that a call of a pipeline has put on modules (`register_forward_hook`), to read what they compute.

    They are in place while the pipeline runs, and while a module call of its own is computed, which is joined with no
    other: they would get the rows of all.
    """

    def __init__(self, pipe: DiffusionPipeline) -> None:
        self._modules = modules_of(pipe)
        self._known: list[tuple[dict[int, Any], int, Any]] = []  # where a hook is, its id, and itself
        self._first_new = 0
        self._bound: dict[Callable[..., Any], Callable[..., Any]] = {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        for place, key, hook in self._known:
            place[key] = hook
        self._first_new = RemovableHandle.next_id
        try:
            yield
        finally:
            self._known = [(place, key, place.pop(key)) for place, key, _ in self._known if key in place]

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function that computes a module call of the running pipeline: with its hooks, where it has any."""
        if RemovableHandle.next_id > self._first_new:
            self._known += self._find_new()
        if not any(key in place for place, key, _ in self._known):
            return function
        return self._bound.setdefault(function, functools.partial(self._compute, function))

    def _compute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.in_place():
            return function(*args, **kwargs)

    def _find_new(self) -> Iterator[tuple[dict[int, Any], int, Any]]:
        for part in (part for module in self._modules.values() for part in module.modules()):
            for place in (part._forward_pre_hooks, part._forward_hooks):
                for key, hook in place.items():
                    if key >= self._first_new and not str(hook.__module__).startswith(_PERMANENT_HOOKS):
                        yield place, key, hook


class _CallGreenlet(greenlet.greenlet):
    def __init__(self, call: PipelineCall, run: Callable[[], Any]) -> None:
        super().__init__(run)
        self.call = call


class _Gate:
    """Replaces a module's function: if a pipeline that runs as a `PipelineCall` calls it, the call waits.

    It has the function's signature: modular pipelines pass what `forward` has parameters for.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__signature__ = inspect.signature(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = greenlet.getcurrent()
        if isinstance(current, _CallGreenlet):
            return current.call.wait_for(self._function, args, kwargs)
        return self._function(*args, **kwargs)


def set_execution_device(pipe: DiffusionPipeline, device: torch.device) -> None:
    """Fixes the device of a pipeline object, which diffusers otherwise looks up in every module at each call."""
    _set_on_class(pipe, "_execution_device", device)


def set_dtypes(pipe: DiffusionPipeline) -> None:
    """Fixes the dtypes of a pipeline's models, which will not change.

    diffusers otherwise looks them up in every parameter, at every step of each image of a batch.
    """
    for module in pipe.components.values():
        if isinstance(module, ModelMixin):
            _set_on_class(module, "dtype", module.dtype)


def _set_on_class(instance: Any, name: str, value: Any) -> None:
    """Replaces a property of one object by a value; its class and other instances do not change."""
    instance.__class__ = type(type(instance).__name__, (type(instance),), {name: value})


def modules_of(pipe: DiffusionPipeline) -> dict[str, torch.nn.Module]:
    """The networks of a pipeline object, by name."""
    return {name: module for name, module in vars(pipe).items() if isinstance(module, torch.nn.Module)}


def gate_modules(pipe: DiffusionPipeline) -> bool:
    """Puts a gate before every module of a pipeline: `forward`, or `decode` of an autoencoder.

    Call it again when these functions may have been replaced, as by offloading and adapters.

    Returns:
        Whether one was missing.
    """
    missing = [module for module in modules_of(pipe).values() if not isinstance(_function_of(module), _Gate)]
    for module in missing:
        setattr(module, _gated_name(module), _Gate(_function_of(module)))
    return bool(missing)


def is_gated(module: torch.nn.Module, function: Callable[..., Any]) -> bool:
    """Whether a call of this function is one of the module."""
    gate = _function_of(module)
    return isinstance(gate, _Gate) and gate._function == function


def _gated_name(module: torch.nn.Module) -> str:
    return "decode" if hasattr(module, "decode") else "forward"


def _function_of(module: torch.nn.Module) -> Callable[..., Any]:
    return getattr(module, _gated_name(module))


def on_method(owner: Any, name: str, hook: Callable[[Callable[..., Any], dict[str, Any]], Any]) -> None:
    """Calls `hook(method, arguments)` instead of a method of this one pipeline or scheduler, if it has the method.

    Args:
        hook: Gets the method with its arguments bound, and the arguments by name.
    """
    method = getattr(owner, name, None)
    if method is None:
        return
    signature = _signature(getattr(type(owner), name))

    def call_hook(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(owner, *args, **kwargs)
        bound.apply_defaults()
        return hook(lambda: method(*args, **kwargs), bound.arguments)

    setattr(owner, name, call_hook)


@functools.cache
def _signature(method: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(method)
