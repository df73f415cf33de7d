# SPDX-License-Identifier: Apache-2.0
"""A tiny `Kandinsky5T2VPipeline`: text to video of 4k + 1 frames, 8 pixels and 4 frames a latent."""

from pathlib import Path

from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    Kandinsky5T2VPipeline,
    Kandinsky5Transformer3DModel,
)
from transformers import CLIPTextModel, Qwen2_5_VLForConditionalGeneration

from vllm_omni.testing.tiny.pipelines import LATENT_CHANNELS, calibrate, fill_components
from vllm_omni.testing.tiny.qwen_image import add_template_tokens, qwen2_5_vl_config
from vllm_omni.testing.tiny.qwen_image_edit import make_processor
from vllm_omni.testing.tiny.text_encoders import clip_config, make_clip_tokenizer, make_qwen_tokenizer

TEXT_HIDDEN, CLIP_HIDDEN, MODEL_DIM = 64, 32, 64
SIZES = ("default",)
GAINS = {"text_encoder": 2.0, "text_encoder_2": 2.0, "transformer": 1.5, "vae": 1.0}


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    tokenizer, clip_tokenizer = make_qwen_tokenizer(), make_clip_tokenizer()
    pipe = Kandinsky5T2VPipeline(
        transformer=Kandinsky5Transformer3DModel(
            in_visual_dim=LATENT_CHANNELS,
            in_text_dim=TEXT_HIDDEN,
            in_text_dim2=CLIP_HIDDEN,
            time_dim=32,
            out_visual_dim=LATENT_CHANNELS,
            model_dim=MODEL_DIM,
            ff_dim=2 * MODEL_DIM,
            num_text_blocks=1,
            num_visual_blocks=2,
            axes_dims=(4, 6, 6),
        ),
        vae=AutoencoderKLHunyuanVideo(block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4),
        text_encoder=Qwen2_5_VLForConditionalGeneration(qwen2_5_vl_config(tokenizer, TEXT_HIDDEN, 2)),
        tokenizer=make_processor(tokenizer),
        text_encoder_2=CLIPTextModel(clip_config(clip_tokenizer, CLIP_HIDDEN, 2)),
        tokenizer_2=clip_tokenizer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
    )
    add_template_tokens(tokenizer, pipe.prompt_template)
    fill_components(pipe, seed, GAINS)
    velocity = pipe.transformer.out_layer.out_layer
    calibrate(pipe, velocity, pipe.vae.decoder.conv_out.conv, height=64, width=64, num_frames=5)
    pipe.save_pretrained(path, safe_serialization=True)
