# SPDX-License-Identifier: Apache-2.0
"""The codec and the encoders of sounds alone, against the authors' package: long speech, sounds of any length.

What the codec makes of speech, in an engine: `test_qwen3_tts`.
"""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vllm_omni.model_executor.layers.mimi import MimiEncoder
from vllm_omni.model_executor.models.qwen3_tts.codec import OmniQwen3TTSCodec
from vllm_omni.model_executor.models.qwen3_tts.configuration import Qwen3TTSConfig, Qwen3TTSTokenizerConfig
from vllm_omni.model_executor.models.qwen3_tts.speaker_encoder import SpeakerEncoder

from .helpers import AUDIO_STEP, FIXTURES
from .prompts import sound

HOP = 1920
SOUND_SEED = 7
"""As in `make_fixtures`."""

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=["default", pytest.param("large", marks=pytest.mark.slow)])
def size(request: pytest.FixtureRequest) -> str:
    size: str = request.param
    return size


@pytest.fixture(scope="module")
def folder(size: str, checkpoint: Callable[[str, str], Path]) -> Path:
    return checkpoint("qwen3_tts_base", size)


@pytest.fixture(scope="module")
def expected(size: str) -> Weights:
    return load_file(FIXTURES / f"{size}.safetensors")


def read_codec(folder: Path) -> tuple[Any, Weights]:
    """The codec's configuration and weights."""
    codec = folder / "speech_tokenizer"
    return Qwen3TTSTokenizerConfig.from_pretrained(codec), load_file(codec / "model.safetensors")


def load_codec(folder: Path) -> OmniQwen3TTSCodec:
    config, weights = read_codec(folder)
    vllm_config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=config.decoder_config))
    codec = OmniQwen3TTSCodec(vllm_config=vllm_config)
    assert codec.load_weights(weights.items()) == {name for name, _ in codec.named_parameters()}
    return codec


def load_encoders(folder: Path) -> tuple[MimiEncoder, SpeakerEncoder]:
    config, weights = read_codec(folder)
    encoder = MimiEncoder(config.encoder_config, config.encoder_valid_num_quantizers)
    loaded = encoder.load(strip("encoder.", weights))
    assert loaded == {name for name, _ in encoder.named_parameters()}
    speaker_config: Any = Qwen3TTSConfig.from_pretrained(folder).speaker_encoder_config
    speakers = SpeakerEncoder(speaker_config)
    speakers.load_state_dict(strip("speaker_encoder.", load_file(folder / "model.safetensors")))
    return encoder, speakers


def strip(prefix: str, weights: Weights) -> Weights:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


@pytest.mark.parametrize("max_window", [None, 60])
@torch.inference_mode()
def test_long_speech_is_that_of_one_decode(max_window: int | None, folder: Path, expected: Weights) -> None:
    """Longer than the reference's chunks and than what any sample depends on."""
    codec = load_codec(folder)
    rest, state, waves = expected["parts/codes"].long(), dict[str, Any](), []
    rng = random.Random(0)
    while len(rest):
        length = rng.randint(1, max_window) if max_window else len(rest)
        information = {"codes": rest[:length], "state": state, "is_last": length >= len(rest)}
        rest = rest[length:]
        (made,) = codec(torch.empty(0), torch.empty(0), runtime_additional_information=[information])
        waves.append(made["audio"])
    wave = torch.cat(waves)
    assert len(wave) == HOP * len(expected["parts/codes"])
    torch.testing.assert_close(wave[::AUDIO_STEP], expected["parts/audio"], rtol=0, atol=1e-4)


def test_every_weight_of_the_quantizer_is_read(folder: Path) -> None:
    """But the projections that only training needs."""
    weights = read_codec(folder)[1]
    codec = load_codec(folder)
    before = codec.decoder.code_embedding.weight.clone()
    for name in weights:
        if name.startswith("decoder.quantizer.") and not name.endswith("input_proj.weight"):
            codec.load_weights({**weights, name: 2 * weights[name]}.items())
            assert not torch.equal(codec.decoder.code_embedding.weight, before), name


@torch.inference_mode()
def test_encoders_of_sounds(folder: Path, expected: Weights) -> None:
    """Also of sounds beyond the encoder's window, and of less than a frame."""
    encoder, speakers = load_encoders(folder)
    names = [name for name in expected if name.startswith("parts/codes of ")]
    assert len(names) == 4
    for name in names:
        seconds = name.removeprefix("parts/codes of ")
        samples, _ = sound(float(seconds), SOUND_SEED)
        assert torch.equal(encoder(samples), expected[name].long()), name
        torch.testing.assert_close(speakers(samples), expected[f"parts/vector of {seconds}"], rtol=0, atol=1e-4)
