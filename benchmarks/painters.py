# SPDX-License-Identifier: Apache-2.0
"""Who paints: the bare diffusers pipeline in this process, and `OmniLLM` with the same checkpoint.

Both are asked in the same way and give the same pictures. Knows nothing of rounds and reports.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline

from vllm_omni import CompletedEvent, ErrorEvent, ImageProgressEvent, OmniLLM

ATOL = 1e-4
PLACES = ("a harbour", "a desert at noon", "snow on a roof", "an old railway station in the rain", "a kitchen table")


@dataclass(frozen=True)
class Order:
    """How pictures are to be painted; what each shows is said by its prompt.

    Attributes:
        arguments: Further arguments of the pipeline, under diffusers' names.
    """

    height: int
    width: int
    num_inference_steps: int
    seed: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)

    def call_arguments(self) -> dict[str, Any]:
        """All but the seed, as diffusers and `DiffusionSamplingParams` both name it."""
        size = {"height": self.height, "width": self.width, "num_inference_steps": self.num_inference_steps}
        return size | self.arguments

    def params(self, **more: Any) -> dict[str, Any]:
        """What a diffusion stage is asked for."""
        return self.call_arguments() | {"seed": self.seed, "output_format": "np"} | more


def make_prompts(count: int) -> list[str]:
    return [f"picture {number}: {PLACES[number % len(PLACES)]}" for number in range(count)]


class BarePainter:
    """Calls the diffusers pipeline, as its users do."""

    def __init__(self, path: Path, order: Order) -> None:
        self._order = order
        self._pipe = DiffusionPipeline.from_pretrained(path, dtype=torch.float32)
        self._pipe.set_progress_bar_config(disable=True)

    def paint(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """All in one call: float32 `[height, width, 3]` in [0, 1] for each prompt."""
        generators = [torch.Generator().manual_seed(self._order.seed) for _ in prompts]
        # Text, such as the negative prompt, is given for each picture: not every pipeline shares it out.
        arguments = {
            name: [value] * len(prompts) if isinstance(value, str) else value
            for name, value in self._order.call_arguments().items()
        }
        return list(self._pipe(list(prompts), generator=generators, output_type="np", **arguments).images)

    def paint_one_by_one(self, prompts: Sequence[str]) -> list[np.ndarray]:
        return [picture for prompt in prompts for picture in self.paint([prompt])]


@dataclass(frozen=True)
class Sitting:
    """One picture, painted while somebody looks on.

    Attributes:
        first_preview: Seconds until the first preview was there; those of the whole where there was none.
    """

    picture: np.ndarray
    first_preview: float


class OmniPainter:
    """Asks a pipeline of one diffusion stage."""

    def __init__(self, llm: OmniLLM, order: Order) -> None:
        self._llm = llm
        self._order = order

    def paint(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """All at once: float32 `[height, width, 3]` in [0, 1] for each prompt."""
        outputs = self._llm.generate(list(prompts), [self._order.params()], use_tqdm=False)
        return [output.images[0] for output in outputs]

    def sit(self, prompt: str, preview_every: int) -> Sitting:
        """
        Raises:
            RequestError: The request failed.
        """
        started = time.perf_counter()
        first_preview = None
        for event in self._llm.generate(prompt, [self._order.params(preview_every=preview_every)], stream=True):
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, ImageProgressEvent) and event.image is not None:
                first_preview = first_preview or time.perf_counter() - started
        assert isinstance(event, CompletedEvent)  # It is the last.
        return Sitting(event.outputs[0].images[0], first_preview or time.perf_counter() - started)


def check_pictures(who: str, pictures: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """
    Returns:
        The largest difference of all.

    Raises:
        ValueError: Somebody painted something else, or nothing that could be told apart.
    """
    if len(pictures) != len(expected):
        raise ValueError(f"{who} painted {len(pictures)} pictures, not {len(expected)}")
    for number, (picture, right) in enumerate(zip(pictures, expected, strict=True)):
        if picture.shape != right.shape or not np.allclose(picture, right, rtol=0, atol=ATOL):
            raise ValueError(f"picture {number} of {who} is not that of the bare pipeline")
    return max(float(np.abs(picture - right).max()) for picture, right in zip(pictures, expected, strict=True))
