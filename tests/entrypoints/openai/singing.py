# SPDX-License-Identifier: Apache-2.0
"""A model of sounds that is a function: what it does is what its prompt says."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tests.orchestrator.pipelines import function_stage
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput

RATE = 16000
NUM_SAMPLES = 8000  # of each piece


def piece(index: int) -> torch.Tensor:
    """float32 `[NUM_SAMPLES]`, a tone; no two pieces are equal."""
    return 0.3 * torch.sin(torch.arange(NUM_SAMPLES) * (0.05 + 0.01 * index))


def sing(request: StageRequest, sources: Mapping[int, StageOutput]) -> Iterator[dict[str, Any]]:
    """`N pieces`, `stereo`, `silence`, `noise`, `a failure`, `a late failure`, `endless`."""
    wish = request.prompt or ""
    if wish == "a failure":
        raise RuntimeError("told to fail")
    if wish == "silence":
        yield {"audio": torch.empty(0)}
    elif wish == "noise":
        yield {"audio": torch.full((NUM_SAMPLES,), torch.nan)}
    elif wish == "stereo":  # as diffusion stages make it: [n, channels, samples]
        yield {"audio": torch.stack([piece(0), piece(1)])[None]}
    elif wish == "endless":
        for index in range(100_000):
            time.sleep(0.005)
            yield {"audio": piece(index)}
    else:
        for index in range(2 if wish == "a late failure" else int(wish.split()[0])):
            yield {"audio": piece(index)}
        if wish == "a late failure":
            raise RuntimeError("told to fail")


SINGER = function_stage(0, "singer", sing, (), "audio") | {"sample_rate": RATE}
