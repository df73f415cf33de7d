# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint: a composer with random weights, whose tunes are arbitrary, and three instruments.

python -m vllm_omni.testing.tiny_checkpoints tune DIR
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tune_model.config import TuneConfig
from vllm_omni.testing.tiny.weights import fill_random, limit_head

LAYER_GAIN = 2.0
END_FACTOR = 1.5
"""Tunes end sooner at larger factors."""
INSTRUMENTS = {
    "synthesizer.partials": torch.tensor(
        [
            [0.20, 0.03, 0.01, 0.00, 0.00, 0.00, 0.00, 0.00],
            [0.12, 0.06, 0.00, 0.05, 0.00, 0.00, 0.00, 0.03],
            [0.12, 0.08, 0.05, 0.03, 0.02, 0.01, 0.01, 0.01],
        ]
    ),
    "synthesizer.decays": torch.tensor([1.0, 0.5, 5.0]),
}
SIZES: dict[str, dict[str, int]] = {
    "default": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
    "large": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512},
}


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    config: Any = TuneConfig(**SIZES[size], max_position_embeddings=1024, dtype="float32")
    config.num_key_value_heads = config.num_attention_heads
    config.vocab_size = config.first_note_id + len(config.notes)
    config.architectures = ["TuneComposer"]
    composer = LlamaForCausalLM(config)
    fill_random(composer, seed, LAYER_GAIN, heads=("lm_head",))
    limit_head(composer.lm_head, list(range(config.end_id, config.vocab_size)), config.end_id, END_FACTOR)
    weights = {f"composer.{name}": tensor for name, tensor in composer.state_dict().items()}
    save_file(weights | INSTRUMENTS, path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(path)
    make_tokenizer().save_pretrained(path)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    symbols = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
