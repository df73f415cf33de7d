# SPDX-License-Identifier: Apache-2.0
"""Writes trained parts as the checkpoints that ship: 16-bit weights, one file for each part."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast, Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

from training.config import save_processor
from vllm_omni.testing.tiny.processors import write_json
from vllm_omni.testing.tiny.tokenizer import generation_config

_FILES = {"thinker.audio_tower.": "hearing", "thinker.": "thinker", "talker.": "talker", "code2wav.": "vocoder"}
"""By the beginnings of the weights' names: the first that fits."""


def export_omni(
    folder: Path,
    config: Qwen3OmniMoeConfig,
    tokenizer: PreTrainedTokenizerFast,
    parts: dict[str, dict[str, torch.Tensor]],
) -> None:
    """
    Args:
        parts: The state of each module of the model, by its name. Files of other parts are kept as they are.
    """
    save_processor(tokenizer, config, folder)
    generation_config(tokenizer).save_pretrained(folder)
    model = Qwen3OmniMoeForConditionalGeneration(config)
    for name, state in parts.items():
        model.get_submodule(name).load_state_dict(state)
    trained = {f"{name}.{key}" for name, state in parts.items() for key in state}
    files: dict[str, dict[str, torch.Tensor]] = {}
    index: dict[str, str] = {}
    for name, weight in model.state_dict().items():
        part = next(file for begin, file in _FILES.items() if name.startswith(begin))
        index[name] = f"{part}.safetensors"
        if name in trained:
            files.setdefault(part, {})[name] = weight.half().contiguous()
    for part, weights in files.items():
        save_file(weights, folder / f"{part}.safetensors", metadata={"format": "pt"})
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
