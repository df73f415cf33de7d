# SPDX-License-Identifier: Apache-2.0
"""The configurations, read as the published files have their fields."""

from collections.abc import Callable
from pathlib import Path

from transformers import AutoConfig

from vllm_omni.model_executor.models.qwen3_tts.configuration import Qwen3TTSConfig, Qwen3TTSTokenizerConfig
from vllm_omni.plugin import register


def test_fields_of_both_checkpoints(checkpoint: Callable[[str, str], Path]) -> None:
    register()
    folder = checkpoint("qwen3_tts_base", "default")
    config, codec = AutoConfig.from_pretrained(folder), AutoConfig.from_pretrained(folder / "speech_tokenizer")
    assert type(config) is Qwen3TTSConfig and type(codec) is Qwen3TTSTokenizerConfig

    talker = config.get_text_config()
    assert "mrope_section" not in talker.rope_parameters and talker.rope_parameters["rope_theta"] == 1e6
    assert talker.code_predictor_config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert (talker.spk_id, talker.spk_is_dialect) == ({}, {})
    assert config.speaker_encoder_config.enc_dim == talker.hidden_size
    assert codec.decoder_config.rope_parameters["rope_theta"] == 1e4
    assert codec.encoder_config.sliding_window == codec.encoder_config.max_position_embeddings
    for made in (config, codec):
        assert type(made)(**made.to_dict()).to_dict() == made.to_dict()


def test_defaults_are_the_published_values() -> None:
    config = Qwen3TTSConfig(tts_model_type="base")
    assert config.speaker_encoder_config.enc_channels == (512, 512, 512, 512, 1536)
    assert (config.talker_config.codec_eos_token_id, config.talker_config.vocab_size) == (2150, 3072)
