# SPDX-License-Identifier: Apache-2.0
"""An audio model that is a function; its prompt selects what it does."""

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


def make_audio(request: StageRequest, sources: Mapping[int, StageOutput]) -> Iterator[dict[str, Any]]:
    """`N pieces`, `stereo`, `silence`, `noise`, `a failure`, `a late failure`, `endless`."""
    prompt = request.prompt or ""
    if prompt == "a failure":
        raise RuntimeError("failed as requested")
    if prompt == "silence":
        yield {"audio": torch.empty(0)}
    elif prompt == "noise":
        yield {"audio": torch.full((NUM_SAMPLES,), torch.nan)}
    elif prompt == "stereo":  # as diffusion stages make it: [n, channels, samples]
        yield {"audio": torch.stack([piece(0), piece(1)])[None]}
    elif prompt == "endless":
        for index in range(100_000):
            time.sleep(0.005)
            yield {"audio": piece(index)}
    else:
        for index in range(2 if prompt == "a late failure" else int(prompt.split()[0])):
            yield {"audio": piece(index)}
        if prompt == "a late failure":
            raise RuntimeError("failed as requested")


AUDIO_STAGE = function_stage(0, "audio_maker", make_audio, (), "audio") | {"sample_rate": RATE}
