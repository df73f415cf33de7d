# SPDX-License-Identifier: Apache-2.0
"""Trains the painter, a `ZImagePipeline`: its autoencoder, then text encoder and transformer together.

Flow matching: the transformer learns the direction from noise to the latents of a picture, and what is at each place.
"""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from coloured_shapes.language import COLOURS, KINDS, PLACES, SIZES, Scene, random_painting, random_scene, relation
from coloured_shapes.pictures import draw
from training.loop import Training
from vllm_omni.testing.tiny.tokenizer import padded_vocab_size

LATENT_CHANNELS = 8
TEXT_HIDDEN = 96
DROPPED = 0.1
"""The share of prompts that are empty, for guidance."""


def make_vae() -> AutoencoderKL:
    """8 pixels a latent on each side."""
    return AutoencoderKL(
        block_out_channels=(8, 16, 32, 64), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=1, latent_channels=LATENT_CHANNELS,
        norm_num_groups=4, use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=False,
        force_upcast=False, scaling_factor=1.0, shift_factor=0.0,
    )  # fmt: skip


def make_transformer() -> ZImageTransformer2DModel:
    return ZImageTransformer2DModel(
        in_channels=LATENT_CHANNELS, dim=128, n_layers=5, n_refiner_layers=1, n_heads=4, n_kv_heads=4,
        cap_feat_dim=TEXT_HIDDEN, axes_dims=[8, 12, 12], axes_lens=[1024, 64, 64],
    )  # fmt: skip


def make_text_encoder(tokenizer: PreTrainedTokenizerFast) -> Qwen3Model:
    """The pipeline reads the output of its last layer but one."""
    return Qwen3Model(
        Qwen3Config(
            vocab_size=padded_vocab_size(tokenizer), hidden_size=TEXT_HIDDEN, intermediate_size=2 * TEXT_HIDDEN,
            num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, head_dim=32,
            max_position_embeddings=1024, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, dtype="float32",
        )
    )  # fmt: skip


def make_pipeline(
    vae: AutoencoderKL, text_encoder: Qwen3Model, tokenizer: PreTrainedTokenizerFast,
    transformer: ZImageTransformer2DModel,
) -> ZImagePipeline:  # fmt: skip
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.5), vae=vae, text_encoder=text_encoder,
        tokenizer=tokenizer, transformer=transformer,
    )  # fmt: skip


def draw_pixels(rng: random.Random, scenes: Sequence[Scene]) -> torch.Tensor:
    """float32 `[num, 3, 96, 96]` in -1 to 1."""
    drawn = np.stack([np.asarray(draw(rng, scene)) for scene in scenes])
    return torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_vae(folder: Path, vae: AutoencoderKL, steps: int, batch: int = 8) -> None:
    vae.to(memory_format=torch.channels_last)  # a third faster on a CPU

    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        pixels = draw_pixels(rng, [random_scene(rng) for _ in range(batch)])
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        posterior = vae.encode(pixels).latent_dist
        made = vae.decode(posterior.sample(torch.Generator().manual_seed(rng.randrange(1 << 30)))).sample
        error = (weights(pixels) * ((made - pixels).abs() + (made - pixels) ** 2)).mean()
        divergence = posterior.kl().mean() / pixels[0].numel()
        return error + 1e-3 * divergence, {"error": error.item(), "divergence": divergence.item()}

    def weights(pixels: torch.Tensor) -> torch.Tensor:
        """Of each pixel: most are background; without weights the colours and edges of shapes are hardly learned."""
        background = pixels.flatten(2).median(-1).values[..., None, None]
        is_shape = ((pixels - background).abs().amax(1, keepdim=True) > 0.25).float()
        weights = 1 + 8.0 * nn.functional.max_pool2d(is_shape, 5, stride=1, padding=2)  # and what is next to a shape
        return weights / weights.mean()

    Training(folder, "vae", [vae], steps, 3e-3).run(compute)


@dataclass
class Pictures:
    """
    Attributes:
        latents: float32 `[num, 8, 12, 12]`, before scaling.
        contents: int64 `[num, 9, 3]`: for each place the indices of kind, colour and size; of nothing there the number
            of kinds, and -100.
    """

    latents: torch.Tensor
    contents: torch.Tensor
    prompts: list[str]

    @classmethod
    @torch.no_grad()
    def make(cls, vae: AutoencoderKL, rng: random.Random, num: int) -> "Pictures":
        asked, prompts = zip(*(random_painting(rng) for _ in range(num)), strict=True)
        scenes = list(map(arrange, asked, prompts))
        latents = [
            vae.encode(draw_pixels(rng, scenes[begin : begin + 64])).latent_dist.mean for begin in range(0, num, 64)
        ]
        contents = torch.tensor([len(KINDS), -100, -100]).repeat(num, len(PLACES), 1)
        for row, scene in zip(contents, scenes, strict=True):
            for shape in scene.shapes:
                indices = KINDS.index(shape.kind), COLOURS.index(shape.colour), SIZES.index(shape.size)
                row[shape.place] = torch.tensor(indices)
        return cls(torch.cat(latents), contents, list(prompts))


def arrange(scene: Scene, prompt: str) -> Scene:
    """The picture that is painted for a prompt: one of those that it leaves open, always the same.

    Of many, the transformer paints a mixture: shapes at several places.
    """
    places = [shape.place for shape in scene.shapes]
    if len(places) == 1 and PLACES[places[0]] not in prompt.lower():
        places = [PLACES.index("in the middle")]
    elif len(places) == 2:
        how = "left of" if " and " in prompt else relation(*scene.shapes)
        places = {"left of": [3, 5], "right of": [2, 6], "above": [1, 7]}[how]  # They are described in this order, too.
    elif len(places) == 3:
        places = [3, 4, 5]
    has_size = any(size in prompt.lower() for size in SIZES)
    shapes = (
        dataclasses.replace(shape, place=place, size=shape.size if has_size else "large")
        for shape, place in zip(scene.shapes, places, strict=True)
    )
    return Scene(tuple(shapes))


class Contents(nn.Module):
    """What is at each place, from the states of the transformer's image tokens: it so learns sooner what to paint.

    Not part of the model.
    """

    LAYER: ClassVar = 2

    def __init__(self, transformer: ZImageTransformer2DModel) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(transformer.dim, n) for n in (len(KINDS) + 1, len(COLOURS), len(SIZES)))
        self._states = torch.empty(0)
        transformer.layers[self.LAYER].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._states = output

    def loss(self, contents: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Of `[batch, 9, 3]` and the last forward pass; and the accuracy of the kinds of shapes."""
        by_token = contents.unflatten(1, (3, 3)).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1, 2)
        states = self._states[:, : by_token.shape[1]]
        logits = [head(states) for head in self.heads]
        losses = [
            nn.functional.cross_entropy(values.flatten(0, 1), by_token[..., index].flatten())
            for index, values in enumerate(logits)
        ]
        is_shape = by_token[..., 0] < len(KINDS)
        accuracy = (logits[0].argmax(-1) == by_token[..., 0])[is_shape].float().mean().item()
        return torch.stack(losses).mean(), accuracy


def trained_models(pipeline: ZImagePipeline) -> list[nn.Module]:
    """The models that are trained together."""
    return [pipeline.transformer, pipeline.text_encoder]


def train_transformer(
    folder: Path, pipeline: ZImagePipeline, pictures: Pictures, steps: int, batch: int = 32
) -> None:  # fmt: skip
    transformer, vae = pipeline.transformer, pipeline.vae
    latents = (pictures.latents - vae.config.shift_factor) * vae.config.scaling_factor
    contents_head = Contents(transformer)

    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        chosen = rng.choices(range(len(latents)), k=batch)
        texts = ["" if rng.random() < DROPPED else pictures.prompts[index] for index in chosen]
        clean = latents[chosen]
        noise = torch.randn(clean.shape, generator=generator)
        sigma = torch.sigmoid(torch.randn(batch, generator=generator) + 0.3)
        noisy = clean + sigma[:, None, None, None] * (noise - clean)
        # Not `encode_prompt`: it pads every prompt to 512 tokens.
        made = transformer(list(noisy.unsqueeze(2)), 1 - sigma, _encode_prompts(pipeline, texts), return_dict=False)[0]
        loss = nn.functional.mse_loss(torch.stack(list(made)).squeeze(2), clean - noise)
        contents, accuracy = contents_head.loss(pictures.contents[chosen])
        return loss + 0.3 * contents, {"loss": loss.item(), "contents": contents.item(), "accuracy": accuracy}

    Training(folder, "painter", [*trained_models(pipeline), contents_head], steps, 1.5e-3).run(compute)


def _encode_prompts(pipeline: ZImagePipeline, texts: list[str]) -> list[torch.Tensor]:
    tokenizer = pipeline.tokenizer
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        for text in texts
    ]
    inputs = tokenizer(rendered, padding=True, return_tensors="pt")
    states = pipeline.text_encoder(
        input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, output_hidden_states=True
    ).hidden_states[-2]
    return [row[mask.bool()] for row, mask in zip(states, inputs.attention_mask, strict=True)]
