# SPDX-License-Identifier: Apache-2.0
"""The talker's prompt and text rows against those that HF gives its talker."""

import pytest
import torch
from transformers import PretrainedConfig

from vllm_omni.model_executor.models.qwen3_omni_moe.talker_prompt import (
    NUM_TAIL_ROWS,
    TalkerPromptBuilder,
    ThinkerRows,
)
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import HARD_KINDS, PROMPT_KINDS

from .helpers import Case


@pytest.fixture(scope="module")
def builder(oracle: HFOracle, config: PretrainedConfig) -> TalkerPromptBuilder:
    builder = TalkerPromptBuilder(config.talker_config)
    talker = oracle.model.talker
    builder.text_projection.load_state_dict(talker.text_projection.state_dict())
    builder.hidden_projection.load_state_dict(talker.hidden_projection.state_dict())
    ids = torch.tensor([config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id])
    builder.set_control_embeds(oracle.model.thinker.get_input_embeddings()(ids))
    return builder


@torch.inference_mode()
@pytest.mark.parametrize("kind", [*PROMPT_KINDS, *HARD_KINDS])
def test_prompt_and_text_rows_equal_hf(
    kind: str, builder: TalkerPromptBuilder, cases: dict[str, Case], config: PretrainedConfig, oracle: HFOracle
) -> None:
    case = cases[kind]
    stage_input = case.talker_input(config)
    rows = ThinkerRows.pop_from(stage_input.additional_information)
    prompt, text = builder(rows, oracle.model.talker.get_input_embeddings())
    theirs = case.expected.talker_inputs
    torch.testing.assert_close(prompt, theirs["inputs_embeds"][0])
    trailing = torch.cat((text, builder.tts_eos[None]))
    torch.testing.assert_close(trailing, theirs["trailing_text_hidden"][0])
    torch.testing.assert_close(builder.tts_pad, theirs["tts_pad_embed"][0, 0])
    assert prompt.shape[0] == len(stage_input.prompt_token_ids)
    assert trailing.shape[0] == len(case.expected.thinker_token_ids) - 1


def test_media_rows_take_the_other_projection(builder: TalkerPromptBuilder, config: PretrainedConfig) -> None:
    hidden = config.talker_config.thinker_hidden_size
    rows = torch.randn(5, hidden)
    made = [
        builder(
            ThinkerRows(rows, is_media, torch.randn(4, hidden), 0), torch.nn.Embedding(2000, builder.control.shape[1])
        )
        for is_media in (torch.zeros(5, dtype=torch.bool), torch.tensor([False, True, True, False, False]))
    ]
    equal = torch.isclose(made[0][0][:5], made[1][0][:5], atol=1e-4).all(-1).tolist()
    assert equal == [True, False, False, True, True]
    assert made[0][0].shape[0] == 5 + NUM_TAIL_ROWS


def test_an_error_names_missing_thinker_rows() -> None:
    with pytest.raises(KeyError, match="user_rows"):
        ThinkerRows.pop_from({"speaker_id": 1})
