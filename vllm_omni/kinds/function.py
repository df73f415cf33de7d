# SPDX-License-Identifier: Apache-2.0
"""Stages that are Python: a function, a `FunctionStage`, and the fake for tests."""

from typing import TYPE_CHECKING

from vllm_omni.config.stage import StageKind
from vllm_omni.errors import StageConfigError
from vllm_omni.stage.python import check_packages, environment_python, find_python

if TYPE_CHECKING:
    from vllm_omni.kinds.parameters import FunctionParameters
    from vllm_omni.stage.engines.base import Outbox, StageEngine
    from vllm_omni.stage.spec import RayWorkers


class Fake(StageKind):
    """`fake`: has no model."""

    @property
    def gives_text(self) -> bool:
        return self.stage.final_output_type in (None, "text")

    def make_engine(
        self, model: str, outbox: "Outbox", workers: "RayWorkers | None" = None, log_stats: bool = False
    ) -> "StageEngine":
        from vllm_omni.stage.engines.fake import FakeStageEngine

        return FakeStageEngine(outbox, self.stage.stage_id, self.stage.name)


class Function(Fake):
    """`function`: calls a function, one for batches, or the methods of a `FunctionStage`."""

    has_function = True
    speaks_replies = True

    @property
    def accepts_input(self) -> bool:
        return not self.stage.batch_function and len(self.stage.engine_input_source) <= 1

    @property
    def replaceable_by(self) -> str | None:
        return "AR" if self.stage.accepts == "audio" and not self.stage.engine_input_source else None

    def kind_with(self, checkpoint: str) -> str | None:
        from vllm_omni.function_stage import load_function_stage

        function = load_function_stage(self.stage)
        return None if function is None else function.model_kind

    def check(self) -> None:
        if bool(self.stage.function) == bool(self.stage.batch_function):
            where = self.stage.label
            raise StageConfigError(f"{where}: give the dotted path of a callable as function, or as batch_function")
        check_packages(self.stage)

    def check_machine(self) -> None:
        if (python := self.stage.runtime.python) is not None:
            find_python(python, self.stage.label)

    def describe_python(self) -> str | None:
        runtime, where = self.stage.runtime, self.stage.label
        if runtime.python is not None:
            try:
                return str(find_python(runtime.python, where))
            except StageConfigError:  # `check_machine` refuses it, but where a cluster has other machines.
                return f"{runtime.python}, which is not on this machine"
        if not runtime.packages:
            return None
        python = environment_python(runtime.packages)
        return str(find_python(str(python), where)) if python.exists() else f"{python}, made at the first start"

    def load_parameters(self) -> "FunctionParameters | None":
        from vllm_omni.function_stage import load_function_stage
        from vllm_omni.kinds.parameters import FunctionParameters

        if (function := load_function_stage(self.stage)) is None:
            return None
        defaults, voices = self.stage.default_sampling_params, function.voices()
        return FunctionParameters(self.stage, function.parameters, defaults, voices)

    def make_engine(
        self, model: str, outbox: "Outbox", workers: "RayWorkers | None" = None, log_stats: bool = False
    ) -> "StageEngine":
        from vllm_omni.function_stage import load_function_stage
        from vllm_omni.stage.engines.agent import AgentEngine
        from vllm_omni.stage.engines.function import BatchFunction, FunctionStageEngine, PlainFunction

        stage = self.stage
        function_class = load_function_stage(stage)
        if stage.runtime.has_own_python:
            return AgentEngine(outbox, stage, model, function_class)
        if function_class is not None:
            num_threads = stage.runtime.max_batch_size or 1
            return FunctionStageEngine(outbox, function_class(stage, stage.checkpoint(model)), num_threads)
        plain = PlainFunction if stage.batch_function is None else BatchFunction
        return FunctionStageEngine(outbox, plain(stage, model))
