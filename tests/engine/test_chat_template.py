# SPDX-License-Identifier: Apache-2.0
"""The chat template of a model without a processor is the one that vLLM finds by loading a processor."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm.config import ModelConfig
from vllm.renderers.hf import resolve_chat_template
from vllm.tokenizers import get_tokenizer

from vllm_omni.engine.chat_template import text_chat_template
from vllm_omni.engine.engine_args import create_engine_args


def load(checkpoint: Path) -> ModelConfig:
    return create_engine_args(str(checkpoint)).create_model_config()


def test_it_is_the_one_that_vllm_finds(tiny_qwen3: Path) -> None:
    config, tokenizer = load(tiny_qwen3), get_tokenizer(str(tiny_qwen3))
    template = text_chat_template(config)
    assert template is not None
    tools: Any
    for tools in (None, [{"type": "function", "function": {"name": "paint", "parameters": {}}}]):
        found = resolve_chat_template(tokenizer, None, tools, model_config=config)  # type: ignore[arg-type]
        assert template == found


@pytest.mark.parametrize("change", ["a processor's file", "a processor's class", "several templates", "no template"])
def test_all_others_are_left_to_vllm(tiny_qwen3: Path, tmp_path: Path, change: str) -> None:
    folder = Path(shutil.copytree(tiny_qwen3, tmp_path / "checkpoint"))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    match change:
        case "a processor's file":
            (folder / "preprocessor_config.json").write_text("{}")
        case "a processor's class":
            settings["processor_class"] = "Qwen2_5OmniProcessor"
        case "several templates":
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
        case "no template":
            (folder / "chat_template.jinja").unlink()
    path.write_text(json.dumps(settings))
    assert text_chat_template(load(folder)) is None


def test_a_model_with_a_processor_is_left_to_vllm(tiny_qwen2_5_omni: Path) -> None:
    arguments = create_engine_args(
        str(tiny_qwen2_5_omni), model_arch="Qwen2_5OmniThinkerForConditionalGeneration", dtype="float32"
    )
    assert text_chat_template(arguments.create_model_config()) is None


def test_a_name_on_the_hub_is_left_to_vllm(tiny_qwen3: Path) -> None:
    config = load(tiny_qwen3)
    config.tokenizer = "Qwen/Qwen3-0.6B"
    assert text_chat_template(config) is None
