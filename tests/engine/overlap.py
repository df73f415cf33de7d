# SPDX-License-Identifier: Apache-2.0
"""Steps that overlap, on a CPU: exact, and no faster."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform


class Nothing:
    """An event or a stream of a device that computes at once."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def record(self, *args: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, stream: object) -> None: ...


@contextlib.contextmanager
def overlapping_steps() -> Iterator[pytest.MonkeyPatch]:
    """Engines that are started meanwhile can schedule asynchronously, here too."""
    with pytest.MonkeyPatch.context() as patch:
        if current_platform.is_cpu():
            _turn_on_for_cpu(patch)
        yield patch


def _turn_on_for_cpu(patch: pytest.MonkeyPatch) -> None:
    """On a CPU vLLM turns it off, and torch has no events and streams."""
    check = current_platform.check_and_update_config

    def check_the_rest(config: VllmConfig) -> None:
        is_async = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = is_async

    patch.setattr(type(current_platform), "check_and_update_config", staticmethod(check_the_rest))
    for name in ("Event", "Stream", "current_stream"):
        patch.setattr(torch.cuda, name, Nothing)
    patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
