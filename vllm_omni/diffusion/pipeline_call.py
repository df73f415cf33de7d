# SPDX-License-Identifier: Apache-2.0
"""One call of a diffusers pipeline that can be interrupted wherever it calls one of its modules.

The pipeline runs as it would for anybody, in a coroutine of its own (a greenlet: a pipeline is an ordinary function,
which no `await` can leave). Whoever resumes it gets the module calls it makes, and decides when, and with which others,
they are computed. Knows no pipeline by name.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import greenlet
import torch
from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin

from vllm_omni.diffusion.batched_call import ModuleCall, SharedTensors


class CallAborted(BaseException):
    """Thrown into a call that nobody wants any more. No `except Exception` of a pipeline holds it up."""


class PipelineCall:
    """A call of a pipeline, on its own copy of it: modules are shared, the scheduler and all settings are not.

    Its grad mode is its own as well: a pipeline sets the thread's when it is called and restores it when it ends, in
    the middle of other calls.

    Attributes:
        pipe: The copy.
        result: What the pipeline returned.
    """

    result: Any = None

    def __init__(self, pipe: DiffusionPipeline) -> None:
        self.pipe = copy.copy(pipe)
        for name, component in vars(pipe).items():  # `components` would look at the class's signature first
            if isinstance(component, SchedulerMixin):
                setattr(self.pipe, name, copy.deepcopy(component))
        self._shared = SharedTensors()
        self._greenlet: _CallGreenlet

    def start(self, arguments: dict[str, Any]) -> ModuleCall | None:
        """Calls the pipeline; returns its first module call, or None where it is done without any.

        Raises:
            Exception: What the pipeline raises.
        """
        self._greenlet = _CallGreenlet(self, lambda: self.pipe(**arguments))
        return self._advance(self._greenlet.switch)

    def resume(self, output: Any) -> ModuleCall | None:
        """Gives the output of the module call that it waits for; returns the next one. Raises as `start`."""
        return self._advance(lambda: self._greenlet.switch(output))

    def throw(self, error: BaseException) -> ModuleCall | None:
        """Makes the module call that it waits for raise; the pipeline unwinds. Raises as `start`."""
        return self._advance(lambda: self._greenlet.throw(error))

    def close(self) -> None:
        """Takes the copy apart: its hooks refer to it, and it to all that the pipeline has computed."""
        vars(self.pipe).clear()
        del self.pipe, self._greenlet

    def _advance(self, switch: Callable[[], Any]) -> ModuleCall | None:
        with torch.no_grad():
            value = switch()
        if not self._greenlet.dead:
            return value
        self.result = value
        return None

    def wait_for(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Called in the coroutine, instead of `function`; returns its output."""
        call = ModuleCall.describe(function, args, kwargs, self._shared)
        assert self._greenlet.parent is not None
        return self._greenlet.parent.switch(call)


class _CallGreenlet(greenlet.greenlet):
    def __init__(self, call: PipelineCall, run: Callable[[], Any]) -> None:
        super().__init__(run)
        self.call = call


class _Gate:
    """Stands in for a module's function: a call of it made by a pipeline that runs as a `PipelineCall` waits."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = greenlet.getcurrent()
        if isinstance(current, _CallGreenlet):
            return current.call.wait_for(self._function, args, kwargs)
        return self._function(*args, **kwargs)


def tell_device(pipe: DiffusionPipeline, device: torch.device) -> None:
    """Lets a pipeline object know where it computes.

    diffusers asks every module of every component for that, each time that the pipeline is called.
    """
    _set_on_class(pipe, "_execution_device", device)


def tell_dtypes(pipe: DiffusionPipeline) -> None:
    """Lets the models of a pipeline know their dtype, which will not change any more.

    diffusers looks at every parameter for that, and its pipelines ask at every step: once for each picture of a batch.
    """
    for module in pipe.components.values():
        if isinstance(module, ModelMixin):
            _set_on_class(module, "dtype", module.dtype)


def _set_on_class(instance: Any, name: str, value: Any) -> None:
    """Gives an object's property one value for good; its class, and all others of that, stay as they are."""
    instance.__class__ = type(type(instance).__name__, (type(instance),), {name: value})


def gate_modules(pipe: DiffusionPipeline) -> None:
    """Puts a gate before every module of a pipeline: `forward`, or `decode` where it is an autoencoder.

    To be called again when something may have replaced these functions, as offloading and adapters do.
    """
    for module in vars(pipe).values():
        if isinstance(module, torch.nn.Module):
            name = "decode" if hasattr(module, "decode") else "forward"
            function = getattr(module, name)
            if not isinstance(function, _Gate):
                setattr(module, name, _Gate(function))


def on_method(pipe: DiffusionPipeline, name: str, hook: Callable[[Callable[..., Any], dict[str, Any]], Any]) -> None:
    """Has `hook(method, arguments)` called instead of a method of this one pipeline object, if it has the method.

    Args:
        hook: Gets the method, to be called with the arguments by name, or not at all.
    """
    method = getattr(pipe, name, None)
    if method is None:
        return
    signature = _signature(getattr(type(pipe), name))

    def call_hook(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(pipe, *args, **kwargs)
        bound.apply_defaults()
        return hook(lambda: method(*args, **kwargs), bound.arguments)

    setattr(pipe, name, call_hook)


@functools.cache
def _signature(method: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(method)
