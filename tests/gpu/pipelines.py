# SPDX-License-Identifier: Apache-2.0
"""Omni pipelines on one GPU, and what they say."""

import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_omni import OmniLLM
from vllm_omni.testing.hf_oracle import HFOracle

TEXT_TOKENS, TALKER_TOKENS = 24, 48
GREEDY: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": TEXT_TOKENS},
    {"temperature": 0.0, "repetition_penalty": 1.05, "max_tokens": TALKER_TOKENS, "detokenize": False},
    {"seed": 0},
]
LIMITS: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 8}
WAVE_TOLERANCE = 1e-3
"""Of samples in [-1, 1] in float32: sums have another order on a GPU."""


class Spoken(NamedTuple):
    """
    Attributes:
        token_ids: Of the text.
        wave: float32 `[samples]`.
    """

    token_ids: list[int]
    wave: torch.Tensor


class Case(NamedTuple):
    """A tiny checkpoint, prompts of all kinds, and what transformers says to them."""

    name: str
    model: Path
    prompts: list[Any]
    expected: list[Spoken]


def speak(llm: OmniLLM, prompts: list[Any]) -> list[Spoken]:
    """Greedily, all prompts at once."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [
        Spoken(list(text.outputs[0].token_ids), speech.multimodal_output["audio"])
        for text, speech in zip(outputs[::2], outputs[1::2], strict=True)
    ]


def speak_with_transformers(model: Path, prompts: list[Any]) -> list[Spoken]:
    """The same on the CPU, in float32."""
    oracle = HFOracle(model, num_threads=1)
    limits = {"thinker_max_tokens": TEXT_TOKENS, "talker_max_tokens": TALKER_TOKENS}
    results = [oracle.generate(prompt, **limits) for prompt in prompts]
    return [Spoken(result.thinker_token_ids, result.audio) for result in results]


def assert_same(spoken: list[Spoken], expected: list[Spoken]) -> None:
    assert [one.token_ids for one in spoken] == [other.token_ids for other in expected]
    for one, other in zip(spoken, expected, strict=True):
        torch.testing.assert_close(one.wave, other.wave, rtol=0, atol=WAVE_TOLERANCE)


def used_mib() -> int:
    """MiB of the first visible GPU that are in use, by any process."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", f"--id={device}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout)
