# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen2.5-Omni: thinker with vision and audio towers, talker, and token2wav (DiT and BigVGAN).

The architecture is the real one; only the sizes are small. Fields that transformers does not declare but
that it or vLLM reads are marked.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2Tokenizer,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from vllm_omni.testing.tiny.processors import MERGE, audio_tower, decoder, save_processors, vision_tower
from vllm_omni.testing.tiny.tokenizer import (
    QWEN2_5,
    answer_token_ids,
    generation_config,
    make_tokenizer,
    padded_vocab_size,
    save_tokenizer,
    token_id,
    token_ids,
)
from vllm_omni.testing.tiny.weights import fill_random, limit_head, scale_output

PATCH = 14
MAX_POSITIONS = 8192
POSITIONS_PER_SECOND = 25
SECONDS_PER_CHUNK = 2
NUM_SPECIAL_CODES = 16
"""The last ids of the talker's vocabulary. The vocoder has no embedding for them, as in the real checkpoint."""
MEL_BINS = 80
SPEAKERS = {"Chelsie": "<tts_text_bos>", "Ethan": "<tts_bos_ethan>", "Aiden": "<tts_bos_aiden>"}
"""Name -> the first token of the speaker's text."""
THINKER_EOS_FACTOR = 1.0
TALKER_EOS_FACTOR = 1.2
DIT_GAIN = 1.0
"""One solution takes 36 runs of the DiT, each on the last output: a larger gain would amplify rounding errors."""
MEL_MEAN, MEL_STD = -4.0, 1.5
"""Of logarithmic amplitudes. BigVGAN clips them below -10.9 and above 2.3."""
BIGVGAN_GAIN = 0.8
WAVE_STD = 0.15
HEADS = ("lm_head", "codec_head")


@dataclass(frozen=True)
class Size:
    """Everything in which the sizes of the checkpoint differ.

    The defaults are those of the default size. The talker's heads are together wider than its hidden states, as in the
    real checkpoint. BigVGAN has the same size in both: it processes every sample, and would dominate on a CPU.
    """

    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    tower_hidden: int = 64
    tower_layers: int = 2
    talker_hidden: int = 64
    talker_layers: int = 2
    talker_heads: int = 4
    talker_kv_heads: int = 2
    talker_head_dim: int = 32
    codes: int = 256
    dit_hidden: int = 64
    dit_layers: int = 3
    dit_head_dim: int = 32
    look_ahead: tuple[int, ...] = (1,)
    look_backward: tuple[int, ...] = (0, 2)
    speaker_dim: int = 16
    speaker_channels: int = 32
    bigvgan_channels: int = 64
    layer_gain: float = 2.0


SIZES = {
    "default": Size(),
    "large": Size(
        hidden=512,
        layers=8,
        heads=8,
        tower_hidden=256,
        tower_layers=4,
        talker_hidden=384,
        talker_layers=6,
        talker_heads=8,
        talker_kv_heads=4,
        talker_head_dim=64,
        codes=1024,
        dit_hidden=128,
        dit_layers=4,
        look_backward=(0, 3),
        speaker_dim=64,
        speaker_channels=64,
        layer_gain=1.5,
    ),
}


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    tokenizer = make_tokenizer(QWEN2_5)
    config = make_config(SIZES[size], tokenizer)
    model = Qwen2_5OmniForConditionalGeneration(config).eval()
    speakers = _speakers(SIZES[size], tokenizer, seed)
    fill_random(model, seed, SIZES[size].layer_gain, heads=HEADS)
    _shape_heads(model, tokenizer)
    _shape_vocoder(model.token2wav, speakers["Chelsie"], seed)
    model.generation_config = generation_config(tokenizer)
    model.save_pretrained(path)
    torch.save(speakers, path / "spk_dict.pt")
    save_tokenizer(tokenizer, path, QWEN2_5)
    save_processors(path, "Qwen2_5OmniProcessor", PATCH)


def make_config(size: Size, tokenizer: Qwen2Tokenizer) -> Qwen2_5OmniConfig:
    """The checkpoint's configuration, with the token ids of `tokenizer`."""
    multimodal_ids = _multimodal_ids(tokenizer)
    config = Qwen2_5OmniConfig(
        thinker_config=_thinker_config(size, tokenizer, multimodal_ids),
        talker_config=_talker_config(size, tokenizer, multimodal_ids),
        token2wav_config={"dit_config": _dit_config(size), "bigvgan_config": _bigvgan_config(size)},
        dtype="float32",
    )
    config.architectures = ["Qwen2_5OmniModel"]
    return config


def _multimodal_ids(tokenizer: Qwen2Tokenizer) -> dict[str, int]:
    names = {
        "audio_token_index": "<|AUDIO|>",
        "image_token_index": "<|IMAGE|>",
        "video_token_index": "<|VIDEO|>",
        "audio_start_token_id": "<|audio_bos|>",
        "audio_end_token_id": "<|audio_eos|>",
        "vision_start_token_id": "<|vision_bos|>",  # undeclared for the thinker; transformers reads it
        "vision_end_token_id": "<|vision_eos|>",
    }
    return token_ids(tokenizer, names)


def _rope(head_dim: int) -> dict[str, Any]:
    """M-RoPE: how many of the head's frequencies each of time, height and width gets."""
    side = head_dim // 2 * 3 // 8
    return {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [head_dim // 2 - 2 * side, side, side],
    }


def _thinker_config(size: Size, tokenizer: Qwen2Tokenizer, multimodal_ids: dict[str, int]) -> dict[str, Any]:
    text_config = {
        "vocab_size": padded_vocab_size(tokenizer),
        **decoder(size.hidden, size.layers, size.heads, size.kv_heads),
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": _rope(size.hidden // size.heads),
        "tie_word_embeddings": False,
        "eos_token_id": token_id(tokenizer, "<|im_end|>"),
        "pad_token_id": token_id(tokenizer, "<|endoftext|>"),
    }
    return {
        "text_config": text_config,
        "vision_config": _vision_config(size),
        "audio_config": _audio_config(size),
        "position_id_per_seconds": POSITIONS_PER_SECOND,
        "seconds_per_chunk": SECONDS_PER_CHUNK,
        "user_token_id": token_id(tokenizer, "user"),
        **multimodal_ids,
    }


def _vision_config(size: Size) -> dict[str, Any]:
    return vision_tower(size.tower_hidden, size.tower_layers, PATCH, size.hidden) | {
        "window_size": 8 * PATCH,
        "fullatt_block_indexes": [size.tower_layers - 1],
        "tokens_per_second": POSITIONS_PER_SECOND,  # undeclared; vLLM reads it
    }


def _audio_config(size: Size) -> dict[str, Any]:
    tower = audio_tower(size.tower_hidden, size.tower_layers, size.hidden)
    return tower | {"n_window": 100, "max_source_positions": 1500}


def _talker_config(size: Size, tokenizer: Qwen2Tokenizer, multimodal_ids: dict[str, int]) -> dict[str, Any]:
    first_special = size.codes
    return {
        "vocab_size": size.codes + NUM_SPECIAL_CODES,
        "embedding_size": size.hidden,
        **decoder(size.talker_hidden, size.talker_layers, size.talker_heads, size.talker_kv_heads),
        "head_dim": size.talker_head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": _rope(size.talker_head_dim),
        "spatial_merge_size": MERGE,
        "position_id_per_seconds": POSITIONS_PER_SECOND,
        "seconds_per_chunk": SECONDS_PER_CHUNK,
        "tts_text_start_token_id": token_id(tokenizer, "<tts_text_bos>"),
        "tts_text_end_token_id": token_id(tokenizer, "<tts_text_eod>"),
        "tts_text_pad_token_id": token_id(tokenizer, "<tts_pad>"),
        "tts_codec_pad_token_id": first_special + 4,
        "tts_codec_start_token_id": first_special + 5,
        "tts_codec_end_token_id": first_special + 6,
        "tts_codec_mask_token_id": first_special + 8,
        **multimodal_ids,
    }


def _dit_config(size: Size) -> dict[str, Any]:
    channels = size.speaker_channels
    return {
        "hidden_size": size.dit_hidden,
        "num_hidden_layers": size.dit_layers,
        "num_attention_heads": size.dit_hidden // size.dit_head_dim,
        "head_dim": size.dit_head_dim,
        "emb_dim": size.dit_hidden // 2,
        "max_position_embeddings": MAX_POSITIONS,
        "block_size": 24,
        "look_ahead_layers": list(size.look_ahead),
        "look_backward_layers": list(size.look_backward),
        "repeats": 2,
        "mel_dim": MEL_BINS,
        "num_embeds": size.codes,
        "enc_emb_dim": size.speaker_dim,
        "enc_dim": size.speaker_dim,
        "enc_channels": [channels, channels, channels, channels, 3 * channels],
        "enc_attention_channels": channels // 2,
        "enc_se_channels": channels // 2,
    }


def _bigvgan_config(size: Size) -> dict[str, Any]:
    return {
        "mel_dim": MEL_BINS,
        "upsample_initial_channel": size.bigvgan_channels,
        "upsample_rates": [5, 3, 2, 2, 2, 2],
        "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
    }


def _speakers(size: Size, tokenizer: Qwen2Tokenizer, seed: int) -> dict[str, dict[str, Any]]:
    """spk_dict.pt: for each speaker its first token, `cond` `[1, speaker_dim]`, `ref_mel` `[1, frames, 80]`.

    The number of frames differs from speaker to speaker.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: {
            "bos_token": token_id(tokenizer, bos_token),
            "cond": torch.randn(1, size.speaker_dim, generator=generator),
            "ref_mel": MEL_MEAN + MEL_STD * torch.randn(1, 40 + 8 * index, MEL_BINS, generator=generator),
        }
        for index, (name, bos_token) in enumerate(SPEAKERS.items())
    }


def _shape_heads(model: Qwen2_5OmniForConditionalGeneration, tokenizer: Qwen2Tokenizer) -> None:
    """Limits the thinker to words and the talker to codes, and makes both stop sometimes; the talker in two ways."""
    config: Any = model.config.talker_config
    im_end, codec_end = token_id(tokenizer, "<|im_end|>"), config.tts_codec_end_token_id
    codes = [*range(config.vocab_size - NUM_SPECIAL_CODES), config.tts_codec_pad_token_id, codec_end]
    words = [*answer_token_ids(tokenizer), im_end]
    limit_head(model.thinker.lm_head, words, favoured=im_end, factor=THINKER_EOS_FACTOR)
    limit_head(model.talker.codec_head, codes, favoured=codec_end, factor=TALKER_EOS_FACTOR)


@torch.no_grad()
def _shape_vocoder(vocoder: Qwen2_5OmniToken2WavModel, speaker: dict[str, Any], seed: int) -> None:
    """Keeps spectrogram and wave off the limits where they are clipped, where errors do not show."""
    dit: Any = vocoder.code2wav_dit_model
    bigvgan: Any = vocoder.code2wav_bigvgan_model
    fill_random(dit, seed, DIT_GAIN)
    fill_random(bigvgan, seed, BIGVGAN_GAIN)
    dit.proj_out.bias += MEL_MEAN
    codes, cond, ref_mel = torch.arange(48)[None], speaker["cond"], speaker["ref_mel"]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, dit.repeats * codes.shape[1], MEL_BINS, generator=generator)
    conds = cond[:, None].repeat(1, noise.shape[1], 1)
    scale_output(dit.proj_out, MEL_STD, lambda: dit(noise, ref_mel, conds, codes, torch.tensor(0.5)))
    torch.manual_seed(seed)  # `sample` draws from the default generator
    mel = dit.sample(cond, ref_mel, codes)
    scale_output(bigvgan.conv_post, WAVE_STD, lambda: bigvgan(mel))
