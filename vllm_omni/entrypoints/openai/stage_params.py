# SPDX-License-Identifier: Apache-2.0
"""`sampling_params_list` of an HTTP request: what a client may say of each stage's sampling."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from vllm.exceptions import VLLMValidationError

from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.config.utils import nearest
from vllm_omni.entrypoints.openai.media_messages import diffusion_settings

# Not those that reach into the engine (`extra_args`, `output_kind`, ...), which are the server's to say.
SAMPLING_FIELDS = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "detokenize", "logit_bias",
        "bad_words", "allowed_token_ids", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "structured_outputs",
    }
)  # fmt: skip


def read_stage_params(
    given: Sequence[Mapping[str, Any] | None] | None, config: PipelineConfig
) -> list[Mapping[str, Any] | None]:
    """One entry for each stage, in stage order; None for a stage's defaults.

    Raises:
        VLLMValidationError: There are more or fewer, or one has a field that is not for it.
    """
    stages = config.stage_args
    if given is None:
        return [None] * len(stages)
    if len(given) != len(stages):
        names = ", ".join(stage.name for stage in stages)
        raise VLLMValidationError(
            f"sampling_params_list must have one entry for each of the {len(stages)} stages ({names}), null for a "
            "stage's defaults",
            parameter="sampling_params_list",
            value=len(given),
        )
    return [_read_entry(entry, stage, i) for i, (entry, stage) in enumerate(zip(given, stages, strict=True))]


def said_by(request: BaseModel) -> frozenset[str]:
    """The sampling parameters that a client has said by a request's own fields."""
    said = {name for name in request.model_fields_set if getattr(request, name) is not None}
    return frozenset(said | ({"max_tokens"} if "max_completion_tokens" in said else set()))


def _read_entry(entry: Mapping[str, Any] | None, stage: OmniStageConfig, index: int) -> Mapping[str, Any] | None:
    if not entry:
        return None
    if stage.kind == "DiT":
        return diffusion_settings(entry)
    if not stage.runs_vllm:
        raise VLLMValidationError(
            f"stage {stage.name!r} does not sample; give it null", parameter=f"sampling_params_list[{index}]"
        )
    for name in entry:
        if name not in SAMPLING_FIELDS:
            raise VLLMValidationError(
                f"unknown sampling parameter {name!r} for stage {stage.name!r}{nearest(name, SAMPLING_FIELDS)}",
                parameter=f"sampling_params_list[{index}].{name}",
            )
    return entry
