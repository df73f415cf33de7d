# SPDX-License-Identifier: Apache-2.0
"""The output of diffusers for the same weights, prompt and seed: the oracle of our tests and benchmarks.

One call of the pipeline for one output, as in diffusers' documentation. Independent of vllm_omni's engines.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoPipelineForImage2Image, DiffusionPipeline
from PIL import Image

from vllm_omni.testing.hf_oracle import torch_threads


class DiffusersOracle:
    """A diffusers pipeline on the CPU, one output at a time.

    Attributes:
        pipe: The pipeline itself, to compare parts of it.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32, num_threads: int | None = 1) -> None:
        """
        Args:
            path: Folder or name of a checkpoint with a `model_index.json`.
            num_threads: Threads of torch while generating. Tiny models are fastest on 1, by far; None: no change.
        """
        self.num_threads = num_threads
        self.pipe = DiffusionPipeline.from_pretrained(path, dtype=dtype)
        self.pipe.set_progress_bar_config(disable=True)

    def generate(
        self, prompt: str, *, seed: int, images: Sequence[Image.Image] | None = None, **call_arguments: Any
    ) -> torch.Tensor:
        """One output.

        Args:
            seed: Of a generator on the CPU.
            images: Input images. A pipeline without them is replaced by its image-to-image variant.
            call_arguments: Further arguments of the pipeline, e.g. `height=64`, or `output_type="latent"`.

        Returns:
            float32 on the CPU: an image `[height, width, channels]` or a video `[frames, height, width, channels]` in
            [0, 1], sound `[channels, samples]` in [-1, 1], or latents in the pipeline's shape.
        """
        return self.generate_all(prompt, seed=seed, images=images, **call_arguments)[0]

    def generate_all(
        self, prompt: str, *, seed: int, images: Sequence[Image.Image] | None = None, **call_arguments: Any
    ) -> list[torch.Tensor]:
        """Generates one output and all else that the call makes: the sound of a video; the layers of an image, in one
        tensor."""
        pipe = self.pipe
        arguments = {"output_type": "pt", **call_arguments}
        if images:
            pipe = self._pipe_with_images()
            arguments["image"] = images[0] if len(images) == 1 else list(images)
        with torch_threads(self.num_threads):
            result = pipe(prompt=prompt, generator=torch.Generator().manual_seed(seed), **arguments)
        outputs = [values[0].float() for values in result.values()]
        if arguments["output_type"] != "latent" and "audios" not in result:
            outputs[0] = outputs[0].movedim(-3, -1)  # channels last
        return outputs

    def _pipe_with_images(self) -> DiffusionPipeline:
        if "image" in inspect.signature(self.pipe.__call__).parameters:
            return self.pipe
        pipe = AutoPipelineForImage2Image.from_pipe(self.pipe)
        pipe.set_progress_bar_config(disable=True)
        return pipe
