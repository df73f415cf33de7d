# SPDX-License-Identifier: Apache-2.0
"""The base of `OmniLLM` and `AsyncOmniLLM`: starts a pipeline, reports its state, ends it.

Imports neither torch nor vLLM, so that a fork server can import them at the same time as this process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.config.utils import as_plain
from vllm_omni.errors import PipelineStartError
from vllm_omni.launch.fork_server import ForkServer
from vllm_omni.metrics.logs import quiet_start
from vllm_omni.metrics.status_line import importing_vllm
from vllm_omni.model_executor.registry import OMNI_CONFIGS
from vllm_omni.vllm_requirement import require_vllm

if TYPE_CHECKING:
    from typing import Self

    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.tokenizers import TokenizerLike

    from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
    from vllm_omni.entrypoints.operations import PipelineOperations
    from vllm_omni.entrypoints.pipeline import Pipeline
    from vllm_omni.entrypoints.request_builder import RequestBuilder
    from vllm_omni.metrics.stats import StageHealth, StageStats


_SHARED = (
    "vllm.v1.engine.utils",  # It imports Ray, where that is installed.
    "vllm_omni.engine.input_processor",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.layers.quantization.online.base",  # Any model that is loaded imports it.
)
"""Modules of stages that the caller's process needs as well, those of models among them."""
_OF_STAGES = (
    "vllm_omni.stage.engines.llm",
    # Each engine has vLLM's plugins loaded, and so ours, which imports these.
    *sorted({path.partition(":")[0] for path in OMNI_CONFIGS.values()}),
)
"""Further modules, which this process does not need or imports much later."""


def start_fork_server(*, from_this_process: bool = False) -> ForkServer:
    """Starts the process that stages are forked from; it imports vLLM in the background.

    Args:
        from_this_process: See `ForkServer`.

    Raises:
        VllmRequirementError: vLLM is missing or is another version.
        PipelineStartError: The system refuses a process, or files.
    """
    require_vllm()
    try:
        server = ForkServer(_SHARED, from_this_process=from_this_process)
    except OSError as error:
        raise PipelineStartError.from_system(error) from error
    server.preload(_OF_STAGES)  # Beside this process, which goes on with its own imports.
    return server


def launch_pipeline(
    args: OmniArgs, fork_server: ForkServer | None, on_open: Callable[[Callable[[], None]], None]
) -> Pipeline:
    """Opens a pipeline on a fork server, which it owns from now on; None: a new one. Raises as `OmniBase`."""
    server = fork_server or start_fork_server()
    try:
        with importing_vllm():
            from vllm_omni.entrypoints.pipeline import open_pipeline

        return open_pipeline(server, args, on_open)
    except BaseException:
        server.close()
        raise


class OmniBase:
    """A pipeline of stages, each an engine in its own process. Ends with the object, or with the interpreter."""

    _vllm_class: ClassVar[str]
    """The one of vLLM that it is like."""
    _withheld_methods: ClassVar[Mapping[str, str]]
    """Those of its methods that a pipeline does not have, with the reason."""

    def __init__(
        self,
        model: str,
        stage_configs_path: str | None = None,
        *,
        fork_server: ForkServer | None = None,
        on_open: Callable[[Callable[[], None]], None] = lambda close: None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            model, stage_configs_path: See `OmniArgs`.
            fork_server: The result of `start_fork_server`, owned by the pipeline from now on. Default: a new one.
            on_open: Called when the stages begin to start, with a function that closes the pipeline from another
                thread; the constructor then raises.
            kwargs: The other fields of `OmniArgs`. Any other keyword is an engine argument.

        Raises:
            VllmRequirementError: vLLM is missing or has another version.
            MissingPackageError: The model, or a part of it, is in a package that is not installed.
            StageConfigError: The stage configuration or an argument is wrong.
            PipelineStartError: The system refuses what the pipeline needs, e.g. files or memory.
            StageStartError: A stage failed to start, or took too long.
            PipelineClosedError: It was closed while it started.
        """
        with quiet_start():
            self._prepare()
            args = OmniArgs.from_kwargs(model=model, stage_configs_path=stage_configs_path, **kwargs)
            self._pipeline = launch_pipeline(args, fork_server, on_open)
        # Also runs when the interpreter exits, so that no process is left behind without close().
        self._finalizer = weakref.finalize(self, self._pipeline.orchestrator.close)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """A pipeline with those of vLLM's arguments that are not at their defaults, for each of its vLLM stages.

        Raises:
            OmniError: As the constructor.
        """
        defaults = vars(type(engine_args)(model=engine_args.model))
        given = {name: as_plain(value) for name, value in vars(engine_args).items() if value != defaults[name]}
        return cls(engine_args.model, **given)

    def _prepare(self) -> None:
        """Called before a process is started, and vLLM is imported."""

    if not TYPE_CHECKING:  # Else a checker would take any name for an attribute.

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in self._withheld_methods:
                text += f"; it is of vLLM's {self._vllm_class} alone: {self._withheld_methods[name]}"
            raise AttributeError(text)

    @property
    def config(self) -> PipelineConfig:
        """The stages, with all arguments applied."""
        return self._pipeline.config

    @property
    def builder(self) -> RequestBuilder:
        """Builds requests from prompts; for callers that render prompts themselves, such as an API server."""
        return self._pipeline.builder

    @cached_property
    def operations(self) -> PipelineOperations:
        """What an operator does with it; its methods are also this object's."""
        from vllm_omni.entrypoints.operations import PipelineOperations

        return PipelineOperations(self._pipeline)

    @property
    def voices(self) -> list[str]:
        """The values of `inputs.VOICE_FIELD` in a prompt's `additional_information`, the default voice first."""
        return self._pipeline.builder.voices

    def get_tokenizer(self) -> TokenizerLike:
        """The tokenizer of the vLLM stage that reads the prompts, as vLLM's `LLM.get_tokenizer`.

        Raises:
            AttributeError: There is none, as in a pipeline of diffusion.
        """
        return self.builder.input_processors[self._prompt_stage.stage_id].renderer.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of that stage where a call gives none, as vLLM's `LLM.get_default_sampling_params`.

        Raises:
            AttributeError: As `get_tokenizer`.
        """
        from vllm_omni.entrypoints.request_builder import make_sampling_params

        return make_sampling_params(self.builder.default_values(self._prompt_stage))

    @property
    def _prompt_stage(self) -> OmniStageConfig:
        stage = self.builder.prompt_stage
        if stage is None:
            raise AttributeError("no stage of this pipeline is a vLLM engine that reads prompts")
        return stage

    @property
    def is_open(self) -> bool:
        """False after `close()`, and after the pipeline has ended on an error of its own."""
        return self._finalizer.alive and self._pipeline.orchestrator.is_running

    @property
    def error(self) -> BaseException | None:
        """The error of its own that ended the pipeline, and all its requests; None if there was none."""
        return self._pipeline.orchestrator.error

    def health(self) -> list[StageHealth]:
        """The state of each stage in stage order: `starting`, `ready`, `unresponsive`, `restarting` or `dead`; once the
        pipeline is not open any more, all are dead."""
        return self._pipeline.orchestrator.health()

    def stats(self) -> list[StageStats]:
        """The last snapshot of each stage: what it holds, and totals since its process started.

        A stage sends a snapshot every 0.05 seconds while it works, and one when it becomes idle.

        Raises:
            PipelineClosedError: `close()` was called.
        """
        return self._pipeline.orchestrator.stats()

    def stats_table(self) -> str:
        """`stats()` as a printable table."""
        from vllm_omni.metrics.text import format_stage_table

        return format_stage_table(self.stats())

    def close(self) -> None:
        """Ends all stages. Running requests fail with `RequestAbortedError`. May be called twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
