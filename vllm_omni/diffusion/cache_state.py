# SPDX-License-Identifier: Apache-2.0
"""What diffusers' caches hold of a call of a pipeline: of each concurrent call its own."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

from diffusers import CacheMixin, DiffusionPipeline
from diffusers.hooks import HookRegistry
from diffusers.hooks.hooks import StateManager

Place = tuple[dict[str, Any], str, Any]
"""Attributes of a hook, the name of one, and its value."""

TIMESTEP = "current_timestep_callback"
"""The setting of caches that depend on the timestep."""


class Timestep:
    """The current timestep of `pipe`, a copy of the loaded one."""

    pipe: Any

    def __call__(self) -> Any:
        return self.pipe.current_timestep


class Caches:
    """The caches of a pipeline's denoisers. diffusers keeps their states in hooks on the networks, which all calls
    share: those that are there at first stay empty."""

    def __init__(self, pipe: DiffusionPipeline) -> None:
        self.timesteps: list[Timestep] = []
        self.empty: list[Place] = []
        for denoiser in vars(pipe).values():
            if isinstance(denoiser, CacheMixin) and denoiser.is_cache_enabled:
                callback = getattr(denoiser._cache_config, TIMESTEP, None)
                self.timesteps += [callback] if isinstance(callback, Timestep) else []
                for part in denoiser.modules():
                    self.empty += _states_of(getattr(part, "_diffusers_hook", None))


class CacheState:
    """What the caches hold of one call."""

    def __init__(self, caches: Caches, pipe: DiffusionPipeline) -> None:
        """
        Args:
            pipe: Of the call.
        """
        self._caches = caches
        self._pipe = pipe
        values = copy.deepcopy([value for *_, value in caches.empty])  # Hooks that share one share its copy.
        self._own = [(*place[:2], value) for place, value in zip(caches.empty, values, strict=True)]
        self._bound: dict[Callable[..., Any], Callable[..., Any]] = {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The caches have this state, while the pipeline runs or a module call of it is computed."""
        for timestep in self._caches.timesteps:
            timestep.pipe = self._pipe
        for attributes, name, value in self._own:
            attributes[name] = value
        try:
            yield
        finally:
            self._own = [(attributes, name, attributes[name]) for attributes, name, _ in self._own]
            for attributes, name, value in self._caches.empty:
                attributes[name] = value

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is computed with this state."""
        return self._bound.setdefault(function, functools.partial(self._compute, function))

    def _compute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.in_place():
            return function(*args, **kwargs)


def _states_of(registry: HookRegistry | None) -> Iterator[Place]:
    # Also of hooks that are not stateful by themselves: they read the states of others.
    hooks = () if registry is None else registry.hooks.values()
    for attributes in (vars(hook) for hook in hooks):
        for name, value in attributes.items():
            if isinstance(value, StateManager) or type(value).__name__.endswith("State"):
                yield attributes, name, value
