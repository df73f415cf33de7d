# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO with rollouts of a pipeline: torch and diffusers train, vllm_omni paints, and each step's weights go back.

    python examples/rl/flow_grpo.py               # the painter of coloured-shapes, minutes on two cores
    python examples/rl/flow_grpo.py --compare     # and images per second of both, of the same images

The painter knows six words for colours, and learns four others. The reward is what share of a picture's coloured pixels
is nearest to the colour asked for. One line for each step: the mean reward, the weights, and how far the trainer's
log-probabilities are from those of the rollouts. See https://arxiv.org/abs/2505.05470 for the method.
"""

import argparse
import copy
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline
from PIL import Image
from torch.distributions import Normal

from coloured_shapes import MODELS
from coloured_shapes.pictures import RGB
from vllm_omni import OmniLLM, OmniRequestOutput

PROMPTS = {"a violet circle": "purple", "a lime star": "green", "an azure square": "blue", "a scarlet circle": "red"}
GROUP_SIZE = 8
"""Pictures of a prompt; each is compared with the others."""
SETTINGS: dict[str, Any] = {"height": 96, "width": 96, "num_inference_steps": 6, "guidance_scale": 0.0}
LATENTS = (8, 12, 12)
CLIP = 1e-3
"""Of a ratio of probabilities, each the mean of all elements of the latents."""
LEARNING_RATE = 1e-4


def reward_of(picture: Image.Image, colour: str) -> float:
    pixels = np.asarray(picture, np.float32).reshape(-1, 3)
    background = np.median(pixels, axis=0)
    coloured = pixels[np.abs(pixels - background).max(-1) > 60]
    nearest = np.linalg.norm(coloured[:, None] - np.array([*RGB.values(), background]), axis=-1).argmin(-1)
    return float((nearest == list(RGB).index(colour)).sum() / max(len(coloured), 1))


def log_probs_of(
    transformer: torch.nn.Module, embeds: list[torch.Tensor], latents: torch.Tensor, after: torch.Tensor, sigma: float,
    std: float,
) -> torch.Tensor:  # fmt: skip
    """Of one step of some pictures, `[pictures]`, with gradients.

    Args:
        embeds: Of the prompt of each.
        latents, after: Before and after the step, `[pictures, channels, height, width]`.
    """
    time_left = torch.full((len(latents),), 1 - sigma)
    predicted = -torch.stack(transformer(list(latents.unsqueeze(2)), time_left, embeds, return_dict=False)[0]).squeeze(
        2
    )
    mean = (1 - std) * (latents - sigma * predicted)
    return Normal(mean, std).log_prob(after).mean((1, 2, 3))


def train_step(
    transformer: torch.nn.Module, optimizer: torch.optim.Optimizer, embeds: list[torch.Tensor],
    outputs: list[OmniRequestOutput],
) -> tuple[float, float]:  # fmt: skip
    """Returns the mean reward, and the largest difference of log-probabilities.

    Args:
        embeds: Of each prompt.
    """
    rewards = torch.tensor(
        [
            [reward_of(image, colour) for image in output.images]
            for output, colour in zip(outputs, PROMPTS.values(), strict=True)
        ]
    )
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-2)).flatten()
    rows = [trajectory for output in outputs for trajectory in output.trajectories]
    of_each = [prompt for prompt, output in zip(embeds, outputs, strict=True) for _ in output.trajectories]
    difference = 0.0
    steps = [step for step, std in enumerate(rows[0].std.tolist()) if std > 0]
    for number, step in enumerate(steps):
        latents, after = (torch.stack([row.latents[at] for row in rows]) for at in (step, step + 1))
        sigma, std = float(rows[0].timesteps[step] / 1000), float(rows[0].std[step])
        old = torch.stack([row.log_probs[step] for row in rows])
        new = log_probs_of(transformer, of_each, latents, after, sigma, std)
        if number == 0:  # Later ones are of weights that have changed.
            difference = (new.detach() - old).abs().max().item()
        ratio = (new - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        optimizer.zero_grad()
        (-gain).backward()
        optimizer.step()
    return rewards.mean().item(), difference


class SeededScheduler(FlowMatchEulerDiscreteScheduler):
    """Diffusers' pipeline passes it no generator, and its noise would be of no seed."""

    generators: list[torch.Generator]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, generator=self.generators, **kwargs)


def paint_with_diffusers(
    pipe: ZImagePipeline, embeds: torch.Tensor, first_seed: int
) -> tuple[list[Image.Image], torch.Tensor]:
    """The pictures of a prompt, in one batch; and their latents, `[pictures, steps + 1, channels, height, width]`."""
    pipe.scheduler.generators = [torch.Generator().manual_seed(first_seed + i) for i in range(GROUP_SIZE)]
    first = [torch.randn(LATENTS, generator=generator) for generator in pipe.scheduler.generators]
    kept = [torch.stack(first)]

    def keep(_pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        kept.append(tensors["latents"])
        return {}

    pictures = pipe(
        prompt_embeds=[embeds] * GROUP_SIZE, latents=kept[0], callback_on_step_end=keep, **SETTINGS
    ).images  # fmt: skip
    return pictures, torch.stack(kept, 1)


def compare(pipe: ZImagePipeline, embeds: list[torch.Tensor], llm: OmniLLM) -> None:
    """Prints how fast rollouts are, and diffusers' loop with a batch for each prompt, and that they are the same."""
    pipe = copy.copy(pipe)
    pipe.scheduler = SeededScheduler.from_config(pipe.scheduler.config, stochastic_sampling=True)
    outputs, ours = timed(rollout, llm, 0)
    made, theirs = timed(lambda: [paint_with_diffusers(pipe, each, 0) for each in embeds])
    outputs, ours = timed(rollout, llm, GROUP_SIZE)  # Both are warm now.
    made, theirs = timed(lambda: [paint_with_diffusers(pipe, each, GROUP_SIZE) for each in embeds])
    latents, pixels = 0.0, 0
    for output, (pictures, expected) in zip(outputs, made, strict=True):
        found = torch.stack([trajectory.latents for trajectory in output.trajectories])
        latents = max(latents, (found - expected).abs().max().item())
        pairs = zip(output.images, pictures, strict=True)
        pixels = max(pixels, *(int(np.abs(np.int16(a) - np.int16(b)).max()) for a, b in pairs))
    count = len(PROMPTS) * GROUP_SIZE
    print(
        f"images per second: {count / ours:.1f}, diffusers {count / theirs:.1f}; largest differences: latents "
        f"{latents:.1e}, pixels {pixels} of 255",
        flush=True,
    )


def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    return function(*args), time.perf_counter() - started


def rollout(llm: OmniLLM, first_seed: int) -> list[OmniRequestOutput]:
    sampling = {"stochastic_sampling": True, "return_trajectory": True, "num_outputs_per_prompt": GROUP_SIZE}
    return llm.generate(list(PROMPTS), [{**SETTINGS, **sampling, "seed": first_seed}], use_tqdm=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--compare", action="store_true", help="first compare rollouts with diffusers' loop")
    args = parser.parse_args()
    checkpoint = Path(MODELS.checkpoints, "shapes-painter")
    pipe = ZImagePipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        embeds = pipe.encode_prompt(list(PROMPTS), do_classifier_free_guidance=False)[0]
    optimizer = torch.optim.AdamW(pipe.transformer.parameters(), LEARNING_RATE, weight_decay=0)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # Stages then read the weights as memory.
    with (
        tempfile.TemporaryDirectory(dir=memory, prefix="flow-grpo-") as made,
        OmniLLM(str(checkpoint), max_batch_size=len(PROMPTS) * GROUP_SIZE) as llm,
    ):
        if args.compare:
            compare(pipe, embeds, llm)
        for step in range(args.steps):
            outputs = rollout(llm, step * GROUP_SIZE)
            version = outputs[0].stage_metrics[0].weight_version
            reward, difference = train_step(pipe.transformer, optimizer, embeds, outputs)
            print(f"step {step}: reward {reward:.3f}, weights {version}, difference {difference:.1e}", flush=True)
            folder = Path(made, f"step-{step}")
            pipe.transformer.save_pretrained(folder / "transformer")  # What is not in the folder stays as it was.
            llm.start_weight_update()
            llm.update_weights({"update_info": {"weights_path": str(folder)}})
            llm.finish_weight_update(f"step-{step}")
            shutil.rmtree(Path(made, f"step-{step - 1}"), ignore_errors=True)  # The last one is for a restart.


if __name__ == "__main__":
    main()
