# SPDX-License-Identifier: Apache-2.0
"""The first stage has the last id, and each has a budget; compared with HF transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig

from vllm_omni import OmniLLM
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import mixed_prompts

pytestmark = pytest.mark.slow

THINKER_TOKENS, TALKER_TOKENS = 16, 24
GREEDY = [
    None,
    {"temperature": 0.0, "repetition_penalty": 1.05, "max_tokens": TALKER_TOKENS, "detokenize": False},
    {"temperature": 0.0, "max_tokens": THINKER_TOKENS},
]
BLOCK_SIZE = 128  # vLLM's on a CPU


def reversed_config() -> dict[str, Any]:
    """The shipped configuration, its stages in reverse order."""
    raw = yaml.safe_load((stage_configs_dir() / "qwen3_omni_moe.yaml").read_text())
    for stage in raw["stage_args"]:
        stage["stage_id"] = 2 - stage["stage_id"]
        stage["engine_input_source"] = [2 - source for source in stage.get("engine_input_source", [])]
        stage["engine_args"].pop("gpu_memory_utilization")
    thinker, talker, _ = (stage["runtime"] for stage in raw["stage_args"])
    thinker["memory"], talker["memory"] = "64MiB", 32 << 20
    raw["runtime"]["edges"] = []
    return raw


@pytest.fixture(scope="module")
def llm(tiny_qwen3_omni_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OmniLLM]:
    path = tmp_path_factory.mktemp("config") / "reversed.yaml"
    path.write_text(yaml.safe_dump(reversed_config()))
    with OmniLLM(str(tiny_qwen3_omni_moe), str(path), dtype="float32", max_model_len=1024, max_num_seqs=8) as llm:
        yield llm


def test_eight_different_prompts_at_once_equal_hf(llm: OmniLLM, tiny_qwen3_omni_moe: Path) -> None:
    prompts = mixed_prompts(tiny_qwen3_omni_moe, 8, seed=10)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    oracle = HFOracle(tiny_qwen3_omni_moe)
    for prompt, speech, text in zip(prompts, outputs[::2], outputs[1::2], strict=True):
        expected = oracle.generate(prompt, thinker_max_tokens=THINKER_TOKENS, talker_max_tokens=TALKER_TOKENS)
        assert text.outputs[0].token_ids == expected.thinker_token_ids
        torch.testing.assert_close(speech.multimodal_output["audio"], expected.audio, rtol=0, atol=1e-4)


def test_each_stage_has_the_kv_cache_of_its_budget(llm: OmniLLM, tiny_qwen3_omni_moe: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_qwen3_omni_moe)
    text_configs = {"thinker": config.thinker_config.text_config, "talker": config.talker_config.text_config}
    budgets = {"thinker": 64 << 20, "talker": 32 << 20}
    stats = {stage.name: stage for stage in llm.stats()}
    for name, model in text_configs.items():
        block = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * BLOCK_SIZE * 4
        assert stats[name].kv_blocks_total == budgets[name] // block - 1  # vLLM keeps one back
