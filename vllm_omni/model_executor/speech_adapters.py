# SPDX-License-Identifier: Apache-2.0
"""What the declarations of transformers' speech classes do not tell, for each class: a few lines each."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils import is_uroman_available

from vllm_omni.errors import StageConfigError
from vllm_omni.model_executor.row_noise import RowNoise
from vllm_omni.model_executor.speech_model import SpeechModel


class Vits(SpeechModel):
    """Rows together: the noise of a row does not have its padding, and neither has the vocoder's input."""

    def load(self, device: torch.device) -> None:
        super().load(device)
        if getattr(self.processor, "is_uroman", False) and not is_uroman_available():
            raise StageConfigError(f"{self.model}: its texts are romanized by uroman; install it: pip install uroman")

    def call_rows(self, inputs: Mapping[str, Any], options: Mapping[str, Any], noise: RowNoise) -> Any:
        model = self.module
        noise.lengths = inputs["attention_mask"].sum(1).tolist()
        decode, factor = model.decoder.forward, 1.0 / options["speaking_rate"]

        def read_lengths(module: Any, args: Any, log_durations: torch.Tensor) -> None:
            durations = torch.ceil(torch.exp(log_durations) * args[1] * factor)
            noise.lengths = torch.clamp_min(durations.sum([1, 2]), 1).long().tolist()

        def decode_rows(frames: torch.Tensor, *args: Any) -> torch.Tensor:
            rows = zip(frames.split(1), noise.lengths or (), strict=True)
            sounds = [decode(row[..., :length], *args).squeeze(0).T for row, length in rows]
            return torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True).transpose(1, 2)

        handle = model.duration_predictor.register_forward_hook(read_lengths)
        model.decoder.forward = decode_rows
        try:
            return self.call(inputs, options)
        finally:
            handle.remove()
            del model.decoder.forward
