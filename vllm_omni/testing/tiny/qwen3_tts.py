# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen3-TTS checkpoints of the 12 Hz family: custom voice, voice design, and base, which clones.

Files, fields and names of tensors are the published ones, which transformers has no classes for. Ids of codes follow
those of the codebook as in the published vocabulary, so `codec_eos_token_id` is `codebook_size + 102`.

The default size is of the kind `1b7`: the code predictor is narrower than the talker and has a projection in front. The
large one is of the kind `0b6`, in which both have the same width and custom voice reads no instructions.

    write_tiny_checkpoint("qwen3_tts", path)  # custom voice: speakers vivian, ryan, eric (a dialect)
    write_tiny_checkpoint("qwen3_tts_design", path)
    write_tiny_checkpoint("qwen3_tts_base", path)
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import EncodecFeatureExtractor, MimiConfig, MimiModel, Qwen2Tokenizer, Qwen3Config, Qwen3Model
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeCode2WavTransformerModel,
)

from vllm_omni.testing.tiny import csm
from vllm_omni.testing.tiny.tokenizer import make_tokenizer, padded_vocab_size, save_tokenizer, token_ids
from vllm_omni.testing.tiny.weights import EMBEDDING_STD, fill_random, limit_head, scale_output

NUM_SPECIAL_CODES = 1024
CODEC_IDS = {
    "codec_pad_id": 100,
    "codec_bos_id": 101,
    "codec_eos_token_id": 102,
    "codec_think_id": 106,
    "codec_nothink_id": 107,
    "codec_think_bos_id": 108,
    "codec_think_eos_id": 109,
}
LANGUAGES = {"english": 2, "german": 5, "chinese": 7}
DIALECTS = {"sichuan_dialect": 14}
SPEAKERS = {"eric": 827, "ryan": 1013, "vivian": 1017}
"""All of these ids are counted from the end of the codebook."""
SPEAKER_DIALECTS = {"eric": "sichuan_dialect", "ryan": False, "vivian": False}
VOCODER_GAIN = 0.8
"""As for Qwen3-Omni's vocoder."""
WAVE_STD = 0.15
NUM_MELS = 128
SPEAKER_GAIN = 1.4
"""For rectified layers, which halve the power."""


@dataclass(frozen=True)
class Size:
    """Everything in which the sizes of the checkpoint differ; the defaults are those of the default size."""

    kind: str = "1b7"
    text_hidden: int = 96
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    predictor_hidden: int = 48
    predictor_layers: int = 2
    predictor_heads: int = 2
    code_groups: int = 4
    codebook: int = 128
    codec_hidden: int = 32
    codec_layers: int = 2
    codec_window: int = 12
    latent: int = 48
    decoder_dim: int = 64
    speaker_channels: int = 32
    layer_gain: float = 2.0
    end_factor: float = 1.42


SIZES = {
    "default": Size(),
    "large": Size(
        kind="0b6",
        text_hidden=256,
        hidden=384,
        layers=6,
        heads=8,
        predictor_hidden=384,
        predictor_layers=3,
        predictor_heads=8,
        code_groups=8,
        codebook=512,
        codec_hidden=128,
        codec_layers=4,
        codec_window=16,
        latent=192,
        decoder_dim=256,
        speaker_channels=128,
        layer_gain=1.5,
        end_factor=1.7,
    ),
}


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    _write(path, seed, size, "custom_voice")


def write_design(path: Path, seed: int, size: str) -> None:
    _write(path, seed, size, "voice_design")


def write_base(path: Path, seed: int, size: str) -> None:
    _write(path, seed, size, "base")


def _write(path: Path, seed: int, size: str, kind: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    config = make_config(SIZES[size], tokenizer, kind)
    _save(path, config, _make_model(config, SIZES[size], seed))
    _write_json(path / "generation_config.json", GENERATION_CONFIG)
    save_tokenizer(tokenizer, path)
    codec = make_codec_config(SIZES[size], csm.codec_config(csm.SIZES[size]))
    folder = path / "speech_tokenizer"
    folder.mkdir(exist_ok=True)
    _save(folder, codec, _make_codec(codec, seed))
    EncodecFeatureExtractor(feature_size=1, sampling_rate=24000).save_pretrained(folder)


GENERATION_CONFIG = {
    "do_sample": True,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.05,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_k": 50,
    "subtalker_top_p": 1.0,
    "max_new_tokens": 8192,
}


def make_config(size: Size, tokenizer: Qwen2Tokenizer, kind: str) -> dict[str, Any]:
    """The checkpoint's configuration, with the token ids of `tokenizer`."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": size.kind,
        "tts_model_type": kind,
        **token_ids(tokenizer, TEXT_IDS),
        "talker_config": _talker_config(size, padded_vocab_size(tokenizer), has_speakers=kind == "custom_voice"),
    }
    if kind == "base":
        channels = size.speaker_channels
        config["speaker_encoder_config"] = {
            "enc_dim": size.hidden,
            "sample_rate": 24000,
            # The published files leave the rest to the defaults.
            "enc_channels": [*[channels] * 4, 3 * channels],
            "enc_attention_channels": channels // 2,
            "enc_se_channels": channels // 2,
        }
    return config


TEXT_IDS = {
    "im_start_token_id": "<|im_start|>",
    "im_end_token_id": "<|im_end|>",
    "assistant_token_id": "assistant",
    "tts_pad_token_id": "<tts_pad>",
    "tts_bos_token_id": "<tts_text_bos>",
    "tts_eos_token_id": "<tts_text_eod>",
}


def _talker_config(size: Size, text_vocab_size: int, has_speakers: bool) -> dict[str, Any]:
    def ids(offsets: dict[str, int]) -> dict[str, int]:
        return {name: size.codebook + offset for name, offset in offsets.items()}

    return {
        "model_type": "qwen3_tts_talker",
        **_decoder(size.hidden, size.layers, size.heads),
        "rope_scaling": {"interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default", "type": "default"},
        "vocab_size": size.codebook + NUM_SPECIAL_CODES,
        "num_code_groups": size.code_groups,
        "text_vocab_size": text_vocab_size,
        "text_hidden_size": size.text_hidden,
        **ids(CODEC_IDS),
        "codec_language_id": ids(LANGUAGES | DIALECTS if has_speakers else LANGUAGES),
        "spk_id": ids(SPEAKERS) if has_speakers else {},
        "spk_is_dialect": SPEAKER_DIALECTS if has_speakers else {},
        "code_predictor_config": {
            "model_type": "qwen3_tts_talker_code_predictor",
            **_decoder(size.predictor_hidden, size.predictor_layers, size.predictor_heads),
            "rope_scaling": None,
            "vocab_size": size.codebook,
            "num_code_groups": size.code_groups,
        },
    }


def _decoder(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """Makes a decoder whose heads together are wider than the hidden states, as in the published files."""
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 32 if hidden < 128 else 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "attention_dropout": 0,
        "use_sliding_window": False,
    }


def make_codec_config(size: Size, mimi: dict[str, Any]) -> dict[str, Any]:
    """
    Args:
        mimi: Fields of the encoder. It has twice as many quantizers as are used.
    """
    decoder = {
        "codebook_size": size.codebook,
        "num_quantizers": size.code_groups,
        "num_semantic_quantizers": 1,
        "codebook_dim": size.codec_hidden,
        "latent_dim": size.latent,
        "hidden_size": size.codec_hidden,
        "intermediate_size": 2 * size.codec_hidden,
        "num_hidden_layers": size.codec_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": size.codec_hidden,
        "rope_theta": 10000,
        "rms_norm_eps": 1e-5,
        "sliding_window": size.codec_window,
        "decoder_dim": size.decoder_dim,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": size.code_groups,
        "encoder_config": mimi | {"codebook_size": size.codebook, "num_quantizers": 2 * size.code_groups},
        "decoder_config": decoder,
    }


def _make_model(config: dict[str, Any], size: Size, seed: int) -> nn.Module:
    talker = Talker(config["talker_config"])
    fill_random(talker, seed, size.layer_gain, heads=("lm_head", "codec_head"))
    codes, end = list(range(size.codebook)), config["talker_config"]["codec_eos_token_id"]
    limit_head(talker.codec_head, [*codes, end], favoured=end, factor=size.end_factor)
    model = nn.ModuleDict({"talker": talker})
    if "speaker_encoder_config" in config:
        model["speaker_encoder"] = _make_speaker_encoder(config["speaker_encoder_config"], seed)
    return model


def _make_speaker_encoder(config: dict[str, Any], seed: int) -> nn.Module:
    """Its vectors are as large as embeddings of codes."""
    encoder = ECAPA_TimeDelayNet(Qwen2_5OmniDiTConfig(**config, mel_dim=NUM_MELS, enc_res2net_scale=8))
    fill_random(encoder, seed, SPEAKER_GAIN)
    mels = 2 * torch.randn(1, 64, NUM_MELS, generator=torch.Generator().manual_seed(seed)) - 6
    scale_output(encoder.fc, EMBEDDING_STD, lambda: encoder(mels))
    return encoder


class Talker(nn.Module):
    """The parameters of the talker, without a `forward`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        predictor = config["code_predictor_config"]
        hidden, text_hidden, codebook = config["hidden_size"], config["text_hidden_size"], predictor["vocab_size"]
        self.model = _layers(config)
        self.model.codec_embedding = nn.Embedding(config["vocab_size"], hidden)
        self.model.text_embedding = nn.Embedding(config["text_vocab_size"], text_hidden)
        self.text_projection = nn.ModuleDict(
            {"linear_fc1": nn.Linear(text_hidden, text_hidden), "linear_fc2": nn.Linear(text_hidden, hidden)}
        )
        self.codec_head = nn.Linear(hidden, config["vocab_size"], bias=False)
        residual, width = range(config["num_code_groups"] - 1), predictor["hidden_size"]
        self.code_predictor = nn.Module()
        layers = self.code_predictor.model = _layers(predictor)
        layers.codec_embedding = nn.ModuleList(nn.Embedding(codebook, hidden) for _ in residual)
        self.code_predictor.lm_head = nn.ModuleList(nn.Linear(width, codebook, bias=False) for _ in residual)
        if width != hidden:
            self.code_predictor.small_to_mtp_projection = nn.Linear(hidden, width)


def _layers(config: dict[str, Any]) -> Any:
    model: Any = Qwen3Model(Qwen3Config(**config | {"rope_scaling": None}))
    del model.embed_tokens
    return model


def _make_codec(config: dict[str, Any], seed: int) -> nn.Module:
    encoder = _make_encoder(MimiConfig(**config["encoder_config"]), seed)
    return nn.ModuleDict({"encoder": encoder, "decoder": _make_decoder(config["decoder_config"], seed)})


def _make_encoder(config: MimiConfig, seed: int) -> nn.Module:
    mimi = MimiModel(config)
    csm.fill_codec(mimi, seed)
    for part in ("decoder", "decoder_transformer", "upsample"):
        delattr(mimi, part)
    return mimi


@torch.no_grad()
def _make_decoder(fields: dict[str, Any], seed: int) -> nn.Module:
    """Makes a decoder of Qwen3-Omni's modules, the transformer in another width than the convolutions."""
    config: Any = Qwen3OmniMoeCode2WavConfig(**fields)
    decoder: Any = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**fields | {"hidden_size": config.latent_dim}))
    del decoder.code_embedding
    decoder.quantizer = nn.ModuleDict(
        {"rvq_first": _quantizer(config, 1), "rvq_rest": _quantizer(config, config.num_quantizers - 1)}
    )
    decoder.pre_conv = Qwen3OmniMoeCausalConvNet(config.codebook_dim, config.latent_dim, 3)
    transformer: Any = Qwen3OmniMoeCode2WavTransformerModel(config)
    transformer.input_proj = nn.Linear(config.latent_dim, config.hidden_size)
    transformer.output_proj = nn.Linear(config.hidden_size, config.latent_dim)
    decoder.pre_transformer = transformer
    fill_random(decoder, seed, VOCODER_GAIN)

    def run() -> None:
        x = VOCODER_GAIN * torch.randn(1, config.latent_dim, 16, generator=torch.Generator().manual_seed(seed))
        for layer in (*(layer for pair in decoder.upsample for layer in pair), *decoder.decoder):
            x = layer(x)

    scale_output(decoder.decoder[-1].conv, WAVE_STD, run)
    return decoder


def _quantizer(config: Any, num_quantizers: int) -> nn.Module:
    """A frame's codes are looked up at half of `codebook_dim`, summed, and projected."""
    width = config.codebook_dim // 2
    quantizer = nn.Module()
    quantizer.input_proj = nn.Conv1d(config.codebook_dim, width, 1, bias=False)
    quantizer.output_proj = nn.Conv1d(width, config.codebook_dim, 1, bias=False)
    quantizer.vq = nn.Module()
    quantizer.vq.layers = nn.ModuleList()
    for _ in range(num_quantizers):
        codebook = nn.Module()
        codebook.cluster_usage = nn.Parameter(torch.empty(config.codebook_size))
        codebook.embedding_sum = nn.Parameter(torch.empty(config.codebook_size, width))
        quantizer.vq.layers.append(nn.ModuleDict({"_codebook": codebook}))
    return quantizer


def _save(path: Path, config: dict[str, Any], model: nn.Module) -> None:
    _write_json(path / "config.json", config)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
