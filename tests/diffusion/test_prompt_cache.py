# SPDX-License-Identifier: Apache-2.0
"""Encoded prompts are found again where nothing that encoding reads has changed, and make the same image."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.executor.test_diffusers_executor import SIZE, Harness
from vllm_omni.diffusion.job import NO_ADAPTER, Adapter
from vllm_omni.diffusion.pipeline_call import on_method
from vllm_omni.diffusion.prompt_cache import PromptCache
from vllm_omni.metrics.stats import CacheCounts
from vllm_omni.testing.diffusers_oracle import DiffusersOracle


class Pipe:
    """Encodes by drawing, so that two results of the same arguments differ."""

    _execution_device = torch.device("cpu")

    def encode_prompt(self, prompt: Any = None, image: Any = None, max_sequence_length: int = 8) -> Any:
        return [torch.rand(2, 3)], torch.rand(4), None


def encode(cache: PromptCache, *, adapter: Adapter = NO_ADAPTER, settings: dict[str, Any] | None = None, **arguments):
    pipe = Pipe()
    vars(pipe).update(settings or {})
    on_method(pipe, "encode_prompt", lambda *called: cache.encode(pipe, adapter, *called))
    return pipe.encode_prompt(**arguments)


def equal(one, other) -> bool:
    return torch.equal(one[0][0], other[0][0]) and torch.equal(one[1], other[1]) and one[2] is other[2] is None


def test_the_same_arguments_find_the_same_result():
    cache = PromptCache(1 << 20)
    image = Image.new("RGB", (4, 4), "red")
    for arguments in (
        {"prompt": "a cat"},
        {"prompt": ["a cat", None]},
        {"prompt": "a cat", "image": image},
        {"prompt": "a cat", "image": [np.arange(4)]},
        {"prompt": "a cat", "image": torch.arange(4).bfloat16()},
    ):
        first = encode(cache, **arguments)
        assert equal(first, encode(cache, **arguments))
        first[0][0].zero_()  # as a pipeline might
        assert encode(cache, **arguments)[0][0].any()
    assert cache.counts == CacheCounts(queries=15, hits=10)


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt": "a dog"},
        {"prompt": ["a cat"]},
        {"max_sequence_length": 9},
        {"max_sequence_length": 8.0},
        {"image": Image.new("RGB", (4, 4), "blue")},
        {"image": Image.new("RGB", (2, 8), "red")},
        {"image": torch.arange(4)},
        {"image": None},
        {"adapter": Adapter("one", "/one", 0.5)},
        {"settings": {"_guidance_scale": 1.0}},
        {"settings": {"_guidance_scale": 2.0, "_clip_skip": 1}},
    ],
)
def test_whatever_encoding_reads_tells_prompts_apart(changed):
    cache = PromptCache(1 << 20)
    arguments = {
        "prompt": "a cat",
        "max_sequence_length": 8,
        "image": Image.new("RGB", (4, 4), "red"),
        "settings": {"_guidance_scale": 2.0},
    }
    first = encode(cache, **arguments)
    assert not equal(first, encode(cache, **arguments | changed))
    assert equal(first, encode(cache, **arguments))


def test_what_cannot_be_compared_is_encoded_each_time():
    cache = PromptCache(1 << 20)
    assert not equal(encode(cache, image=object()), encode(cache, image=object()))
    assert cache.counts == CacheCounts()


def test_memory_is_bounded_and_the_least_recently_used_is_removed():
    size = (2 * 3 + 4) * 4
    cache = PromptCache(2 * size)
    first, second = encode(cache, prompt="1"), encode(cache, prompt="2")
    assert equal(encode(cache, prompt="1"), first)
    encode(cache, prompt="3")
    assert equal(encode(cache, prompt="1"), first) and not equal(encode(cache, prompt="2"), second)
    nothing = PromptCache(0)
    assert not equal(encode(nothing, prompt="1"), encode(nothing, prompt="1"))


def check_another_seed(model: Path, settings: dict[str, Any], num_calls: int) -> None:
    """`num_calls` of `encode_prompt` for each request."""
    harness, oracle = Harness(model), DiffusersOracle(model)
    for turn, seed in enumerate((1, 2, 1)):
        harness.add_job(f"{turn}", {"prompt": "a cat", **settings}, seed)
        harness.run()
        expected = oracle.generate("a cat", seed=seed, **settings)
        torch.testing.assert_close(harness.ends[f"{turn}"].output, expected, atol=1e-4, rtol=0)
        counts = CacheCounts(queries=(turn + 1) * num_calls, hits=turn * num_calls)
        assert harness.executor.runner.prompt_cache.counts == counts


def test_another_seed(tiny_diffusion: Callable[[str], Path]):
    check_another_seed(tiny_diffusion("z_image"), {**SIZE, "guidance_scale": 4.0, "negative_prompt": "grey"}, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "num_calls"),
    [("qwen_image", {"true_cfg_scale": 3.0, "negative_prompt": "grey"}, 2), ("stable_diffusion_3", {}, 1)],
)
def test_another_seed_with_other_pipelines(tiny_diffusion: Callable[[str], Path], name, settings, num_calls):
    size = {"height": 32, "width": 32, "num_inference_steps": 2}
    check_another_seed(tiny_diffusion(name), size | settings, num_calls)
