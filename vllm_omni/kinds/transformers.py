# SPDX-License-Identifier: Apache-2.0
"""Stages that run a speech model of transformers."""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_omni.config.stage import OmniStageConfig, StageKind
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.errors import StageConfigError

if TYPE_CHECKING:
    from vllm_omni.kinds.parameters import FunctionParameters
    from vllm_omni.model_executor.speech_model import SpeechModel, SpeechSettings
    from vllm_omni.placement.memory_needs import StageNeeds
    from vllm_omni.stage.engines.base import Outbox, StageEngine
    from vllm_omni.stage.spec import RayWorkers


class Transformers(StageKind):
    """`transformers`: makes sound of a text with a class of transformers."""

    speaks_replies = True
    checkpoint_is = "a speech model of transformers"
    checkpoint_file = "config.json"

    @property
    def accepts_input(self) -> bool:
        return len(self.stage.engine_input_source) <= 1

    @cached_property
    def settings(self) -> "SpeechSettings":
        from vllm_omni.model_executor.speech_model import parse_settings

        return parse_settings(self.stage.engine_args, self.stage.label)

    @cached_property
    def _opened(self) -> "dict[str, SpeechModel]":
        return {}

    def check(self) -> None:
        self.check_output_type()
        if self.stage.final_output_type not in (None, "audio"):
            raise StageConfigError(f"{self.stage.label}: a transformers stage makes sound; set final_output_type audio")

    def known_arguments(self) -> set[str]:
        from vllm_omni.model_executor.speech_model import SPEECH_SETTINGS

        return set(SPEECH_SETTINGS)

    def check_arguments(self, model: str) -> None:
        self.open_model(self.stage.checkpoint(model))

    def with_checkpoint(self, model: str) -> OmniStageConfig:
        model = self.stage.checkpoint(model)
        engine_args = self.stage.engine_args | {"model": model}
        rate = self.open_model(model).sample_rate
        return msgspec.structs.replace(self.stage, engine_args=engine_args, sample_rate=rate)

    def open_model(self, model: str) -> "SpeechModel":
        """The stage's model, without weights.

        Raises:
            StageConfigError: The checkpoint cannot be read, or is no speech model.
        """
        from vllm_omni.model_executor.speech_model import load_speech_config, open_speech_model

        if model in self._opened:
            return self._opened[model]
        try:
            hf_config = load_speech_config(model, self.stage.engine_args)
        except (OSError, ValueError) as error:
            raise StageConfigError(f"{self.stage.label}: {model}: config.json cannot be read: {error}") from error
        return self._opened.setdefault(model, open_speech_model(model, self.settings, hf_config))

    def computed_arguments(self, model: str) -> Iterator[tuple[str, Any, str]]:
        speech = self.open_model(self.stage.checkpoint(model))
        yield "architecture", speech.model_class.__name__, "checkpoint: config.json"

    def memory_needs(self, config: PipelineConfig, model: str) -> "StageNeeds":
        import torch

        from vllm_omni.placement.memory_needs import StageNeeds

        speech = self.open_model(self.stage.checkpoint(model))
        with torch.device("meta"):
            module = speech.model_class(speech.config)
        return StageNeeds(weights=sum(tensor.nbytes for tensor in module.state_dict().values()), activations=None)

    def modules_to_preload(self, model: str) -> set[str]:
        speech = self.open_model(self.stage.checkpoint(model))
        return {"vllm_omni.stage.engines.transformers", speech.model_class.__module__}

    def load_parameters(self) -> "FunctionParameters":
        from vllm_omni.kinds.parameters import FunctionParameters

        speech = self.open_model(self.stage.engine_args["model"])  # `with_checkpoint` has set it.
        return FunctionParameters(self.stage, speech.parameters, self.stage.default_sampling_params, speech.voices)

    def make_engine(
        self, model: str, outbox: "Outbox", workers: "RayWorkers | None" = None, log_stats: bool = False
    ) -> "StageEngine":
        from vllm_omni.stage.engines.transformers import TransformersStageEngine

        return TransformersStageEngine(outbox, self.stage, self.open_model(self.stage.checkpoint(model)))
