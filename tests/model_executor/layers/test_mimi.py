# SPDX-License-Identifier: Apache-2.0
"""Mimi's decoder with state against HF's, over random windows of several requests at once; and its encoder."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import MimiConfig, MimiModel

from vllm_omni.model_executor.layers.mimi import MimiEncoder, OmniMimi, StatefulMimi
from vllm_omni.testing.tiny.csm import SIZES, codec_config, fill_codec

LENGTHS = {"a": 1, "b": 9, "c": 40, "d": 41}


@pytest.fixture(scope="module", params=[{}, {"use_conv_shortcut": True, "num_residual_layers": 2, "kernel_size": 5}])
def theirs(request: pytest.FixtureRequest) -> Any:
    config = MimiConfig(**codec_config(SIZES["default"]) | request.param)
    model = MimiModel(config).eval()
    fill_codec(model, seed=3)
    return model


@pytest.fixture
def ours(theirs: Any) -> OmniMimi:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=theirs.config))
    model = OmniMimi(vllm_config=config)
    loaded = model.load_weights(theirs.state_dict().items())
    assert loaded == {name for name, _ in model.named_parameters()}
    return model


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_any_windows_of_several_requests_give_one_decode(seed: int, theirs: Any, ours: OmniMimi) -> None:
    rng = random.Random(seed)
    sizes = (theirs.config.num_quantizers, theirs.config.codebook_size)
    codes = {name: torch.randint(sizes[1], (length, sizes[0])) for name, length in LENGTHS.items()}
    states: dict[str, dict[str, Any]] = {name: {} for name in codes}
    waves: dict[str, list[torch.Tensor]] = {name: [] for name in codes}
    done = dict.fromkeys(codes, 0)
    while left := [name for name in codes if done[name] < LENGTHS[name]]:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        windows = {name: min(rng.choice((1, 2, 7, 30)), LENGTHS[name] - done[name]) for name in chosen}
        given = [
            {
                "codes": codes[name][done[name] : done[name] + size],
                "state": states[name],
                "is_last": done[name] + size == LENGTHS[name],
            }
            for name, size in windows.items()
        ]
        made = ours(torch.empty(0), torch.empty(0), runtime_additional_information=given)
        for name, output in zip(windows, made, strict=True):
            assert len(output["audio"]) == windows[name] * 1920
            waves[name].append(output["audio"])
            done[name] += windows[name]
    for name in codes:
        expected = theirs.decode(codes[name].T[None]).audio_values[0, 0]
        torch.testing.assert_close(torch.cat(waves[name]), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_encoder_gives_hf_s_codes(theirs: Any) -> None:
    encoder = MimiEncoder(theirs.config)
    assert encoder.load(theirs.state_dict()) == {name for name, _ in encoder.named_parameters()}
    for num_samples in (1, 1920, 1921, 50_000):
        sound = 0.3 * torch.randn(num_samples)
        codes = encoder(sound)
        assert codes.shape == (-(-num_samples // 1920), theirs.config.num_quantizers)
        assert torch.equal(codes.T, theirs.encode(sound[None, None]).audio_codes[0])


@pytest.mark.parametrize("field", [{"use_causal_conv": False}, {"pad_mode": "reflect"}, {"trim_right_ratio": 0.5}])
def test_a_mimi_that_is_not_causal_is_refused(field: dict[str, Any]) -> None:
    config = MimiConfig(**codec_config(SIZES["default"]) | field)
    with pytest.raises(ValueError, match="only a causal Mimi"):
        StatefulMimi(MimiModel(config))
