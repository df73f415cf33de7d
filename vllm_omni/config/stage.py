# SPDX-License-Identifier: Apache-2.0
"""One stage of a pipeline: its keys in the YAML file, and its kind, which decides what they mean."""

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from vllm_omni.control import Freeze, StartProfile, StopProfile, Thaw, Verb
from vllm_omni.errors import StageConfigError
from vllm_omni.model_packages import find_models

if TYPE_CHECKING:
    from vllm.config import ProfilerConfig

LONGEST_S = 1e9
"""30 years; threads cannot wait for much longer."""

STAGE_TYPES = {"llm": ("AR", "generation"), "diffusion": ("DiT",), "function": ("function",)}
"""The kinds that the older `stage_type` stands for."""

OUTPUT_TYPES = ("text", "audio", "image", "video", "latent")
"""Of the stages of vLLM and diffusers; functions name theirs."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_S)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=LONGEST_S)]


class StageRuntimeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`stage_args[].runtime`: where a stage runs, and its limits.

    Attributes:
        replicas: Processes of the stage, each with an engine. A request runs in one of them.
        routing: How that one is selected, when the request starts: `least_loaded`: it has the fewest requests;
            `round_robin`: one after the other; `prefix`: it had prompts with the same beginning (for prefix caching),
            unless it has many more requests than another.
        process: `true`, the only value: each replica has a process of its own.
        devices: Accelerators that are visible to the stage (see `placement.devices.set_stage_gpu_devices`): a comma
            list (`"2,5"`), or a number or digit string, the logical index of one. A list has one such entry for each
            replica; any other value is that of all replicas.
        memory: Limit of the stage's memory on each device: a fraction of the device (`0.3`), or bytes (`"20GiB"`).
        cpus: Cores that the stage runs on: a list in Linux notation (`"0-3,8"`), or their number, of each replica. A
            list with one such entry for each replica is possible, too.
        node: With Ray: the node of the stage, by its address, host name or node name. A list has one for each replica.
        resources: With Ray: what each process asks for (`{"CPU": 2, "GPU": 1, "fast_disk": 1}`). Default: as many GPUs
            as it has devices, and its number of cores, or one.
        max_batch_size: Requests that the engine processes at once (its `max_num_seqs`); of a `FunctionStage`, its
            threads.
        max_inflight: Requests that the engine holds, running or waiting. Default: what it can use.
        max_queued: Requests that may wait in the stage for its engine. Beyond that its sources wait.
        step_timeout_s: Seconds that a step of the engine, taking in a request, or the work of the IO thread may take;
            then the process is killed and restarted, as is one that does not answer for so long. A step that may
            compile gets 600 s more: the first one of each shape, and any of a diffusion stage with `compile`. 0: no
            limit.
        requires_multimodal_data: The stage reads the multimodal data of prompts. First stages always do; of the others
            only a diffusion stage can, and receives the prompt's images.
        python: Of a function stage: the Python that computes it, a path or a name on `PATH`. It needs numpy, and none
            of the packages here.
        packages: Instead of `python`: requirements as pip has them. The stage runs in an environment with these, made
            once in the user's cache.
    """

    replicas: int = 1
    routing: str = "least_loaded"
    process: bool | str = True
    devices: str | int | list[str | int] | None = None
    memory: str | float | None = None
    cpus: str | int | list[str | int] | None = None
    node: str | list[str] | None = None
    resources: dict[str, float] = {}
    max_batch_size: Positive | None = None
    max_inflight: Positive | None = None
    max_queued: Positive | None = None
    step_timeout_s: Seconds = 300.0
    requires_multimodal_data: bool = False
    python: str | None = None
    packages: list[str] = []

    @property
    def has_own_python(self) -> bool:
        """Whether the stage's code runs in another Python."""
        return self.python is not None or bool(self.packages)

    def of_replica(self, replica: int) -> "StageRuntimeConfig":
        """These values, with the resources of one replica."""
        names = ("devices", "cpus", "node")
        own = {name: value[replica] for name in names if isinstance(value := getattr(self, name), list)}
        return msgspec.structs.replace(self, **own)


class OmniStageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """`stage_args[]`: one stage of a pipeline.

    Attributes:
        stage_id: Unique number; the order of stages and of their sampling parameters.
        engine_type: Its kind: `AR` (tokens one by one), `generation` (one forward for each request), `DiT` (a diffusers
            pipeline), `transformers` (a speech model of transformers), `function` (a plain Python function), `fake`
            (for tests), or one of an installed package.
        stage_type: Older form of `engine_type`: `llm`, `diffusion` or `function`.
        runtime: Where the stage runs.
        engine_args: Any argument of vLLM's `EngineArgs`, and `model_stage` (the stage's name), `model_arch`,
            `hf_config_name`, `worker_cls`, `scheduler_cls`, `engine_output_type`; of a diffusion stage the fields of
            `DiTConfig`. `model` is the stage's own checkpoint. Default: the pipeline's.
        engine_input_source: Stages whose outputs this stage reads; none for the first stage.
        custom_process_input_func: Dotted path of the stage's `StageInputProcessor`.
        custom_prompt_func: Dotted path of the `PromptProcessor` of a stage without sources.
        function: Dotted path of the callable of a `function` stage, called for each request, or of a `FunctionStage`.
        batch_function: Instead of `function`: a callable for up to `runtime.max_batch_size` (default 8) requests.
        accepts: What a function stage also takes from a caller, in place of its source's output: `text`, `audio` or
            `image`; of an `AR` stage without sources, `audio`, which vLLM transcribes. A request that names the stage
            begins there; others begin at the stages without sources and this key.
        is_comprehension: OpenAI's sampling fields apply to this stage.
        final_output: Whether the caller receives the stage's output.
        final_output_type: The type of that output: `text`, `audio`, `image`, `video` or `latent`; a function may name
            another.
        sample_rate: Samples per second of an audio output.
        reads: Fields of its sources' outputs that the stage reads (replaces `StageInputProcessor.reads`).
        only_if: A field of the checkpoint's configuration. Where it is false, the stage is left out, and so are those
            that read its output: the checkpoint has no weights for them.
        default_sampling_params: Fields of vLLM's `SamplingParams`; of a diffusion stage, of `DiffusionSamplingParams`;
            of a `FunctionStage`, of its `parameters`; of an `AR` stage that accepts audio, also of
            `TranscriptionParameters`.
        transcription_prompt, translation_prompt: What the stage that reads prompts is asked beside a sound.
            `{language}` is the name of the language that is spoken; if that is not known, it is left out, with the
            space after it.
        input_connectors, output_connectors: For each edge (`from_stage_0: name`, `to_stage_1: name`) a connector
            defined under `runtime.connectors`.
    """

    stage_id: NotNegative
    engine_type: str | None = None
    stage_type: Literal["llm", "diffusion", "function"] | None = None
    runtime: StageRuntimeConfig = StageRuntimeConfig()
    engine_args: dict[str, Any] = {}
    engine_input_source: list[int] = []
    custom_process_input_func: str | None = None
    custom_prompt_func: str | None = None
    function: str | None = None
    batch_function: str | None = None
    accepts: Literal["text", "audio", "image"] | None = None
    is_comprehension: bool = False
    final_output: bool = False
    final_output_type: str | None = None
    sample_rate: Positive | None = None
    reads: list[str] | None = None
    only_if: str | None = None
    default_sampling_params: dict[str, Any] = {}
    transcription_prompt: str = "Transcribe the {language} audio into text."
    translation_prompt: str = "Translate the {language} audio into English text."
    input_connectors: dict[str, str] = {}
    output_connectors: dict[str, str] = {}

    @property
    def name(self) -> str:
        """The stage's name in messages, metrics and `stage_overrides`."""
        return self.engine_args.get("model_stage") or f"stage{self.stage_id}"

    @property
    def label(self) -> str:
        """The stage in messages: `stage 0 (thinker)`."""
        return f"stage {self.stage_id} ({self.name})"

    @cached_property
    def kind(self) -> "StageKind":
        """What its kind decides. Chosen once, by `engine_type`, `stage_type` or the scheduler.

        Raises:
            StageConfigError: There is no such kind, or the package that declares it cannot be imported.
        """
        name, kinds = self._kind_name, find_models().stage_kinds
        if name not in kinds:
            raise StageConfigError(f"engine_type: Invalid enum value {name!r} (known here: {', '.join(sorted(kinds))})")
        try:
            kind = pkgutil.resolve_name(kinds[name])
        except (ImportError, AttributeError) as error:
            raise StageConfigError(
                f"engine_type: {name!r} is {kinds[name]}, which cannot be imported: {error}; reinstall its package"
            ) from error
        if not (isinstance(kind, type) and issubclass(kind, StageKind)):
            raise StageConfigError(f"engine_type: {name!r} is {kinds[name]}, which does not extend StageKind")
        return kind.of(name, self)

    @property
    def _kind_name(self) -> str:
        if self.engine_type is not None:
            return self.engine_type
        if self.stage_type is not None and self.stage_type != "llm":
            return STAGE_TYPES[self.stage_type][0]
        return "generation" if "Generation" in str(self.engine_args.get("scheduler_cls", "")) else "AR"

    @property
    def vllm_engine_args(self) -> dict[str, Any]:
        """`engine_args` without the checkpoint, with defaults from `runtime`."""
        batch = {} if self.runtime.max_batch_size is None else {"max_num_seqs": self.runtime.max_batch_size}
        return batch | {name: value for name, value in self.engine_args.items() if name != "model"}

    def read_profiler_config(self) -> "ProfilerConfig | None":
        """vLLM's, of `engine_args`; None: the stage has no profiler.

        Raises:
            StageConfigError: A field is wrong.
        """
        given = self.engine_args.get("profiler_config")
        if given is None:
            return None
        from vllm.config import ProfilerConfig  # takes a second

        try:
            config = given if isinstance(given, ProfilerConfig) else ProfilerConfig(**given)
        except (TypeError, ValueError) as error:
            raise StageConfigError(f"{self.label}: engine_args.profiler_config: {error}") from error
        return None if config.profiler is None else config

    def checkpoint(self, model: str) -> str:
        """The stage's checkpoint in a pipeline for `model`."""
        return self.engine_args.get("model") or model

    @property
    def dit_engine_args(self) -> dict[str, Any]:
        """The engine arguments of a diffusion stage."""
        batch = {} if self.runtime.max_batch_size is None else {"max_batch_size": self.runtime.max_batch_size}
        return batch | self.engine_args


class StageKind:
    """What the kind of a stage decides: everything that is asked of a stage because of its `engine_type`.

    There is one object for each stage. A kind is a class in one file that extends this one, and an entry of
    `ModelPackage.stage_kinds`; `vllm_omni/kinds/` has ours. The core asks the object, and never for its name, which is
    for messages. The classes are found in every process of a pipeline: their modules import engines and models inside
    the methods that need them.

    Attributes:
        has_function: It runs the `function` or `batch_function` of the stage.
        is_autoregressive: It writes tokens one by one, has a KV cache, and sends its output in segments.
        streams_output: Callers may receive its output in pieces.
        reads_media: It can receive the multimodal data of prompts where it is not the first stage.
        params: What a request sets of it: `sampling`, vLLM's `SamplingParams`; `diffusion`, `DiffusionSamplingParams`;
            None, only what `load_parameters` returns.
        takes_settings: A request sets its `DiffusionSamplingParams`; else, if at all, `params_from` has those.
        parallel_sizes: Engine arguments whose product is the number of its devices.
        budget_argument: The engine argument that is `runtime.memory` as a fraction of a device. None: it has none, and
            takes what it needs.
        leaves_no_room: Without `runtime.memory` it needs all that other stages leave of a device.
        quantization: A quantization that it can do while it loads, for hints.
        reads_weights: A step reads the weights of its checkpoint: stages share a CPU's cores by their bytes.
        spins: All of its threads compute each operation of a step, and wait for the slowest one.
        verbs: What an operator can ask of it (`vllm_omni.control`).
        text_has_tensors: Callers receive the tensors that it makes beside a text; else only other stages do.
        speaks_replies: It may make sound of the text that its source writes.
        checkpoint_is, checkpoint_file: Of a stage without a configuration file, in `vllm-omni config show`: what its
            checkpoint is, and the file that tells.
    """

    has_function = False
    is_autoregressive = False
    streams_output = True
    reads_media = False
    params: Literal["sampling", "diffusion"] | None = None
    takes_settings = False
    parallel_sizes: tuple[str, ...] = ()
    budget_argument: str | None = None
    leaves_no_room = False
    quantization: str | None = None
    reads_weights = False
    spins = False
    verbs: frozenset[type[Verb]] = frozenset((Freeze, StartProfile, StopProfile, Thaw))
    text_has_tensors = False
    speaks_replies = False
    checkpoint_is = ""
    checkpoint_file = ""

    def __init__(self, name: str, stage: OmniStageConfig) -> None:
        self.name = name
        self.stage = stage

    def sleep_problem(self, level: int, keeps_requests: bool) -> str | None:
        """Why its memory cannot be given back by `Sleep`, with the remedy; None: it can. Asked of kinds that know it.

        Args:
            level: 1 or 2.
            keeps_requests: It may hold requests that have begun.
        """
        return None

    @classmethod
    def of(cls, name: str, stage: OmniStageConfig) -> "StageKind":
        """The object of a stage with this `engine_type`."""
        return cls(name, stage)

    # The stage's place in the graph. Nothing is imported.

    @property
    def accepts_input(self) -> bool:
        """Whether the stage can have its `accepts`."""
        return False

    @property
    def reads_prompts(self) -> bool:
        """Whether the stage can have a `custom_prompt_func`."""
        return False

    @property
    def replaceable_by(self) -> str | None:
        """The `engine_type` that an override may give the stage instead."""
        return None

    def kind_with(self, checkpoint: str) -> str | None:
        """The `engine_type` that the stage has instead where an override gives it this checkpoint; None: its own.

        Args:
            checkpoint: Empty: any.
        """
        return None

    @property
    def schedules_by_priority(self) -> bool:
        """Whether a request's priority counts."""
        return True

    @property
    def emits_only_text(self) -> bool:
        """Whether the only outputs are tokens of a text."""
        return False

    @property
    def gives_text(self) -> bool:
        """Whether its completions have a text."""
        return False

    @property
    def has_ray_workers(self) -> bool:
        """Whether vLLM's Ray executor starts the workers of its engine, on any nodes of the cluster."""
        return False

    def check(self) -> None:
        """Checks the stage's own keys.

        Raises:
            StageConfigError: One is wrong, or not for this kind; starts with the stage's label.
        """

    def check_output_type(self) -> None:
        """Refuses a `final_output_type` that is neither one of `OUTPUT_TYPES` nor the engine's rows, as they are."""
        own = self.stage.final_output_type
        if own not in (None, *OUTPUT_TYPES, self.stage.engine_args.get("engine_output_type")):
            known = ", ".join(OUTPUT_TYPES)
            raise StageConfigError(f"{self.stage.label}: final_output_type {own!r} is not one of {known}")

    def needs_input_processor(self, sources: "Sequence[OmniStageConfig]") -> bool:
        """Whether a stage with these sources, if any, must have a `custom_process_input_func`."""
        return False

    def takes_adapter(self, stages: "Sequence[OmniStageConfig]") -> bool:
        """Whether the stage, of these of the pipeline, applies a request's LoRA adapter as a diffusion model."""
        return False

    def params_from(self, readers: "Sequence[OmniStageConfig]") -> int | None:
        """The stage, of those that read this one's output, whose parameters it uses; None: it has its own.

        Raises:
            StageConfigError: There is none, or their defaults differ.
        """
        return None

    def without_readers(self) -> OmniStageConfig:
        """The stage in a pipeline where no stage reads its output."""
        return self.stage

    # In the caller's process.

    def known_arguments(self) -> set[str]:
        """The engine arguments that it takes of those that are for all stages."""
        return {"profiler_config"}

    def check_arguments(self, model: str) -> Any:
        """
        Args:
            model: The pipeline's checkpoint, here and below.

        Returns:
            vLLM's `EngineArgs`, if its engine is vLLM's; else None.

        Raises:
            StageConfigError: An engine argument is wrong.
        """
        self.stage.read_profiler_config()

    def with_checkpoint(self, model: str) -> OmniStageConfig:
        """The stage with what follows from its checkpoint.

        Raises:
            StageConfigError: It cannot be read, or cannot run.
        """
        return self.stage

    def longest_length(self, model: str) -> int | None:
        """The length of its checkpoint, if its `max_model_len` is longer, and nothing else is wrong; else None."""
        return None

    def computed_arguments(self, model: str) -> Iterator[tuple[str, Any, str]]:
        """The engine arguments that the configuration leaves open, each with its value and where that comes from."""
        return iter(())

    def check_machine(self) -> None:
        """Checks what the stage needs of the machine that it runs on, beside devices, cores and memory.

        Raises:
            StageConfigError: It is missing.
        """

    def describe_python(self) -> str | None:
        """The Python of a stage that has its own, for people; None: it runs in this one."""

    def memory_needs(self, config: Any, model: str) -> Any:
        """The `StageNeeds` of a stage of the pipeline `config`; None: it has no model.

        Raises:
            StageConfigError: They cannot be computed.
        """

    def modules_to_preload(self, model: str) -> set[str]:
        """Modules that each of its processes would import otherwise."""
        return set()

    def make_input_processor(self, model: str) -> Any:
        """The `OmniInputProcessor` of a stage that reads prompts as vLLM does; else None."""

    def make_diffusion_processor(self, model: str) -> Any:
        """The `DiffusionInputProcessor` of a stage that runs a diffusers pipeline; else None.

        Raises:
            StageConfigError: Its checkpoint, or one of its defaults, is wrong.
        """

    def load_pipeline_info(self, model: str) -> Any:
        """The `PipelineInfo` of a stage that runs a diffusers pipeline; else None."""

    def load_transcription_model(self, model: str) -> Any:
        """The model class of a stage that vLLM transcribes with; else None."""

    def load_parameters(self) -> Any:
        """The `FunctionParameters` of a stage with parameters of its own; else None.

        Raises:
            StageConfigError: Its class, or one of its defaults, is wrong.
        """

    def default_params(self, checkpoint: Callable[[], Mapping[str, Any]] | None) -> Mapping[str, Any]:
        """The default sampling parameters.

        Args:
            checkpoint: Reads those of the stage's checkpoint, if it reads prompts.
        """
        return self.stage.default_sampling_params

    def sampling_values(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values that are fields of vLLM's `SamplingParams`."""
        return values

    def check_num_outputs(self, n: int) -> None:
        """Raises `ValueError` if a request cannot have this many outputs of the stage."""

    # In the stage's process.

    def make_engine(self, model: str, outbox: Any, workers: Any = None, log_stats: bool = False) -> Any:
        """The `StageEngine`, not started.

        Args:
            outbox: An `Outbox`.
            workers: The `RayWorkers` of its engine, if it has any.
            log_stats: It records its metrics.
        """
        raise NotImplementedError(f"{type(self).__name__} has no make_engine")
