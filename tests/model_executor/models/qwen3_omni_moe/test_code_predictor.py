# SPDX-License-Identifier: Apache-2.0
"""The code predictor against HF's on the same weights, and its sampling against HF's filters."""

from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from vllm_omni.model_executor.models.qwen3_omni_moe.code_predictor import CodePredictor
from vllm_omni.model_executor.models.qwen3_omni_moe.residual_frames import (
    SAMPLING_TOP_K,
    SAMPLING_TOP_P,
    ResidualSampling,
)
from vllm_omni.testing.hf_oracle import HFOracle

BATCH = 8


class RecordLogits:
    """Replaces sampling: takes the likeliest code and keeps the logits."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def sample(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        assert step == len(self.logits)
        self.logits.append(logits.clone())
        return logits.argmax(-1)


@pytest.fixture(scope="module")
def predictor(oracle: HFOracle) -> CodePredictor:
    theirs = oracle.model.talker.code_predictor
    predictor = CodePredictor(theirs.config, max_batch_size=BATCH)
    loaded = predictor.load_weights(theirs.named_parameters())
    assert loaded == {name for name, _ in predictor.named_parameters()}
    return predictor


@pytest.fixture(scope="module")
def inputs(config: PretrainedConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and first embeddings, each `[BATCH, hidden]`."""
    torch.manual_seed(0)
    hidden = config.talker_config.code_predictor_config.hidden_size
    return torch.randn(BATCH, hidden), 0.5 * torch.randn(BATCH, hidden)


@torch.inference_mode()
def run_hf(oracle: HFOracle, inputs: tuple[torch.Tensor, torch.Tensor]) -> Any:
    theirs = oracle.model.talker.code_predictor
    return theirs.generate(
        inputs_embeds=torch.stack(inputs, dim=1),
        max_new_tokens=theirs.config.num_code_groups - 1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


@torch.inference_mode()
def test_greedy_codes_and_logits_equal_hf(predictor: CodePredictor, inputs: Any, oracle: HFOracle) -> None:
    expected = run_hf(oracle, inputs)
    recorder = RecordLogits()
    recorded = predictor(*inputs, recorder)
    assert torch.equal(recorded.codes, expected.sequences)
    assert torch.equal(predictor(*inputs).codes, expected.sequences)
    for ours, theirs in zip(recorder.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_a_row_alone_equals_the_row_in_a_batch(predictor: CodePredictor, inputs: Any) -> None:
    batch = predictor(*inputs)
    for row in range(BATCH):
        alone = predictor(*(tensor[row : row + 1] for tensor in inputs))
        assert torch.equal(alone.codes[0], batch.codes[row])
        torch.testing.assert_close(alone.embeds[0], batch.embeds[row])


@torch.inference_mode()
def test_embeds_are_the_sum_of_the_codes_embeddings(predictor: CodePredictor, inputs: Any, oracle: HFOracle) -> None:
    frame = predictor(*inputs)
    tables = oracle.model.talker.code_predictor.get_input_embeddings()
    expected = sum(table(codes) for table, codes in zip(tables, frame.codes.T, strict=True))
    torch.testing.assert_close(frame.embeds, expected)
    assert torch.equal(predictor.embed_codes(frame.codes), frame.embeds)  # a replay is exact


def exponential_noise(batch: int, steps: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(batch, steps, SAMPLING_TOP_K).exponential_(generator=generator)


def test_sampling_draws_from_hf_s_filtered_distribution() -> None:
    draws = 20_000
    logits = 2.0 * torch.randn(1, 128, generator=torch.Generator().manual_seed(1))
    filtered = TopPLogitsWarper(SAMPLING_TOP_P)(None, TopKLogitsWarper(SAMPLING_TOP_K)(None, logits.clone()))
    expected = filtered.softmax(-1)[0]
    sampling = ResidualSampling(top_p=torch.full((draws, 1), SAMPLING_TOP_P), noise=exponential_noise(draws, 1))
    drawn = sampling.sample(logits.expand(draws, -1), 0).bincount(minlength=128) / draws
    assert ((drawn > 0) <= (expected > 0)).all()
    assert (expected > 0).sum() > 5
    torch.testing.assert_close(drawn, expected, rtol=0, atol=0.015)


@torch.inference_mode()
def test_greedy_rows_stay_greedy_among_sampled_ones(predictor: CodePredictor, inputs: Any) -> None:
    top_p = torch.tensor([[0.0], [SAMPLING_TOP_P]] * (BATCH // 2))
    greedy = predictor(*inputs).codes
    mixed = predictor(*inputs, ResidualSampling(top_p, exponential_noise(BATCH, predictor.num_steps))).codes
    assert torch.equal(mixed[::2], greedy[::2])
    assert not torch.equal(mixed[1::2], greedy[1::2])


def test_a_codebook_smaller_than_top_k_can_be_sampled() -> None:
    sampling = ResidualSampling(top_p=torch.full((3, 1), SAMPLING_TOP_P), noise=exponential_noise(3, 1))
    assert sampling.sample(torch.randn(3, 8), 0).max() < 8


def test_unsupported_attention_is_refused(config: PretrainedConfig) -> None:
    biased = type(config.talker_config.code_predictor_config)(attention_bias=True)
    with pytest.raises(ValueError, match="attention biases"):
        CodePredictor(biased, max_batch_size=1)
