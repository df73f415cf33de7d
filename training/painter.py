# SPDX-License-Identifier: Apache-2.0
"""Trains the painter, a `ZImagePipeline`: its autoencoder, then text encoder and transformer together.

Flow matching: the transformer learns the direction from noise to the latents of a picture.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from training.loop import Training
from vllm_omni.shapes.language import painting_prompt, random_scene
from vllm_omni.shapes.pictures import draw
from vllm_omni.testing.tiny.tokenizer import padded_vocab_size

LATENT_CHANNELS = 8
TEXT_HIDDEN = 96
DROPPED = 0.1
"""The share of prompts that are empty, for guidance."""


def make_vae() -> AutoencoderKL:
    """8 pixels a latent on each side."""
    return AutoencoderKL(
        block_out_channels=(16, 24, 32, 48), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=1, latent_channels=LATENT_CHANNELS,
        norm_num_groups=8, use_quant_conv=False, use_post_quant_conv=False, force_upcast=False,
        scaling_factor=1.0, shift_factor=0.0,
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


def pictures(rng: random.Random, num: int) -> tuple[torch.Tensor, list[str]]:
    """float32 `[num, 3, 96, 96]` in -1 to 1, and a prompt for each."""
    scenes = [random_scene(rng) for _ in range(num)]
    drawn = np.stack([np.asarray(draw(rng, scene)) for scene in scenes])
    pixels = torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 127.5 - 1
    return pixels, [painting_prompt(rng, scene) for scene in scenes]


def train_vae(folder: Path, vae: AutoencoderKL, steps: int, batch: int = 16) -> None:
    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        pixels, _ = pictures(rng, batch)
        posterior = vae.encode(pixels).latent_dist
        made = vae.decode(posterior.sample(torch.Generator().manual_seed(rng.randrange(1 << 30)))).sample
        error = (made - pixels).abs().mean() + ((made - pixels) ** 2).mean()
        divergence = posterior.kl().mean() / pixels[0].numel()
        return error + 1e-3 * divergence, {"error": error.item(), "divergence": divergence.item()}

    Training(folder, "vae", [vae], steps, 2e-3).run(compute)


@torch.no_grad()
def encode(vae: AutoencoderKL, rng: random.Random, num: int) -> tuple[torch.Tensor, list[str]]:
    """Latents float32 `[num, 8, 12, 12]` before scaling, and prompts."""
    latents, prompts = [], []
    for _ in range(0, num, 64):
        pixels, texts = pictures(rng, 64)
        latents.append(vae.encode(pixels).latent_dist.mean)
        prompts += texts
    return torch.cat(latents), prompts


def trained_models(pipeline: ZImagePipeline) -> list[nn.Module]:
    """Those that learn together."""
    return [pipeline.transformer, pipeline.text_encoder]


def train_transformer(
    folder: Path, pipeline: ZImagePipeline, latents: torch.Tensor, prompts: Sequence[str], steps: int, batch: int = 48
) -> None:
    """`latents` are scaled, as the pipeline's."""
    transformer = pipeline.transformer

    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        chosen = rng.choices(range(len(latents)), k=batch)
        texts = ["" if rng.random() < DROPPED else prompts[index] for index in chosen]
        clean = latents[chosen]
        noise = torch.randn(clean.shape, generator=generator)
        sigma = torch.sigmoid(torch.randn(batch, generator=generator) + 0.3)
        noisy = clean + sigma[:, None, None, None] * (noise - clean)
        # Not `encode_prompt`: it pads every prompt to 512 tokens.
        made = transformer(list(noisy.unsqueeze(2)), 1 - sigma, _encode_prompts(pipeline, texts), return_dict=False)[0]
        loss = nn.functional.mse_loss(torch.stack(list(made)).squeeze(2), clean - noise)
        return loss, {"loss": loss.item()}

    Training(folder, "painter", trained_models(pipeline), steps, 1.5e-3).run(compute)


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
