# SPDX-License-Identifier: Apache-2.0
"""The configurations of Qwen3-TTS (12 Hz) and of its codec, which transformers does not have.

Fields are those of the published files; defaults are those that the files leave out. A checkpoint has two folders of
weights: its own, with `Qwen3TTSConfig` (`model_type: qwen3_tts`), and `speech_tokenizer/`, the codec, with
`Qwen3TTSTokenizerConfig` (`qwen3_tts_tokenizer_12hz`).
"""

from typing import Any, ClassVar

from transformers import MimiConfig, PreTrainedConfig, Qwen3Config
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
    Qwen3OmniMoeTalkerCodePredictorConfig,
)

_MROPE_FIELDS = ("mrope_section", "interleaved", "mrope_interleaved")


class Qwen3TTSTalkerConfig(Qwen3Config):
    """Layers of Qwen3, with two embeddings: `text_vocab_size` rows of `text_hidden_size`, projected to `hidden_size`,
    and `vocab_size` rows of codes, of languages, of speakers and of marks. The predictor of a frame's other codes is as
    Qwen3-Omni's, but its inputs are as wide as the talker.

    The published files ask for M-RoPE with three equal rows of positions, which is plain RoPE: its fields are dropped.

    Attributes:
        spk_id, codec_language_id: Rows of the codes' embedding; no speakers where the voice is described or cloned.
        spk_is_dialect: By speaker: the name of a language, or False.
    """

    model_type: ClassVar[str] = "qwen3_tts_talker"
    sub_configs: ClassVar[dict[str, type[PreTrainedConfig]]] = {
        "code_predictor_config": Qwen3OmniMoeTalkerCodePredictorConfig
    }

    code_predictor_config: dict[str, Any] | PreTrainedConfig | None = None
    vocab_size: int = 3072
    num_code_groups: int = 16
    text_vocab_size: int = 151936
    text_hidden_size: int = 2048
    codec_pad_id: int = 2148
    codec_bos_id: int = 2149
    codec_eos_token_id: int = 2150
    codec_think_id: int = 2154
    codec_nothink_id: int = 2155
    codec_think_bos_id: int = 2156
    codec_think_eos_id: int = 2157
    codec_language_id: dict[str, int] | None = None
    spk_id: dict[str, int] | None = None
    spk_is_dialect: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.code_predictor_config = _as_config(Qwen3OmniMoeTalkerCodePredictorConfig, self.code_predictor_config)
        self.codec_language_id = self.codec_language_id or {}
        self.spk_id = self.spk_id or {}
        self.spk_is_dialect = self.spk_is_dialect or {}
        rope: Any = kwargs.pop("rope_scaling", None) or self.rope_parameters or {}
        self.rope_parameters = {name: value for name, value in rope.items() if name not in _MROPE_FIELDS}
        super().__post_init__(**kwargs)


class Qwen3TTSSpeakerEncoderConfig(PreTrainedConfig):
    """The fields that transformers' `ECAPA_TimeDelayNet` reads, and the rate of its sounds."""

    model_type: ClassVar[str] = "qwen3_tts_speaker_encoder"

    mel_dim: int = 128
    enc_dim: int = 1024
    enc_channels: list[int] | tuple[int, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: list[int] | tuple[int, ...] = (5, 3, 3, 3, 1)
    enc_dilations: list[int] | tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: int = 128
    enc_res2net_scale: int = 8
    enc_se_channels: int = 128
    sample_rate: int = 24000


class Qwen3TTSConfig(PreTrainedConfig):
    """
    Attributes:
        tts_model_type: `custom_voice`, `voice_design`, or `base`, which clones and alone has a speaker encoder.
        tts_model_size: `1b7` or `0b6`.
    """

    model_type: ClassVar[str] = "qwen3_tts"
    sub_configs: ClassVar[dict[str, type[PreTrainedConfig]]] = {
        "talker_config": Qwen3TTSTalkerConfig,
        "speaker_encoder_config": Qwen3TTSSpeakerEncoderConfig,
    }

    talker_config: dict[str, Any] | PreTrainedConfig | None = None
    speaker_encoder_config: dict[str, Any] | PreTrainedConfig | None = None
    tokenizer_type: str = "qwen3_tts_tokenizer_12hz"
    tts_model_type: str = "custom_voice"
    tts_model_size: str = "1b7"
    im_start_token_id: int = 151644
    im_end_token_id: int = 151645
    tts_pad_token_id: int = 151671
    tts_bos_token_id: int = 151672
    tts_eos_token_id: int = 151673

    def __post_init__(self, **kwargs: Any) -> None:
        self.talker_config = _as_config(Qwen3TTSTalkerConfig, self.talker_config)
        self.speaker_encoder_config = _as_config(Qwen3TTSSpeakerEncoderConfig, self.speaker_encoder_config)
        super().__post_init__(**kwargs)

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        """The layers that generate, for vLLM."""
        return self.talker_config


class Qwen3TTSTokenizerDecoderConfig(Qwen3OmniMoeCode2WavConfig):
    """Qwen3-Omni's vocoder, whose transformer and convolutions have widths of their own."""

    model_type: ClassVar[str] = "qwen3_tts_tokenizer_12hz_decoder"

    head_dim: int = 64
    latent_dim: int = 1024
    codebook_dim: int = 512


class Qwen3TTSTokenizerConfig(PreTrainedConfig):
    """The codec: `encoder_valid_num_quantizers` are the codes of a frame, of all that Mimi's encoder could make.

    The reference runs in a version of transformers that ignores the encoder's `sliding_window`: here it is set to the
    most positions that there can be.
    """

    model_type: ClassVar[str] = "qwen3_tts_tokenizer_12hz"
    sub_configs: ClassVar[dict[str, type[PreTrainedConfig]]] = {
        "encoder_config": MimiConfig,
        "decoder_config": Qwen3TTSTokenizerDecoderConfig,
    }

    encoder_config: dict[str, Any] | PreTrainedConfig | None = None
    decoder_config: dict[str, Any] | PreTrainedConfig | None = None
    encoder_valid_num_quantizers: int = 16

    def __post_init__(self, **kwargs: Any) -> None:
        encoder: Any = _as_config(MimiConfig, self.encoder_config)
        encoder.sliding_window = encoder.max_position_embeddings
        self.encoder_config = encoder
        self.decoder_config = _as_config(Qwen3TTSTokenizerDecoderConfig, self.decoder_config)
        super().__post_init__(**kwargs)


def _as_config(kind: type[PreTrainedConfig], given: Any) -> PreTrainedConfig:
    return given if isinstance(given, kind) else kind(**(given or {}))
