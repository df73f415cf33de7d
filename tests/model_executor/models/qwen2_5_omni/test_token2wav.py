# SPDX-License-Identifier: Apache-2.0
"""The vocoder against HF's, request by request, whatever else is in the batch; whole and in windows."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from tests.model_executor.models.peak_memory import PeakMemory
from vllm_omni.model_executor.models.qwen2_5_omni import token2wav_bigvgan
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav import MAX_BATCH_FRAMES, OmniQwen2_5OmniToken2Wav
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav_bigvgan import ActivatedConv, Activation, BigVGAN
from vllm_omni.testing.hf_oracle import HFOracle

SAMPLES_PER_CODE = 480
BLOCK_CODES = 12
SPEAKERS = ["chelsie", "ethan", "aiden"]
LENGTHS = [1, 30, 0, 12, 61, 13]
NO_IDS = torch.empty(0)

Info = dict[str, Any]


@pytest.fixture(scope="module")
def vocoder(tiny_qwen2_5_omni: Path, oracle: HFOracle, config: PretrainedConfig) -> OmniQwen2_5OmniToken2Wav:
    model_config = SimpleNamespace(hf_config=config.token2wav_config, model=str(tiny_qwen2_5_omni), revision=None)
    vllm_config: Any = SimpleNamespace(model_config=model_config)
    vocoder = OmniQwen2_5OmniToken2Wav(vllm_config=vllm_config)
    loaded = vocoder.load_weights((name, p.detach().clone()) for name, p in oracle.model.named_parameters())
    assert loaded == {name for name, _ in vocoder.named_parameters()}
    return vocoder


def make_codes(length: int) -> torch.Tensor:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(length))


def make_info(codes: torch.Tensor, seed: int | None = 0, speaker: str = "chelsie", is_last: bool = True) -> Info:
    info: Info = {"codes": codes, "speaker": speaker, "is_last": is_last, "state": {}}
    return info if seed is None else info | {"seed": seed}


@torch.inference_mode()
def run(vocoder: OmniQwen2_5OmniToken2Wav, infos: list[Info]) -> list[torch.Tensor]:
    """One step."""
    return [output["audio"] for output in vocoder(NO_IDS, NO_IDS, runtime_additional_information=infos)]


@torch.inference_mode()
def run_hf(oracle: HFOracle, codes: torch.Tensor, seed: int, speaker: str) -> torch.Tensor:
    voice = next(value for name, value in oracle.model.speaker_map.items() if name.lower() == speaker)
    torch.manual_seed(seed)
    return oracle.model.token2wav(codes[None], conditioning=voice["cond"], reference_mel=voice["ref_mel"])


def cut(codes: torch.Tensor, sizes: list[int], seed: int = 0, speaker: str = "chelsie") -> Iterator[Info]:
    """One request's windows; the last of `sizes` applies to all further ones."""
    state: Info = {}
    start = 0
    while start < codes.shape[0]:
        size = sizes[0] if len(sizes) == 1 else sizes.pop(0)
        is_last = start + size >= codes.shape[0]
        yield make_info(codes[start : start + size], seed, speaker, is_last) | {"state": state}
        start += size


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("max_batch_frames", [1, 10_000])
def test_every_request_of_a_batch_equals_hf(
    max_batch_frames: int, vocoder: OmniQwen2_5OmniToken2Wav, oracle: HFOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocoder, "max_batch_frames", max_batch_frames)
    requests = [(make_codes(length), seed, SPEAKERS[seed % 3]) for seed, length in enumerate(LENGTHS)]
    waves = run(vocoder, [make_info(*request) for request in requests])
    for (codes, seed, speaker), wave in zip(requests, waves, strict=True):
        assert wave.dtype == torch.float32
        assert wave.shape == (SAMPLES_PER_CODE * codes.shape[0],)
        if codes.numel():
            torch.testing.assert_close(wave, run_hf(oracle, codes, seed, speaker), rtol=0, atol=1e-5)


def test_only_a_seed_repeats_the_noise(vocoder: OmniQwen2_5OmniToken2Wav) -> None:
    codes = make_codes(5)
    first, second, seeded, again = run(vocoder, [make_info(codes, seed) for seed in (None, None, 7, 7)])
    assert torch.equal(seeded, again)
    assert rms(first - second) > 0.01 < rms(first - seeded)


@pytest.mark.parametrize("sizes", [[12], [48, 96], [41]])
def test_joined_windows_nearly_equal_the_whole(sizes: list[int], vocoder: OmniQwen2_5OmniToken2Wav) -> None:
    """The bounds are a little above the measured values; without held back blocks the test fails."""
    codes = make_codes(150)
    (whole,) = run(vocoder, [make_info(codes)])
    joined = torch.cat([run(vocoder, [window])[0] for window in cut(codes, sizes.copy())])
    assert joined.shape == whole.shape
    assert rms(joined - whole) < 2e-3 * rms(whole)
    assert (joined - whole).abs().max() < 5e-2 * rms(whole)


def test_the_first_window_gives_audio_and_the_next_one_continues(vocoder: OmniQwen2_5OmniToken2Wav) -> None:
    """One block is held back."""
    sizes = [run(vocoder, [window])[0].shape[0] for window in cut(make_codes(100), [40])]
    assert sizes == [codes * SAMPLES_PER_CODE for codes in (2 * BLOCK_CODES, 3 * BLOCK_CODES, 100 - 5 * BLOCK_CODES)]


def test_less_than_a_block_is_kept_for_the_next_window(vocoder: OmniQwen2_5OmniToken2Wav) -> None:
    parts = [run(vocoder, [window])[0] for window in cut(make_codes(30), [15])]
    assert parts[0].shape == (0,)
    torch.testing.assert_close(parts[1], run(vocoder, [make_info(make_codes(30))])[0], rtol=0, atol=1e-5)


def test_windows_join_without_a_jump(vocoder: OmniQwen2_5OmniToken2Wav) -> None:
    """The difference of samples at the borders of windows equals that of the whole wave."""
    codes = make_codes(150)
    (whole,) = run(vocoder, [make_info(codes)])
    parts = [run(vocoder, [window])[0] for window in cut(codes, [40])]
    seams = torch.tensor([part.shape[0] for part in parts[:-1]]).cumsum(0)
    jumps = torch.cat(parts).diff()[seams - 1] - whole.diff()[seams - 1]
    assert jumps.abs().max() < 1e-2 * rms(whole.diff())


def test_windows_of_several_requests_in_one_step_equal_those_of_each_alone(vocoder: OmniQwen2_5OmniToken2Wav) -> None:
    def windows() -> list[list[Info]]:
        return [list(cut(make_codes(80 + n), [45 - n], seed=n, speaker=SPEAKERS[n])) for n in range(3)]

    alone = [torch.cat([run(vocoder, [window])[0] for window in request]) for request in windows()]
    steps = [run(vocoder, list(step)) for step in zip(*windows(), strict=True)]
    for index, expected in enumerate(alone):
        torch.testing.assert_close(torch.cat([step[index] for step in steps]), expected, rtol=0, atol=1e-5)


def test_an_empty_last_window_returns_the_held_back_audio(vocoder: OmniQwen2_5OmniToken2Wav) -> None:
    codes = make_codes(40)
    window = make_info(codes, is_last=False)
    parts = [*run(vocoder, [window])]
    parts += run(vocoder, [make_info(codes[:0]) | {"state": window["state"]}])
    (whole,) = run(vocoder, [make_info(codes)])
    assert all(part.numel() for part in parts)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-4)


def test_a_step_that_fails_can_run_again(vocoder: OmniQwen2_5OmniToken2Wav, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = cut(make_codes(70), [40])
    run(vocoder, [first])
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lost"):
        patch.setattr(vocoder.bigvgan, "decode", lambda mels: (_ for _ in ()).throw(RuntimeError("lost")))
        run(vocoder, [second])
    again = run(vocoder, [second])[0]
    first, second = cut(make_codes(70), [40])
    run(vocoder, [first])
    assert torch.equal(again, run(vocoder, [second])[0])


@torch.inference_mode()
def test_a_device_without_the_fast_layers_makes_the_same_wave(
    vocoder: OmniQwen2_5OmniToken2Wav, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        token2wav_bigvgan, "make_activated_conv", lambda act, conv: ActivatedConv(Activation(act), conv)
    )
    plain = BigVGAN(vocoder.token2wav.code2wav_bigvgan_model)
    mels = [torch.randn(frames, 80) - 4 for frames in (2, 50, 9)]
    for wave, expected in zip(plain.decode(mels), vocoder.bigvgan.decode(mels), strict=True):
        torch.testing.assert_close(wave, expected, rtol=0, atol=1e-5)


def test_activations_take_no_more_than_is_declared(vocoder: OmniQwen2_5OmniToken2Wav, monkeypatch) -> None:
    monkeypatch.setattr(vocoder, "max_batch_frames", MAX_BATCH_FRAMES)  # as on an accelerator
    with PeakMemory() as memory:
        run(vocoder, [make_info(make_codes(100)), make_info(make_codes(60))])
    assert memory.peak <= vocoder.activation_bytes(160) <= 3 * memory.peak
    assert vocoder.activation_bytes(10**9) == vocoder.activation_bytes(MAX_BATCH_FRAMES)
