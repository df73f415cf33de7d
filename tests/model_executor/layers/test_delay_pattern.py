# SPDX-License-Identifier: Apache-2.0
"""Delayed rows against HF's functions and logits processor, and repetition-aware sampling."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import HiggsAudioV2Processor
from transformers.models.higgs_audio_v2.generation_higgs_audio_v2 import HiggsAudioV2DelayPatternLogitsProcessor
from vllm.sampling_params import SamplingParams

from vllm_omni.model_executor.feedback import FedBackRows
from vllm_omni.model_executor.layers.delay_pattern import DelayedFrames, DelayPattern
from vllm_omni.model_executor.layers.residual_codes import ResidualFilter

CODEBOOK, NUM_CODES, HIDDEN = 10, 4, 6
START, END = CODEBOOK, CODEBOOK + 1
PATTERN = DelayPattern(NUM_CODES, START, END)
DELAY_TOKEN, SOUND_TOKEN, BEGIN_TOKEN = 1, 2, 3


@pytest.mark.parametrize("num_frames", [1, 2, 9])
def test_rows_of_a_sound(num_frames: int) -> None:
    frames = torch.randint(CODEBOOK, (num_frames, NUM_CODES))
    theirs: Any = SimpleNamespace(audio_stream_bos_id=START, audio_stream_eos_id=END)
    whole = torch.cat((torch.full((1, NUM_CODES), START), frames, torch.full((1, NUM_CODES), END)))
    expected = HiggsAudioV2Processor.build_delay_pattern(theirs, whole.T[None])[0].T
    rows = PATTERN.delay(frames)
    assert torch.equal(rows, expected)
    assert len(rows) == PATTERN.num_rows(num_frames)
    assert torch.equal(PATTERN.undelay(rows), whole)
    assert torch.equal(PATTERN.undelay(rows[1:-2]), HiggsAudioV2Processor.revert_delay_pattern(theirs, rows[1:-2]))
    assert PATTERN.undelay(rows[: NUM_CODES - 1]).shape == (0, NUM_CODES)


def make_frames(max_batch_size: int = 2) -> DelayedFrames:
    heads = nn.Linear(HIDDEN, NUM_CODES * (CODEBOOK + 2), bias=False).requires_grad_(False)
    heads.weight.normal_(generator=torch.Generator().manual_seed(0))
    return DelayedFrames(heads, PATTERN, max_batch_size, max_frames=100)


def their_rows(frames: DelayedFrames, hidden: torch.Tensor) -> list[list[int]]:
    """Greedy rows of HF's logits processor, from one state for each row."""
    processor = HiggsAudioV2DelayPatternLogitsProcessor(
        [index + 1 for index in range(NUM_CODES)], BEGIN_TOKEN, DELAY_TOKEN, START, END, NUM_CODES, CODEBOOK + 2
    )
    ids, rows = [0] * NUM_CODES + [BEGIN_TOKEN], []
    for state in hidden:
        row = processor(torch.tensor([ids]), frames._heads(state)[None]).argmax(-1)
        rows.append(row.tolist())
        ids.append(DELAY_TOKEN if END in rows[-1] or ids[-1] == DELAY_TOKEN else SOUND_TOKEN)
        if (row == END).all():
            break
    return rows


def our_rows(frames: DelayedFrames, hidden: torch.Tensor, slot: int, params: SamplingParams) -> list[list[int]]:
    frames.begin(slot, params, ResidualFilter.from_params(params))
    slots, rows = torch.tensor([slot]), []
    for index, state in enumerate(hidden):
        frames.save_hidden_states(slots, state[None])
        token = frames._heads(state)[: CODEBOOK + 2].argmax()[None]
        given = FedBackRows(token, slots, torch.tensor([index]))
        codes = frames.make(given)
        assert torch.equal(frames.read(given), codes)
        rows += codes.tolist()
        if (codes == END).all():
            break
    frames.end(slot)
    return rows


def test_rows_of_requests_are_those_of_hf() -> None:
    """Any codebook samples its end; a slot that is used again has nothing of the request before."""
    frames, lengths = make_frames(), set()
    for seed in range(30):
        hidden = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(seed))
        expected = their_rows(frames, hidden)
        assert our_rows(frames, hidden, seed % 3, SamplingParams(temperature=0)) == expected
        lengths.add(len(expected))
    assert len(lengths) > 5


LIMITS = {"ras_win_len": 5, "ras_win_max_num_repeat": 2}


def test_a_repeated_code_is_drawn_again() -> None:
    """A state that always gives the same codes, sampled almost greedily."""
    frames = make_frames()
    hidden = next(
        state
        for state in torch.randn(99, HIDDEN, generator=torch.Generator().manual_seed(0))
        if (frames._heads(state).view(NUM_CODES, -1).argmax(-1) < START).all()
    )
    same, drawn = [
        torch.tensor(our_rows(frames, hidden.expand(12, -1), 0, params))[NUM_CODES:]
        for params in (
            SamplingParams(temperature=1e-2, seed=1),
            SamplingParams(temperature=1e-2, seed=1, extra_args=LIMITS),
        )
    ]
    assert (same == same[0]).all()
    assert (drawn[:, 1:] != same[0, 1:]).any(0).all()
    again = torch.tensor(
        our_rows(frames, hidden.expand(12, -1), 1, SamplingParams(temperature=1e-2, seed=1, extra_args=LIMITS))
    )
    assert torch.equal(again[NUM_CODES:], drawn), "a seed fixes what is drawn"


@pytest.mark.parametrize("limits", [LIMITS | {"ras_win_len": 17}, LIMITS | {"ras_win_max_num_repeat": 0}])
def test_wrong_limits_are_refused(limits: dict[str, int]) -> None:
    params = SamplingParams(extra_args=limits)
    with pytest.raises(ValueError, match="ras_win_len is 1 to 16"):
        make_frames().begin(0, params, ResidualFilter())
