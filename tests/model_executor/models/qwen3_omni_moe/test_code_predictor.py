# SPDX-License-Identifier: Apache-2.0
"""The depth decoder with a talker's weights against HF's code predictor."""

from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from vllm_omni.model_executor.layers.depth_decoder import DepthDecoder
from vllm_omni.model_executor.layers.residual_codes import GREEDY, MAX_TOP_K, ResidualSampling
from vllm_omni.model_executor.models.qwen3_omni_moe.talker import RESIDUAL_FILTER
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
def predictor(oracle: HFOracle) -> DepthDecoder:
    theirs = oracle.model.talker.code_predictor
    predictor = DepthDecoder(theirs.config, theirs.config.num_code_groups, max_batch_size=BATCH)
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
def test_greedy_codes_and_logits_equal_hf(predictor: DepthDecoder, inputs: Any, oracle: HFOracle) -> None:
    expected = run_hf(oracle, inputs)
    recorder = RecordLogits()
    recorded = predictor(*inputs, recorder)
    assert torch.equal(recorded.codes, expected.sequences)
    assert torch.equal(predictor(*inputs).codes, expected.sequences)
    for ours, theirs in zip(recorder.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_a_row_alone_equals_the_row_in_a_batch(predictor: DepthDecoder, inputs: Any) -> None:
    batch = predictor(*inputs)
    for row in range(BATCH):
        alone = predictor(*(tensor[row : row + 1] for tensor in inputs))
        assert torch.equal(alone.codes[0], batch.codes[row])
        torch.testing.assert_close(alone.embeds[0], batch.embeds[row])


@torch.inference_mode()
def test_embeds_are_the_sum_of_the_codes_embeddings(predictor: DepthDecoder, inputs: Any, oracle: HFOracle) -> None:
    frame = predictor(*inputs)
    tables = oracle.model.talker.code_predictor.get_input_embeddings()
    expected = sum(table(codes) for table, codes in zip(tables, frame.codes.T, strict=True))
    torch.testing.assert_close(frame.embeds, expected)
    assert torch.equal(predictor.embed_codes(frame.codes), frame.embeds)  # a replay is exact


@torch.inference_mode()
def test_greedy_rows_stay_greedy_among_sampled_ones(predictor: DepthDecoder, inputs: Any) -> None:
    filters = torch.tensor([GREEDY, RESIDUAL_FILTER] * (BATCH // 2))
    noise = torch.empty(BATCH, predictor.num_steps, MAX_TOP_K).exponential_(generator=torch.Generator().manual_seed(0))
    greedy = predictor(*inputs).codes
    mixed = predictor(*inputs, ResidualSampling(filters, noise)).codes
    assert torch.equal(mixed[::2], greedy[::2])
    assert not torch.equal(mixed[1::2], greedy[1::2])


def test_unsupported_attention_is_refused(config: PretrainedConfig) -> None:
    biased = type(config.talker_config.code_predictor_config)(attention_bias=True)
    with pytest.raises(ValueError, match="no biases"):
        DepthDecoder(biased, 4, max_batch_size=1)
