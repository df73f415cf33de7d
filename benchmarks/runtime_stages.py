# SPDX-License-Identifier: Apache-2.0
"""The function stages of `runtime.py` and `scale_out.py`.

`time.monotonic()` is one clock for all processes of a machine.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch

from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput

WAIT_S = 0.02

_payloads: dict[int, torch.Tensor] = {}


def nothing(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
    """A stage's least work."""
    return {"text": ""}


def wait(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
    """Stands for a step on a device: takes time, but no core."""
    time.sleep(WAIT_S)
    return {"text": ""}


def send(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
    """Hands over the time, and a tensor of the option `num_bytes`, which is made once: the hop starts when it ends."""
    num_bytes = request.options["num_bytes"]
    values: dict[str, Any] = {}
    if num_bytes:
        if num_bytes not in _payloads:
            _payloads[num_bytes] = torch.ones(num_bytes, dtype=torch.uint8)
        values["payload"] = _payloads[num_bytes]
    return values | {"sent": time.monotonic()}


def receive(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
    """Returns the seconds of the hop.

    Memory that has arrived may still have to be mapped when it is first read. The time that a first read takes longer
    than a second one is part of the hop, unless the option `is_unread` is set.
    """
    received = time.monotonic()
    (source,) = sources.values()
    seconds = received - source.data["sent"]
    if "payload" in source.tensors and not request.options.get("is_unread"):
        payload = source.tensors["payload"].view(torch.int64)
        seconds += max(0.0, _time_of_reading(payload) - _time_of_reading(payload))
    return {"text": repr(seconds)}


def _time_of_reading(tensor: torch.Tensor) -> float:
    started = time.monotonic()
    tensor.max()
    return time.monotonic() - started
