# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with the thinker alone are served for text, and for nothing else."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoProcessor,
    Qwen2_5OmniForConditionalGeneration,
    Qwen3OmniMoeForConditionalGeneration,
)
from vllm.sampling_params import SamplingParams

from tests.entrypoints.conftest import start
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.entrypoints.resolve import read_pipeline
from vllm_omni.errors import InvalidRequestError, StageConfigError
from vllm_omni.testing.hf_oracle import hf_inputs
from vllm_omni.testing.media import example_prompts

MODELS = {
    "tiny_qwen2_5_omni": Qwen2_5OmniForConditionalGeneration,
    "tiny_qwen3_omni_moe": Qwen3OmniMoeForConditionalGeneration,
}
NUM_TOKENS = 12
PARTS = ("talker_config", "code2wav_config", "token2wav_config")


def write_without_talker(whole: Path, path: Path) -> None:
    """A copy of a checkpoint as published ones without a talker are: neither its weights nor its configuration."""
    without = ("*.safetensors", "*.index.json", "config.json")
    shutil.copytree(whole, path, ignore=shutil.ignore_patterns(*without))
    weights = {name: rows for file in whole.glob("*.safetensors") for name, rows in load_file(file).items()}
    thinker = {name: rows for name, rows in weights.items() if name.startswith("thinker.")}
    assert 0 < len(thinker) < len(weights)
    save_file(thinker, path / "model.safetensors", {"format": "pt"})
    config = json.loads((whole / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in PARTS} | {"enable_audio_output": False}
    (path / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(name) / "thinker"
    write_without_talker(request.getfixturevalue(name), path)
    return path


def reference(name: str, checkpoint: Path, prompt: Any) -> tuple[list[int], list[int]]:
    """The tokens of the prompt and of transformers' text."""
    model = MODELS[name].from_pretrained(checkpoint, dtype=torch.float32).eval()
    assert not model.has_talker
    inputs = hf_inputs(AutoProcessor.from_pretrained(checkpoint), prompt)
    length = inputs["input_ids"].shape[1]
    # Qwen2.5-Omni's own `generate` needs the talker even for text.
    (sequence,) = model.thinker.generate(**inputs, do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=-1)
    return sequence[:length].tolist(), sequence[length:].tolist()


def test_the_thinker_is_the_only_stage(name: str, checkpoint: Path) -> None:
    read = read_pipeline(OmniArgs(model=str(checkpoint)))
    (thinker,) = read.with_checkpoints.stage_args
    assert thinker.name == "thinker" and read.with_checkpoints.runtime.edges == []
    assert thinker.engine_args["engine_output_type"] == "text", "nobody reads its rows"
    with pytest.raises(StageConfigError, match="there is no stage 'talker'"):
        read_pipeline(OmniArgs(model=str(checkpoint), stage_overrides={"talker": {"max_model_len": 8}}))


@pytest.mark.slow
def test_its_text_is_that_of_transformers(name: str, checkpoint: Path) -> None:
    prompts = example_prompts(checkpoint)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with start(checkpoint, max_model_len=1024) as llm:
        for kind in ("text", "audio", "image"):
            (text,) = llm.generate(prompts[kind], params, use_tqdm=False)
            expected = reference(name, checkpoint, prompts[kind])
            assert (text.prompt_token_ids, list(text.outputs[0].token_ids)) == expected, kind
        with pytest.raises(InvalidRequestError, match="audio"):
            llm.generate({**prompts["text"], "modalities": ["audio"]}, params, use_tqdm=False)
        assert len(llm.generate(prompts["text"], params, use_tqdm=False)) == 1
