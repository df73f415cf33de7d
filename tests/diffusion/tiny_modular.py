# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of modular pipelines, made of the tiny pipelines with the same components."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    AnimaModularPipeline,
    AnimaTextConditioner,
    AutoencoderKLQwenImage,
    CosmosTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    ModularPipeline,
)
from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks
from transformers import Qwen3Model

from tests.diffusion.tiny_calls import SMALL, SMALL_VIDEO, make_image
from tests.diffusion.tiny_pipelines import build
from vllm_omni.testing.tiny.text_encoders import make_qwen_tokenizer, make_t5_tokenizer, qwen3_config
from vllm_omni.testing.tiny.weights import fill_random

SHORT = {**SMALL, "max_sequence_length": 64}
IMAGE = {"image": make_image(0, 64, 64)}
CALLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "anima": ("anima", {}, {**SHORT, "negative_prompt": "dark"}),
    "anima, image": ("anima", IMAGE, {**SHORT, "num_inference_steps": 3, "strength": 0.7}),
    "flux": ("flux", {}, SMALL),
    "flux, image": ("flux", IMAGE, {**SMALL, "num_inference_steps": 3, "strength": 0.7}),
    "flux2_klein": ("flux2_klein", {}, SHORT),
    "flux2_klein, images": ("flux2_klein", {"image": [make_image(0, 64, 64), make_image(1, 96, 64)]}, SHORT),
    "hunyuan_video_15": ("hunyuan_video_15", {}, SMALL_VIDEO),
    "ltx2": ("ltx2", {}, {**SHORT, "num_frames": 9}),
    "qwen_image": ("qwen_image", {}, {**SMALL, "negative_prompt": "dark"}),
    "qwen_image_edit": ("qwen_image_edit", IMAGE, {**SMALL, "negative_prompt": "dark"}),
    "stable_diffusion_3": ("stable_diffusion_3", {}, SMALL),
    "stable_diffusion_xl": ("StableDiffusionXLPipeline", {}, SMALL),
    "wan": ("wan", {}, SMALL_VIDEO),
    "wan, image": ("wan_i2v", IMAGE, SMALL_VIDEO),
    "z_image": ("z_image", {}, SHORT),
    "z_image, image": ("z_image", IMAGE, {**SHORT, "num_inference_steps": 3, "strength": 0.7}),
}
"""Checkpoint and workflow -> the tiny pipeline with the same components, media, and other inputs."""


CLASSES = {
    "anima": "AnimaModularPipeline",
    "flux": "FluxModularPipeline",
    "flux2_klein": "Flux2KleinModularPipeline",
    "hunyuan_video_15": "HunyuanVideo15ModularPipeline",
    "ltx2": "LTX2ModularPipeline",
    "qwen_image": "QwenImageModularPipeline",
    "qwen_image_edit": "QwenImageEditModularPipeline",
    "stable_diffusion_3": "StableDiffusion3ModularPipeline",
    "StableDiffusionXLPipeline": "StableDiffusionXLModularPipeline",
    "wan": "WanModularPipeline",
    "wan_i2v": "WanImage2VideoModularPipeline",
    "z_image": "ZImageModularPipeline",
}
"""Tiny pipeline -> the modular pipeline of its components."""


def write_modular(name: str, folder: Path, tiny_diffusion: Callable[[str], Path]) -> None:
    """Writes the checkpoint of the modular pipeline for a tiny pipeline's components."""
    if name == "anima":
        _anima().save_pretrained(str(folder))
        return
    if hasattr(diffusers, name):
        source = folder.with_name(f"{folder.name}_source")
        build(name).save_pretrained(source)
    else:
        source = tiny_diffusion(name)
    pipe = getattr(diffusers, CLASSES[name])(pretrained_model_name_or_path=str(source))
    pipe.load_components(dtype=torch.float32)
    pipe.save_pretrained(str(folder))


def _anima() -> ModularPipeline:
    """Of a model that diffusers has no other pipeline for."""
    torch.manual_seed(0)
    qwen, t5 = make_qwen_tokenizer(), make_t5_tokenizer()
    pipe = AnimaModularPipeline()
    transformer = CosmosTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=2, mlp_ratio=2, text_embed_dim=32, adaln_lora_dim=4,
        max_size=(4, 32, 32), rope_scale=(1.0, 1.0, 1.0), extra_pos_embed_type=None,
    )  # fmt: skip
    conditioner = AnimaTextConditioner(
        source_dim=32, target_dim=32, model_dim=32, num_layers=1, num_attention_heads=2, target_vocab_size=len(t5),
        min_sequence_length=64,
    )  # fmt: skip
    pipe.update_components(
        text_encoder=Qwen3Model(qwen3_config(qwen, 32, 2)).eval(),
        tokenizer=qwen,
        t5_tokenizer=t5,
        vae=AutoencoderKLQwenImage(base_dim=4, num_res_blocks=1),
        text_conditioner=conditioner,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    for seed, (name, gain) in enumerate({"text_encoder": 2.0, "transformer": 1.5, "vae": 1.0}.items()):
        fill_random(pipe.components[name], seed, gain)
    return pipe


class BareModular:
    """Diffusers alone."""

    def __init__(self, folder: Path) -> None:
        self.pipe: Any = ModularPipeline.from_pretrained(str(folder))
        self.pipe.load_components(dtype=torch.float32)
        _hide_progress(self.pipe._blocks)

    def __call__(self, prompt: str, seed: int, output: str | list[str], **inputs: Any) -> Any:
        generator = torch.Generator().manual_seed(seed)
        output_type = {} if output == "latents" else {"output_type": "np"}
        return self.pipe(prompt=prompt, generator=generator, output=output, **output_type, **inputs)


def _hide_progress(block: Any) -> None:
    if isinstance(block, LoopSequentialPipelineBlocks) or hasattr(block, "set_progress_bar_config"):
        block.set_progress_bar_config(disable=True)
    for inner in block.sub_blocks.values():
        _hide_progress(inner)
