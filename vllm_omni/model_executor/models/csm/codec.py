# SPDX-License-Identifier: Apache-2.0
"""CSM's codec: turns the backbone's frames into sound."""

from typing import ClassVar

import torch

from vllm_omni.model_executor.layers.frames_to_codec import FramesToCodec
from vllm_omni.model_executor.layers.mimi import OmniMimi


class OmniCsmCodec(OmniMimi):
    checkpoint_prefix: ClassVar[str] = "codec_model."


class BackboneToCodec(FramesToCodec):
    """Passes frames to the codec, without the frame of zeros that ends speech."""

    def select(self, codes: torch.Tensor) -> torch.Tensor:
        return codes[(codes != self.hf_config.codebook_eos_token_id).any(1)]
