# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of transformers' speech classes with few random weights, and their sounds by transformers alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

TEXTS = ("a quiet sea.", "the wind is in the trees, and it is late.", "yes.")


def write_vits(path: Path, **config: Any) -> None:
    vocabulary = {letter: index for index, letter in enumerate("_ abcdefghijklmnopqrstuvwxyz.,'")}
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32, "flow_size": 16,
        "spectrogram_bins": 9, "upsample_initial_channel": 16, "upsample_rates": [4, 4],
        "upsample_kernel_sizes": [8, 8], "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]],
        "duration_predictor_filter_channels": 16, "prior_encoder_num_flows": 2, "duration_predictor_num_flows": 2,
        "posterior_encoder_num_wavenet_layers": 2, "prior_encoder_num_wavenet_layers": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    model = hf.VitsModel(hf.VitsConfig(**(sizes | config), vocab_size=len(vocabulary)))
    model.save_pretrained(path)
    (path / "vocab.json").write_text(json.dumps(vocabulary))
    hf.VitsTokenizer(str(path / "vocab.json"), phonemize=False, is_uroman=False).save_pretrained(path)


def vits_sound(path: Path, text: str, seed: int = 0, **options: Any) -> torch.Tensor:
    model, tokenizer = hf.VitsModel.from_pretrained(path).eval(), hf.AutoTokenizer.from_pretrained(path)
    torch.manual_seed(seed)
    with torch.inference_mode():
        return model(**tokenizer(text, return_tensors="pt"), **options).waveform[0]


WRITERS: dict[str, Callable[[Path], None]] = {"vits": write_vits}
SOUNDS: dict[str, Callable[[Path, str, int], torch.Tensor]] = {"vits": vits_sound}
