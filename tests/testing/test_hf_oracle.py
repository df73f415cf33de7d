# SPDX-License-Identifier: Apache-2.0
"""The oracles for Qwen3-Omni and for text: not degenerate. Tests of the models show that vLLM's thinkers equal them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_omni.testing.hf_oracle import HFOracle, HFTextOracle, OracleResult
from vllm_omni.testing.media import PROMPT_KINDS, make_prompt

pytestmark = pytest.mark.slow

THINKER_TOKENS, TALKER_TOKENS = 24, 24


@pytest.fixture(scope="module")
def oracle(tiny_qwen3_omni_moe: Path) -> HFOracle:
    return HFOracle(tiny_qwen3_omni_moe, num_threads=1)


@pytest.fixture(scope="module")
def answers(oracle: HFOracle, tiny_qwen3_omni_moe: Path) -> dict[str, OracleResult]:
    return {
        kind: oracle.generate(
            make_prompt(tiny_qwen3_omni_moe, kind),
            thinker_max_tokens=THINKER_TOKENS,
            talker_max_tokens=TALKER_TOKENS,
        )
        for kind in PROMPT_KINDS
    }


@pytest.mark.parametrize("kind", PROMPT_KINDS)
def test_answers_are_not_degenerate(kind: str, answers: dict[str, OracleResult]) -> None:
    answer = answers[kind]

    words, frames = answer.thinker_token_ids, answer.codes.shape[1]
    assert len(set(words)) >= min(len(words), 8)
    assert all(len(set(group.tolist())) >= min(frames, 12) for group in answer.codes)
    assert answer.codes[0].tolist() == answer.talker_token_ids[:frames]
    assert 0.05 < answer.audio.std() < 0.5
    assert (answer.audio.abs() < 1).float().mean() > 0.99


def test_answers_differ_and_end_by_stop_or_length(answers: dict[str, OracleResult], oracle: HFOracle) -> None:
    replies = [answer.thinker_token_ids for answer in answers.values()]

    assert len({tuple(reply) for reply in replies}) == len(replies)
    ended = [reply[-1] == oracle.model.config.im_end_token_id for reply in replies]
    assert any(ended) and not all(ended)


def test_states_and_talker_inputs_match(answers: dict[str, OracleResult], oracle: HFOracle) -> None:
    answer = answers["text"]
    rows = len(answer.prompt_token_ids) + len(answer.thinker_token_ids) - 1
    thinker = oracle.model.thinker

    ids = torch.tensor(answer.prompt_token_ids + answer.thinker_token_ids[:-1])
    torch.testing.assert_close(answer.thinker_states(0), thinker.get_input_embeddings()(ids), rtol=0, atol=0)
    assert answer.thinker_states(2).shape == (rows, thinker.config.text_config.hidden_size)
    next_ids = thinker.lm_head(answer.thinker_states(-1)).argmax(-1)[len(answer.prompt_token_ids) - 1 :]
    assert next_ids.tolist() == answer.thinker_token_ids
    assert answer.talker_inputs["trailing_text_hidden"].shape[1] == len(answer.thinker_token_ids) - 1


def test_runs_are_reproducible(answers: dict[str, OracleResult], oracle: HFOracle, tiny_qwen3_omni_moe: Path) -> None:
    again = oracle.generate(
        make_prompt(tiny_qwen3_omni_moe, "audio"), thinker_max_tokens=THINKER_TOKENS, talker_max_tokens=TALKER_TOKENS
    )

    assert again.thinker_token_ids == answers["audio"].thinker_token_ids
    assert torch.equal(again.codes, answers["audio"].codes)
    torch.testing.assert_close(again.audio, answers["audio"].audio, rtol=0, atol=1e-5)


@pytest.mark.parametrize("thinker_tokens, talker_tokens", [(1, 8), (8, 1)])
def test_no_speech_is_an_empty_wave(
    thinker_tokens: int, talker_tokens: int, oracle: HFOracle, tiny_qwen3_omni_moe: Path
) -> None:
    answer = oracle.generate(
        make_prompt(tiny_qwen3_omni_moe, "text"), thinker_max_tokens=thinker_tokens, talker_max_tokens=talker_tokens
    )

    assert len(answer.thinker_token_ids) == thinker_tokens
    assert answer.audio.shape == (0,) and answer.codes.numel() == 0


def test_lengths_can_be_fixed(oracle: HFOracle, tiny_qwen3_omni_moe: Path) -> None:
    answer = oracle.generate(
        make_prompt(tiny_qwen3_omni_moe, "image"),
        thinker_min_tokens=12,
        thinker_max_tokens=12,
        talker_min_tokens=40,
        talker_max_tokens=40,
    )

    assert len(answer.thinker_token_ids) == 12
    assert answer.codes.shape[1] == 39


def test_repair_talker_config_is_still_needed(oracle: HFOracle, tiny_qwen3_omni_moe: Path) -> None:
    def codes() -> torch.Tensor:
        prompt = make_prompt(tiny_qwen3_omni_moe, "mixed", seed=3)
        return oracle.generate(prompt, thinker_max_tokens=4, talker_max_tokens=4).codes

    assert codes().shape == (4, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(oracle.model.talker.config, "audio_config")
        with pytest.raises(AttributeError, match="audio_config"):
            codes()


def test_repair_long_waves_is_still_needed(oracle: HFOracle) -> None:
    vocoder = oracle.model.code2wav
    codes = torch.randint(0, vocoder.config.codebook_size, (1, 4, 310), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        repaired = vocoder.chunked_decode(codes, chunk_size=300, left_context_size=25)
        as_shipped = type(vocoder).chunked_decode(vocoder, codes, chunk_size=300, left_context_size=25)

    assert repaired.shape[-1] == 310 * 1920 - 555
    assert as_shipped.shape[-1] == 310 * 1920 - 2 * 555, "the reference no longer loses samples at its seams"
    before_the_seam = 300 * 1920 - 555
    torch.testing.assert_close(repaired[..., :before_the_seam], as_shipped[..., :before_the_seam], rtol=0, atol=1e-4)


def test_another_sampling_rate_is_refused(oracle: HFOracle, tiny_qwen3_omni_moe: Path) -> None:
    prompt = make_prompt(tiny_qwen3_omni_moe, "audio")
    prompt["multi_modal_data"] = {"audio": [(np.zeros(800, np.float32), 8000)]}
    with pytest.raises(ValueError, match="8000 Hz"):
        oracle.generate(prompt, thinker_max_tokens=2, talker_max_tokens=2)


def test_the_text_oracle_gives_tokens_and_normed_states(tiny_qwen3: Path) -> None:
    oracle = HFTextOracle(tiny_qwen3, num_threads=1)
    answer = oracle.generate("The sea is", max_tokens=12)

    assert answer.hidden_states.shape == (len(answer.prompt_token_ids) + len(answer.token_ids) - 1, 128)
    next_ids = oracle.model.lm_head(answer.hidden_states).argmax(-1)[len(answer.prompt_token_ids) - 1 :]
    assert next_ids.tolist() == answer.token_ids
    assert oracle.generate(answer.prompt_token_ids, max_tokens=12).token_ids == answer.token_ids
    assert len(set(answer.token_ids)) > 4
