# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni's thinker against transformers, and where vLLM's own differs from it."""

import pytest
import torch
from transformers import PretrainedConfig
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerForConditionalGeneration
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.utils import set_mm_embedding_modality

from tests.model_executor.models.omni import THINKER, ThinkerTests, loaded_model
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.model_executor.models.qwen2_5_omni.stage_input_processors import MM_KEYS
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import HARD_KINDS, PROMPT_KINDS

from .helpers import Case


class TestThinker(ThinkerTests):
    tolerance = 1e-4


def features_of(engine: OmniLLMEngine, case: Case) -> list[MultiModalFeatureSpec]:
    return engine.input_processor.process_inputs("0", case.prompt, THINKER).mm_features or []


def hf_positions(oracle: HFOracle, case: Case) -> torch.Tensor:
    metadata = case.mm_metadata()
    ids = torch.tensor([case.expected.prompt_token_ids])
    positions, _ = oracle.model.thinker.get_rope_index(
        ids,
        metadata.get("image_grid_thw"),
        metadata.get("video_grid_thw"),
        torch.ones_like(ids),
        case.uses_audio_in_video,
        metadata.get("audio_feature_lengths"),
        metadata.get("second_per_grid_ts"),
    )
    return positions[:, 0].long()


@pytest.mark.parametrize("kind", [*PROMPT_KINDS, *HARD_KINDS])
def test_positions_equal_hf(kind: str, thinker_engine: OmniLLMEngine, cases: dict[str, Case], oracle: HFOracle) -> None:
    case = cases[kind]
    positions, delta = loaded_model(thinker_engine).get_mrope_input_positions(
        case.expected.prompt_token_ids, features_of(thinker_engine, case)
    )
    expected = hf_positions(oracle, case)
    assert torch.equal(positions, expected)
    assert delta == int(expected.max()) + 1 - expected.shape[1]


def test_vllm_itself_still_misplaces_audio_in_video(
    thinker_engine: OmniLLMEngine, cases: dict[str, Case], oracle: HFOracle
) -> None:
    """Once it does not, `OmniQwen2_5OmniThinker.get_mrope_input_positions` can go."""
    case = cases["audio_in_video"]
    positions, _ = Qwen2_5OmniThinkerForConditionalGeneration.get_mrope_input_positions(
        loaded_model(thinker_engine), case.expected.prompt_token_ids, features_of(thinker_engine, case)
    )
    assert not torch.equal(positions, hf_positions(oracle, case))


def test_features_have_the_fields_that_positions_need(thinker_engine: OmniLLMEngine, cases: dict[str, Case]) -> None:
    features = features_of(thinker_engine, cases["audio_in_video"])
    keys = {key for feature in features for key in feature.data or {}}
    assert keys >= set(MM_KEYS) - {"image_grid_thw"}


def test_vllm_itself_still_misplaces_the_embeddings_of_a_cut_video(
    thinker_engine: OmniLLMEngine, config: PretrainedConfig
) -> None:
    """Once it does not, `qwen_omni.thinker.in_token_order` can go."""
    thinker, model = config.thinker_config, loaded_model(thinker_engine)
    ids = torch.tensor([thinker.video_token_index, thinker.video_token_index, thinker.audio_token_index])
    rows = torch.randn(3, thinker.text_config.hidden_size)
    given = [set_mm_embedding_modality(rows[2:], "audio"), set_mm_embedding_modality(rows[:2], "video")]
    is_multimodal = torch.ones(3, dtype=torch.bool)
    assert torch.equal(model.embed_input_ids(ids, given, is_multimodal=is_multimodal), rows)
    vllm = Qwen2_5OmniThinkerForConditionalGeneration.embed_input_ids(model, ids, given, is_multimodal=is_multimodal)
    assert not torch.equal(vllm, rows)
