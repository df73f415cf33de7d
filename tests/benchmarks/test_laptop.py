# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks/laptop.py` gives llama.cpp, and how it counts words. Neither llama.cpp nor a server runs here."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig, LlamaForCausalLM

ImportBenchmark = Callable[[str], ModuleType]
SENTENCES = "<s> he was not an ill disposed young man </s> (first)\n<s> he might even have been mister </s> (second)\n"


@pytest.mark.parametrize("is_tied", [True, False])
def test_transformers_reads_the_same_model_of_the_file(
    import_benchmark: ImportBenchmark, tmp_path: Path, is_tied: bool
) -> None:
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=is_tied,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).half()
    model.save_pretrained(tmp_path / "model")
    words = {chr(97 + number // 26) + chr(97 + number % 26): number for number in range(96)}
    tokenizer = {"model": {"vocab": words, "merges": [["a", "a"]]}, "added_tokens": [{"id": 1}, {"id": 2}]}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))

    import_benchmark("laptop").write_gguf(tmp_path / "model", tmp_path / "model.gguf")

    dequantize = GgufConfig(dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", quantization_config=dequantize, dtype=torch.float32
    )
    expected = dict(model.float().named_parameters())
    found = dict(read.named_parameters())
    assert found.keys() == expected.keys()
    for name, weight in found.items():  # In 8 bits, of 32 weights the greatest has 127 steps.
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=float(expected[name].abs().max()) / 127)
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        difference = (read(tokens).logits - model(tokens).logits).abs().max()
    assert difference < 0.05 * model(tokens).logits.abs().max()
    assert read.config.rms_norm_eps == pytest.approx(config.rms_norm_eps)


def test_words_are_counted_wrong_once(import_benchmark: ImportBenchmark, tmp_path: Path) -> None:
    (tmp_path / "transcription").write_text(SENTENCES)
    laptop = import_benchmark("laptop")
    texts = {"first": "He was not an ill-disposed young man.", "second": "He might even have been Mr."}
    assert laptop.words_wrong(lambda path: texts[path.stem], tmp_path) == 0
    texts["second"] = "She might have been a Mr."  # One taken for another, one left out, one added.
    assert laptop.words_wrong(lambda path: texts[path.stem], tmp_path) == pytest.approx(3 / 14)
