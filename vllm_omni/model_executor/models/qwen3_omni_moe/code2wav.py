# SPDX-License-Identifier: Apache-2.0
"""The vocoder: turns the frames of codes of requests into waveforms, whole or window by window.

A request's waveform is that of HF transformers' `Qwen3OmniMoeCode2Wav` for all its frames at once, for any windows.
(The reference's own `chunked_decode` loses samples at each cut, every 300 frames.)

This file knows no talker and no engine.
"""

from typing import ClassVar, cast

import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav
from vllm.config import VllmConfig

from vllm_omni.model_executor.layers.code2wav import Code2Wav, StatefulCode2Wav


class OmniQwen3OmniMoeCode2Wav(Code2Wav):
    checkpoint_prefix: ClassVar[str] = "code2wav."

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = cast(Qwen3OmniMoeCode2WavConfig, vllm_config.model_config.hf_config)
        self.config = config
        vocoder = Qwen3OmniMoeCode2Wav._from_config(config, dtype=torch.get_default_dtype())
        self.code2wav = StatefulCode2Wav(vocoder, drops_first=True).eval()
        self.hop = self.code2wav.hop

    @property
    def network(self) -> StatefulCode2Wav:
        return self.code2wav

    def num_samples(self, num_frames: int) -> int:
        """Samples of the first `num_frames` of a request; every later frame gives `hop`.

        Each transposed convolution of the decoder drops the `rate` samples of a request's first position.
        """
        length = num_frames
        for factor in self.config.upsampling_ratios:
            length *= factor
        for rate in self.config.upsample_rates:
            length = (length - 1) * rate
        return length
