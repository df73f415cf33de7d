# SPDX-License-Identifier: Apache-2.0
"""The base class of stage input processors: a model's conversion of one stage's outputs to the next stage's input."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from transformers import PretrainedConfig

from vllm_omni.config.loader import input_processor_class
from vllm_omni.config.stage_config import OmniStageConfig, WindowConfig
from vllm_omni.diffusion.pipeline_info import is_diffusers_model, load_model_index
from vllm_omni.engine.hf_override import StageConfigOverride, load_hf_config
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.outputs import StageOutput


class StageInputProcessor(ABC):
    """Builds a stage's engine input from the outputs of its sources and the original request.

    One instance serves all requests of a stage, on the stage's IO thread; it keeps no state of a request
    and has no access to weights (code that needs weights belongs in the model's `preprocess`).
    """

    mm_metadata_keys: ClassVar[tuple[str, ...]] = ()
    """Multimodal fields of the first stage's prompt that `StageRequest.mm_metadata` must carry."""

    reads: ClassVar[tuple[str, ...] | None] = None
    """What it reads of its sources' outputs; nothing else is sent. Names of `StageOutput`'s fields (`prompt`,
    `prompt_token_ids`, `completions`, `tensors`, `data`), or single entries (`tensors.codes`, `data.size`).
    None: everything."""

    window: ClassVar[WindowConfig | None] = None
    """The windows of its input where the edge has a window size: `unit`, `left_context`, `right_context`,
    `first_window_size`, `window_growth`. None: it reads whole results only."""

    min_first_window_size: ClassVar[int] = 1
    """The fewest units of the first window."""

    spoken_rows: ClassVar[str | None] = None
    """If it speaks the reply of its only source: the name of the tensor with the prompt's rows and one for each token
    of the reply but the last. Then it gets what `OmniPrompt.spoken_text` says of a reply, and nothing else."""

    def __init__(self, hf_config: PretrainedConfig) -> None:
        """
        Args:
            hf_config: The checkpoint's full configuration, with the stage's `hf_overrides`; of a diffusers pipeline,
                the contents of `model_index.json`. `name_or_path` and `omni_revision` are the stage's checkpoint and
                its revision, for files beside its weights.
        """
        self.hf_config = hf_config

    @abstractmethod
    def process(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> StageInput | None:
        """
        Args:
            request: The original request, with this stage's parameters.
            sources: The complete outputs of this stage's sources, by stage id. Where an edge has a window size: the
                source's next window (see `StageOutput`). Each call has the next window of every such source that has
                not ended, and the whole output of the others.

        Returns:
            The engine input, or None for nothing to do for this request, or this window: a request with nothing to do
            at all has an empty, valid result.

        Raises:
            Exception: Fails this request alone, with this stage's name.
        """

    def validate(self, request: StageRequest) -> None:  # noqa: B027 (optional)
        """Refuses a request that `process` could not convert, as far as the request itself shows it.

        Runs in the caller's process, before the request is submitted to any stage.

        Raises:
            ValueError: The request is invalid; the message names valid values.
        """

    @property
    def voices(self) -> tuple[str, ...]:
        """The voices that a request can select (`additional_information={"speaker": ...}`), the default one first."""
        return ()

    def empty_output(self) -> dict[str, torch.Tensor]:
        """The stage's output tensors for a request with nothing to do."""
        return {}


def load_stage_input_processor(stage: OmniStageConfig, model: str) -> StageInputProcessor | None:
    """A stage's processor, which reads the same configuration as the stage's engine; None where a stage has none.

    Args:
        model: The stage's checkpoint.
    """
    processor = input_processor_class(stage)
    return None if processor is None else processor(load_stage_hf_config(stage, model))


def load_stage_hf_config(stage: OmniStageConfig, model: str) -> PretrainedConfig:
    """The full configuration that a stage's engine reads; of a diffusers pipeline the contents of `model_index.json`.

    Args:
        model: The stage's checkpoint, which the result has as `name_or_path`; with its revision as `omni_revision`.
    """
    args = stage.engine_args
    revision = args.get("revision")
    if is_diffusers_model(model, revision):
        hf_config = PretrainedConfig(**load_model_index(model, revision))
    else:
        hf_config = load_hf_config(model, args)
        StageConfigOverride(args.get("hf_config_name"), user_overrides=args.get("hf_overrides")).change_part(hf_config)
    hf_config.update({"name_or_path": model, "omni_revision": revision})
    return hf_config
