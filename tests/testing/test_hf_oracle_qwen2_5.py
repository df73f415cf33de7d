# SPDX-License-Identifier: Apache-2.0
"""The oracle for Qwen2.5-Omni: not degenerate, and each repair of transformers is still needed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5OmniForConditionalGeneration

from vllm_omni.testing.hf_oracle import HFOracle, OracleResult
from vllm_omni.testing.media import make_prompt
from vllm_omni.testing.oracles.qwen2_5_omni import repair_talker_inputs, repair_talker_prefill

pytestmark = pytest.mark.slow

THINKER_TOKENS, TALKER_TOKENS = 16, 16


@pytest.fixture(scope="module")
def oracle(tiny_qwen2_5_omni: Path) -> HFOracle:
    return HFOracle(tiny_qwen2_5_omni, num_threads=1)


@pytest.fixture(scope="module")
def run(oracle: HFOracle, tiny_qwen2_5_omni: Path) -> Callable[..., OracleResult]:
    def run(kind: str, seed: int = 3, **options) -> OracleResult:
        limits = {"thinker_max_tokens": THINKER_TOKENS, "talker_max_tokens": TALKER_TOKENS}
        return oracle.generate(make_prompt(tiny_qwen2_5_omni, kind, seed), **(limits | options))

    return run


@pytest.fixture(scope="module")
def answers(run: Callable[..., OracleResult]) -> dict[str, OracleResult]:
    return {kind: run(kind) for kind in ("text", "image", "audio", "mixed", "long_audio_in_video")}


def test_answers_are_not_degenerate(answers: dict[str, OracleResult]) -> None:
    for kind, answer in answers.items():
        words, codes = answer.thinker_token_ids, answer.codes[0].tolist()
        assert len(set(words)) >= min(len(words), 8), kind
        assert len(set(codes)) >= min(len(codes), 10), kind
        assert answer.audio.shape == (480 * len(codes),)
        assert 0.03 < answer.audio.std() < 0.5
        assert (answer.audio.abs() < 1).float().mean() > 0.99
    assert len({tuple(answer.thinker_token_ids) for answer in answers.values()}) == len(answers)


def test_stop_codes_are_sampled_but_not_decoded(run: Callable[..., OracleResult], oracle: HFOracle) -> None:
    config = oracle.model.config.talker_config
    ended = run("image", seed=0)

    assert ended.talker_token_ids[-1] in (config.tts_codec_pad_token_id, config.tts_codec_end_token_id)
    assert ended.codes[0].tolist() == ended.talker_token_ids[:-1]
    cut = run("text", talker_max_tokens=6, talker_min_tokens=6)
    assert cut.codes[0].tolist() == cut.talker_token_ids and len(cut.talker_token_ids) == 6


def test_states_and_talker_inputs_match(answers: dict[str, OracleResult], oracle: HFOracle) -> None:
    answer = answers["text"]
    prompt_length, thinker = len(answer.prompt_token_ids), oracle.model.thinker

    next_ids = thinker.lm_head(answer.thinker_states(-1)).argmax(-1)[prompt_length - 1 :]
    assert next_ids.tolist() == answer.thinker_token_ids
    rows = answer.thinker_states(0) + answer.thinker_states(-1)
    talker_rows = answer.talker_inputs["inputs_embeds"][0]
    torch.testing.assert_close(talker_rows[:prompt_length], rows[:prompt_length], rtol=0, atol=0)
    assert len(talker_rows) == prompt_length + 2


def test_voices_differ_and_are_case_insensitive(
    answers: dict[str, OracleResult], run: Callable[..., OracleResult]
) -> None:
    chelsie, ethan = run("text", speaker="CHELSIE"), run("text", speaker="ethan")

    assert torch.equal(chelsie.audio, answers["text"].audio)
    assert ethan.thinker_token_ids == chelsie.thinker_token_ids
    assert ethan.talker_token_ids != chelsie.talker_token_ids


def test_the_noise_of_the_wave_has_its_own_generator(
    answers: dict[str, OracleResult], run: Callable[..., OracleResult], oracle: HFOracle, monkeypatch
) -> None:
    other = run("text", wave_seed=5)
    assert torch.equal(other.codes, answers["text"].codes)
    assert not torch.equal(other.audio, answers["text"].audio)

    noise = torch.randn([1, 2 * other.codes.shape[1], 80], generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(torch, "randn", lambda shape, **_: noise.reshape(shape))
    speaker = oracle.model.speaker_map["Chelsie"]
    with torch.no_grad():
        wave = oracle.model.token2wav(other.codes, speaker["cond"], speaker["ref_mel"])
    torch.testing.assert_close(other.audio, wave, rtol=0, atol=1e-6)


@pytest.mark.parametrize("limits", [{"thinker_max_tokens": 1}, {}])
def test_no_speech_is_an_empty_wave(
    limits: dict[str, int], run: Callable[..., OracleResult], oracle: HFOracle, monkeypatch
) -> None:
    if not limits:  # a talker that ends at once
        config = oracle.model.config.talker_config
        ends = torch.zeros(config.vocab_size)
        ends[config.tts_codec_end_token_id] = 1e4
        hook = oracle.model.talker.codec_head.register_forward_hook(lambda _module, _args, logits: logits + ends)
    answer = run("text", **limits)
    if not limits:
        hook.remove()

    assert answer.audio.shape == (0,) and answer.codes.numel() == 0
    assert len(answer.thinker_token_ids) == limits.get("thinker_max_tokens", 10)


def test_repair_talker_prefill_is_still_needed(
    answers: dict[str, OracleResult], run: Callable[..., OracleResult], oracle: HFOracle
) -> None:
    talker = oracle.model.talker
    talker._forward_pre_hooks.clear()
    unrepaired = run("text")
    repair_talker_prefill(oracle.model)

    assert unrepaired.thinker_token_ids == answers["text"].thinker_token_ids
    assert unrepaired.codes.tolist() != answers["text"].codes.tolist(), "the reference no longer drops the mask"
    assert torch.equal(run("text").codes, answers["text"].codes)


def test_repair_talker_inputs_is_still_needed(tiny_qwen2_5_omni: Path) -> None:
    model = Qwen2_5OmniForConditionalGeneration.from_pretrained(tiny_qwen2_5_omni).eval()
    config = model.config.talker_config
    ids = torch.full((1, 3), config.tts_codec_mask_token_id)
    arguments = {
        "input_ids": ids,
        "input_text_ids": ids,
        "inputs_embeds": torch.zeros(1, 3, config.embedding_size),
        "thinker_reply_part": torch.zeros(1, 1, config.embedding_size),
        "pixel_values": torch.zeros(4, 1176),
        "max_new_tokens": 1,
    }
    with pytest.raises(ValueError, match="pixel_values"):
        model.talker.generate(**arguments)

    repair_talker_inputs(model)
    assert model.talker.generate(**arguments).shape == (1, 4)
