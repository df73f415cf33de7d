# SPDX-License-Identifier: Apache-2.0
"""The vocoder against HF's decode of all frames at once, however a request is cut and whatever else is in the batch."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from tests.model_executor.models.peak_memory import PeakMemory
from vllm_omni.model_executor.layers.causal_vocoder import group_by_length
from vllm_omni.model_executor.layers.vocoder import MAX_BATCH_FRAMES, piece_length
from vllm_omni.model_executor.models.qwen3_omni_moe.code2wav import OmniQwen3OmniMoeCode2Wav
from vllm_omni.testing.hf_oracle import HFOracle

LENGTHS = [1, 2, 40, 0, 45, 333]


@pytest.fixture(scope="module")
def model(oracle: HFOracle, config: PretrainedConfig) -> OmniQwen3OmniMoeCode2Wav:
    vllm_config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=config.code2wav_config))
    model = OmniQwen3OmniMoeCode2Wav(vllm_config=vllm_config)
    loaded = model.load_weights(oracle.model.named_parameters())
    assert loaded == {name for name, _ in model.named_parameters()}
    return model


@pytest.fixture
def vocoder(model: OmniQwen3OmniMoeCode2Wav, monkeypatch: pytest.MonkeyPatch) -> OmniQwen3OmniMoeCode2Wav:
    monkeypatch.setattr(model, "max_batch_frames", 64)
    return model


@pytest.fixture(scope="module")
def all_codes(config: PretrainedConfig) -> list[torch.Tensor]:
    """`[length, num_code_groups]` for each of `LENGTHS`."""
    sizes = config.code2wav_config
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(sizes.codebook_size, (length, sizes.num_quantizers), generator=generator) for length in LENGTHS
    ]


@pytest.fixture(scope="module")
def waves(oracle: HFOracle, all_codes: list[torch.Tensor]) -> list[torch.Tensor]:
    """One decode of all frames of each."""
    with torch.inference_mode():
        return [oracle.model.code2wav(c.T[None])[0, 0] if len(c) else torch.empty(0) for c in all_codes]


@torch.inference_mode()
def run(vocoder: OmniQwen3OmniMoeCode2Wav, information: list[dict[str, Any]]) -> list[torch.Tensor]:
    """One step."""
    ids = torch.empty(0)
    return [output["audio"] for output in vocoder(ids, ids, runtime_additional_information=information)]


def window(codes: torch.Tensor, state: dict[str, Any] | None = None, is_last: bool = False) -> dict[str, Any]:
    """A window of a request, or a whole request."""
    return {"codes": codes, "state": {} if state is None else state, "is_last": is_last or state is None}


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32 and a.shape == e.shape
        torch.testing.assert_close(a, e, rtol=0, atol=1e-4)


@pytest.mark.parametrize("max_batch_frames", [pytest.param(5, marks=pytest.mark.slow), 64, 10_000])
def test_every_request_of_a_batch_equals_hf(
    max_batch_frames: int,
    vocoder: OmniQwen3OmniMoeCode2Wav,
    all_codes: list[torch.Tensor],
    waves: list[torch.Tensor],
) -> None:
    vocoder.max_batch_frames = max_batch_frames
    assert_close(run(vocoder, [window(codes) for codes in all_codes]), waves)


def cut(size: int | None, length: int, rng: random.Random) -> list[tuple[int, int]]:
    """Windows `[start, stop)` of this size, or of random ones, some of them empty."""
    stops = [0]
    while stops[-1] < length:
        stops.append(min(length, stops[-1] + (rng.randint(0, 40) if size is None else size)))
    return list(itertools.pairwise(stops))


@pytest.mark.parametrize("size", [7, None, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 3, 25, 64))])
def test_windows_in_any_batch_equal_the_whole(
    size: int | None, vocoder: OmniQwen3OmniMoeCode2Wav, all_codes: list[torch.Tensor], waves: list[torch.Tensor]
) -> None:
    """Requests start and end in different steps, and are at different positions in each."""
    rng = random.Random(size or 0)
    windows = [cut(size, len(codes), rng) for codes in all_codes]
    states: list[dict[str, Any]] = [{} for _ in all_codes]
    pieces: list[list[torch.Tensor]] = [[torch.empty(0)] for _ in all_codes]
    while any(windows):
        batch = [i for i, waiting in enumerate(windows) if waiting and rng.random() < 0.7]
        step = []
        for i in batch:
            start, stop = windows[i].pop(0)
            step.append(window(all_codes[i][start:stop], states[i], is_last=not windows[i]))
        for i, audio in zip(batch, run(vocoder, step), strict=True):
            pieces[i].append(audio)
    assert_close([torch.cat(parts) for parts in pieces], waves)


def test_every_window_gives_the_samples_of_its_frames(
    vocoder: OmniQwen3OmniMoeCode2Wav, all_codes: list[torch.Tensor]
) -> None:
    """Nothing is held back, so a last window without frames gives no samples."""
    state: dict[str, Any] = {}
    codes = all_codes[-1]
    sizes = [len(run(vocoder, [window(codes[start:stop], state)])[0]) for start, stop in [(0, 1), (1, 5), (5, 5)]]
    assert sizes == [1920 - 555, 4 * 1920, 0]
    assert vocoder.num_samples(100) == 100 * 1920 - 555
    (nothing,) = run(vocoder, [window(codes[:0], state, is_last=True)])
    assert nothing.shape == (0,)


def test_an_empty_first_window_leaves_the_initial_state(
    vocoder: OmniQwen3OmniMoeCode2Wav, all_codes: list[torch.Tensor], waves: list[torch.Tensor]
) -> None:
    state: dict[str, Any] = {}
    run(vocoder, [window(all_codes[2][:0], state)])
    assert_close(run(vocoder, [window(all_codes[2], state, is_last=True)]), [waves[2]])


def test_a_step_that_raises_changes_no_state(
    vocoder: OmniQwen3OmniMoeCode2Wav,
    all_codes: list[torch.Tensor],
    waves: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them fails in its second batch, when the other one's window has been decoded."""
    a, b = all_codes[2], all_codes[4]
    states: list[dict[str, Any]] = [{}, {}]
    first = run(vocoder, [window(a[:20], states[0]), window(b[:3], states[1])])
    second = [window(a[20:], states[0]), window(b[3:], states[1])]
    decode, batches = vocoder._decode, iter([True, False])

    def failing(*args: Any) -> None:
        if not next(batches):
            raise RuntimeError("no more memory")
        decode(*args)

    with monkeypatch.context() as patch:
        patch.setattr(vocoder, "_decode", failing)
        with pytest.raises(RuntimeError, match="no more memory"):
            run(vocoder, second)
    rest = run(vocoder, second)
    assert_close([torch.cat(parts) for parts in zip(first, rest, strict=True)], [waves[2], waves[4]])


def test_a_state_holds_no_memory_of_its_batch(vocoder: OmniQwen3OmniMoeCode2Wav, all_codes: list[torch.Tensor]) -> None:
    states: list[dict[str, Any]] = [{} for _ in range(4)]
    run(vocoder, [window(all_codes[-1][:4], state) for state in states])
    for state in states:
        assert state["state"].untyped_storage().nbytes() == state["state"].nbytes


def test_pieces_of_a_window_are_of_a_length() -> None:
    assert [piece_length(n, 64) for n in (1, 64, 65, 100, 129)] == [1, 64, 33, 50, 43]


def test_batches_hold_every_piece_once_and_little_padding() -> None:
    lengths = [5, 300, 41, 299, 38, 5, 40, 325, 6]
    batches = list(group_by_length(lengths, max_frames=700))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        sizes = [lengths[index] for index in batch]
        assert max(sizes) * len(sizes) <= 700
        assert min(sizes) >= 0.8 * max(sizes)
    assert len(batches) == 4


def test_activations_take_no_more_than_is_declared(
    model: OmniQwen3OmniMoeCode2Wav, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "max_batch_frames", MAX_BATCH_FRAMES)  # as on an accelerator
    sizes = model.config
    infos: list[dict[str, Any]] = [
        {"codes": torch.randint(sizes.codebook_size, (50, sizes.num_quantizers)), "state": {}, "is_last": False}
        for _ in range(8)
    ]
    with torch.inference_mode(), PeakMemory() as memory:
        model(torch.empty(0), torch.empty(0), runtime_additional_information=infos)
    assert memory.peak <= model.activation_bytes(8 * 50) <= 3 * memory.peak
    assert model.activation_bytes(10**9) == model.activation_bytes(MAX_BATCH_FRAMES)
