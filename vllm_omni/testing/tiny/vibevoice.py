# SPDX-License-Identifier: Apache-2.0
"""A tiny VibeVoice: language model, diffusion head, and both tokenizers of sound.

The architecture is the real one, with the published rates; only the sizes are small. Greedy speech ends by itself: the
head's row of the end is random, that of the next frame points to where frames' states are.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    Qwen2Tokenizer,
    VibeVoiceAcousticTokenizerFeatureExtractor,
    VibeVoiceConfig,
    VibeVoiceForConditionalGeneration,
    VibeVoiceProcessor,
)

from vllm_omni.testing.tiny.tokenizer import make_tokenizer, padded_vocab_size, token_id
from vllm_omni.testing.tiny.weights import fill_random, scale_output

LAYER_GAIN = 1.2
DIFFUSION_GAIN = 0.6
TOKENIZER_GAIN = 1.2
FRAME_GAIN = 0.3
"""Scales what a step reads of a frame. With this and the gain above rounding errors do not grow from frame to frame; at
1 and 1 they do, a hundredfold in 30 frames."""
FRAME_BIAS = 0.5
"""Added to it, so that the states of all frames have a direction in common."""
HEAD_GAIN = 1.5
WAVE_STD = 0.06
"""While the latents are noise; those of frames are larger."""
GUIDANCE_SCALE = 1.3
"""The published checkpoint's."""
RATIOS = [2, 2, 4, 5, 5, 8]
"""Of the published tokenizers: 24 kHz, 7.5 frames per second."""
CHAT_TEMPLATE = """\
{{- " Transform the text provided by various speakers into speech output, utilizing the distinct voice of each \
respective speaker.\\n" -}}
{%- set voices = namespace(any=false) -%}
{%- for message in messages -%}
{%- for part in message.content if part.type == "audio" -%}
{%- if not voices.any -%}
{{- " Voice input:\\n" -}}
{%- set voices.any = true -%}
{%- endif -%}
{{- " Speaker " + message.role + ":<|vision_start|><|vision_pad|><|vision_end|>\\n" -}}
{%- endfor -%}
{%- endfor -%}
{{- " Text input:\\n" -}}
{%- for message in messages -%}
{%- for part in message.content if part.type == "text" -%}
{{- " Speaker " + message.role + ": " + part.text + "\\n" -}}
{%- endfor -%}
{%- endfor -%}
{{- " Speech output:\\n<|vision_start|>" -}}
"""


@dataclass(frozen=True)
class Size:
    """Everything in which the sizes of the checkpoint differ; the defaults are those of the default size.

    Attributes:
        end_factor: Scales the head's row of the end: speech ends sooner at larger factors.
    """

    hidden: int = 64
    layers: int = 3
    heads: int = 2
    latent: int = 16
    semantic: int = 24
    filters: int = 2
    head_layers: int = 2
    is_tied: bool = True
    end_factor: float = 1.2


SIZES = {
    "default": Size(),
    "large": Size(
        hidden=384,
        layers=6,
        heads=6,
        latent=64,
        semantic=128,
        filters=4,
        head_layers=4,
        is_tied=False,
        end_factor=0.5,
    ),
}


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    model: Any = VibeVoiceForConditionalGeneration(make_config(SIZES[size], tokenizer))
    fill_random(model, seed, LAYER_GAIN)
    fill_random(model.model.diffusion_head, seed, DIFFUSION_GAIN)
    _fill_tokenizers(model.model, seed)
    _shape_heads(model, seed, SIZES[size].end_factor)
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        guidance_scale=GUIDANCE_SCALE,
        noise_scheduler_class="DPMSolverMultistepScheduler",
        noise_scheduler_config={"beta_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction"},
    )
    model.save_pretrained(path)
    extractor = VibeVoiceAcousticTokenizerFeatureExtractor()
    VibeVoiceProcessor(extractor, tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(path)


def make_config(size: Size, tokenizer: Qwen2Tokenizer) -> VibeVoiceConfig:
    """The checkpoint's configuration, with the token ids of `tokenizer`."""
    sound = {
        "num_filters": size.filters,
        "downsampling_ratios": RATIOS,
        "depths": [1, 1, 1, 1, 1, 1, 2],
    }
    config = VibeVoiceConfig(
        text_config={
            "model_type": "qwen2",
            "vocab_size": padded_vocab_size(tokenizer),
            "hidden_size": size.hidden,
            "intermediate_size": 2 * size.hidden,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.heads // 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": size.is_tied,
        },
        audio_config={"hidden_size": size.latent, **sound},
        semantic_model_config={"hidden_size": size.semantic, **sound},
        diffusion_head_config={
            "hidden_size": size.hidden,
            "latent_size": size.latent,
            "num_hidden_layers": size.head_layers,
            "intermediate_size": 3 * size.hidden,
            "frequency_embedding_size": 32,
        },
        pad_token_id=token_id(tokenizer, "<|endoftext|>"),
        eos_token_id=token_id(tokenizer, "<|endoftext|>"),
        audio_bos_token_id=token_id(tokenizer, "<|vision_start|>"),
        audio_eos_token_id=token_id(tokenizer, "<|vision_end|>"),
        audio_token_id=token_id(tokenizer, "<|vision_pad|>"),
        dtype="float32",
    )
    config.architectures = ["VibeVoiceForConditionalGeneration"]
    return config


@torch.no_grad()
def _fill_tokenizers(model: Any, seed: int) -> None:
    """Fills both tokenizers, and keeps the wave in range."""
    for tokenizer in (model.audio_tower, model.semantic_tokenizer_encoder):
        fill_random(tokenizer, seed, TOKENIZER_GAIN)
    decoder = model.audio_tower.decoder
    latents = torch.randn(1, model.config.audio_config.hidden_size, 16, generator=torch.Generator().manual_seed(seed))
    scale_output(decoder.head.conv, WAVE_STD, lambda: decoder(latents))
    model.latent_scaling_factor.fill_(0.8)
    model.latent_bias_factor.fill_(-0.05)


@torch.no_grad()
def _shape_heads(model: Any, seed: int, end_factor: float) -> None:
    """Rows of the head: of the next frame, of the end, and of what random weights never sample."""
    config, inner = model.config, model.model
    direction = torch.randn(config.text_config.hidden_size, generator=torch.Generator().manual_seed(seed))
    direction /= direction.norm()
    for connector in (inner.multi_modal_projector, inner.semantic_connector):
        connector.linear_2.weight *= FRAME_GAIN
        connector.linear_2.bias += FRAME_BIAS * direction * len(direction) ** 0.5
    head, embedding = model.lm_head.weight, inner.language_model.embed_tokens.weight
    end = torch.nn.functional.normalize(head[config.audio_eos_token_id], dim=0)
    gain = HEAD_GAIN * len(direction) ** 0.5
    head[config.audio_token_id] = gain * direction
    head[config.audio_eos_token_id] = gain * end_factor * end
    less = head[config.audio_token_id] / 2  # never the largest, where that is positive
    head[config.audio_bos_token_id] = head[config.eos_token_id] = less
    embedding[config.audio_bos_token_id] = less  # Where frames begin, the state points there, too.
