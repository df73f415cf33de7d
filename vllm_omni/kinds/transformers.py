# SPDX-License-Identifier: Apache-2.0
"""Stages that run a model of transformers that speaks or transcribes."""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_omni.config.stage import OmniStageConfig, StageKind
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.config.utils import parse_engine_args
from vllm_omni.errors import StageConfigError

if TYPE_CHECKING:
    from vllm_omni.kinds.parameters import FunctionParameters
    from vllm_omni.model_executor.speech_model import SpeechModel
    from vllm_omni.model_executor.transcription_model import TranscriptionModel
    from vllm_omni.model_executor.transformers_model import TransformersSettings
    from vllm_omni.placement.memory_needs import StageNeeds
    from vllm_omni.stage.engines.base import Outbox, StageEngine
    from vllm_omni.stage.spec import RayWorkers


class Transformers(StageKind):
    """`transformers`: makes sound of a text with a class of transformers."""

    makes = "audio"
    speaks_replies = True
    checkpoint_is = "a speech model of transformers"
    checkpoint_file = "config.json"

    @classmethod
    def of(cls, name: str, stage: OmniStageConfig) -> StageKind:
        if stage.accepts == "audio":
            hearing = SpeechToSpeechTransformers if stage.final_output_type == "audio" else TranscribingTransformers
            return hearing(name, stage)
        return cls(name, stage)

    @property
    def accepts_input(self) -> bool:
        return self.stage.accepts != "image" and len(self.stage.engine_input_source) <= 1

    @cached_property
    def settings(self) -> "TransformersSettings":
        from vllm_omni.model_executor.transformers_model import TransformersSettings

        where = f"{self.stage.label}: engine_args"
        return parse_engine_args(self.stage.engine_args, TransformersSettings, where, "transformers")

    @cached_property
    def _opened(self) -> "dict[str, SpeechModel | TranscriptionModel]":
        return {}

    def check(self) -> None:
        self.check_output_type()
        if self.stage.final_output_type not in (None, self.makes):
            raise StageConfigError(
                f"{self.stage.label}: final_output_type: this stage makes {self.makes}; a transformers stage makes "
                "audio of a text, or, with accepts: audio, text or audio of a sound"
            )

    def known_arguments(self) -> set[str]:
        from vllm_omni.model_executor.transformers_model import TRANSFORMERS_SETTINGS

        return set(TRANSFORMERS_SETTINGS)

    def check_arguments(self, model: str) -> None:
        super().check_arguments(model)
        self.open_model(self.stage.checkpoint(model))

    def with_checkpoint(self, model: str) -> OmniStageConfig:
        model = self.stage.checkpoint(model)
        engine_args = self.stage.engine_args | {"model": model}
        return msgspec.structs.replace(self.stage, engine_args=engine_args, sample_rate=self.output_rate(model))

    def output_rate(self, model: str) -> int | None:
        """Samples per second of its sounds. Raises as `open_model`."""
        speech: Any = self.open_model(model)
        return speech.sample_rate

    def open_model(self, model: str) -> "SpeechModel | TranscriptionModel":
        """The stage's model, without weights.

        Raises:
            StageConfigError: The checkpoint cannot be read, or its class does not do what the stage does.
        """
        from vllm_omni.model_executor.transformers_model import load_config

        if model in self._opened:
            return self._opened[model]
        try:
            hf_config = load_config(model, self.stage.engine_args)
        except (OSError, ValueError) as error:
            raise StageConfigError(f"{self.stage.label}: {model}: config.json cannot be read: {error}") from error
        return self._opened.setdefault(model, self.open_with(model, hf_config))

    def open_with(self, model: str, hf_config: Any) -> "SpeechModel | TranscriptionModel":
        """The stage's model, of a checkpoint with this configuration. Raises as `open_model`."""
        from vllm_omni.model_executor.speech_model import open_speech_model

        return open_speech_model(model, self.settings, hf_config)

    def computed_arguments(self, model: str) -> Iterator[tuple[str, Any, str]]:
        opened = self.open_model(self.stage.checkpoint(model))
        yield "architecture", opened.model_class.__name__, "checkpoint: config.json"

    def memory_needs(self, config: PipelineConfig, model: str) -> "StageNeeds":
        import torch

        from vllm_omni.placement.memory_needs import StageNeeds

        opened = self.open_model(self.stage.checkpoint(model))
        with torch.device("meta"):
            module = opened.model_class(opened.config)
        return StageNeeds(weights=sum(tensor.nbytes for tensor in module.state_dict().values()), activations=None)

    def modules_to_preload(self, model: str) -> set[str]:
        opened = self.open_model(self.stage.checkpoint(model))
        return {"vllm_omni.stage.engines.transformers", opened.model_class.__module__}

    def load_parameters(self) -> "FunctionParameters":
        from vllm_omni.kinds.parameters import FunctionParameters

        opened = self.open_model(self.stage.engine_args["model"])  # `with_checkpoint` has set it.
        defaults = self.stage.default_sampling_params
        return FunctionParameters(self.stage, opened.parameters, defaults, opened.voices, opened.sound_rate)

    def make_engine(
        self, model: str, outbox: "Outbox", workers: "RayWorkers | None" = None, log_stats: bool = False
    ) -> "StageEngine":
        from vllm_omni.stage.engines.transformers import TransformersStageEngine

        return TransformersStageEngine(outbox, self.stage, self.open_model(self.stage.checkpoint(model)))


class TranscribingTransformers(Transformers):
    """`transformers` with `accepts: audio`: makes text of a sound, with a class of transformers that vLLM has not."""

    makes = "text"
    speaks_replies = False
    gives_text = True
    text_has_tensors = True
    checkpoint_is = "a model of transformers that transcribes"

    @property
    def accepts_input(self) -> bool:
        return not self.stage.engine_input_source

    def output_rate(self, model: str) -> None:
        self.open_model(model)

    def open_with(self, model: str, hf_config: Any) -> "TranscriptionModel":
        from vllm_omni.model_executor.transcription_model import open_transcription_model

        return open_transcription_model(model, self.settings, hf_config)


class SpeechToSpeechTransformers(Transformers):
    """`transformers` with `accepts: audio` and an output of audio: speaks in another language what a sound says."""

    checkpoint_is = "a model of transformers that hears and speaks"
    speaks_replies = False

    @property
    def accepts_input(self) -> bool:
        return not self.stage.engine_input_source

    def open_with(self, model: str, hf_config: Any) -> "SpeechModel":
        from vllm_omni.model_executor.speech_model import open_speech_model

        return open_speech_model(model, self.settings, hf_config, hears=True)
