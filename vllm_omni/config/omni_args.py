# SPDX-License-Identifier: Apache-2.0
"""The arguments of `OmniLLM` and `AsyncOmniLLM`: their defaults, their descriptions, and their flags' help texts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import msgspec

from vllm_omni.config.stage_config import NotNegative, Positive, PositiveSeconds, Seconds
from vllm_omni.config.utils import convert, find_checkpoint, given_value, parse_sizes, split_error
from vllm_omni.errors import StageConfigError

RUNTIME_OPTIONS = (
    "stage_init_timeout",
    "request_timeout_s",
    "max_inflight",
    "max_queued",
    "distributed_backend",
    "ray_address",
)
"""Options that replace the keys of these names in `runtime` of the stage configuration."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The options that are also flags of `vllm serve --omni`. None means the value in the stage configuration."""

    stage_configs_path: str | None = None
    """Stage configuration (YAML), or the name of one that ships, without `.yaml`. Default: the one for the model, and
    for any diffusers pipeline a single stage that runs it."""
    trace_file: str | None = None
    """Write a timeline of all requests to this file; it opens in Perfetto."""
    init_timeout: PositiveSeconds = 600.0
    """Seconds that all stages together may take to become ready."""
    stage_init_timeout: PositiveSeconds | None = None
    """Seconds that a single stage may take to become ready, at the start and after a restart."""
    request_timeout_s: Seconds | None = None
    """Seconds after which a request fails with `RequestTimeoutError`; 0: no limit."""
    max_inflight: Positive | None = None
    """Requests that the pipeline processes at once."""
    max_queued: NotNegative | None = None
    """Requests that may wait for admission. Beyond that, offline callers block and others get `PipelineFullError`."""
    distributed_backend: Literal["ray"] | None = None
    """`ray`: run the stages on the nodes of a Ray cluster (the extra `ray`)."""
    ray_address: str | None = None
    """The Ray cluster: `auto`, the one that runs on this machine; `local`, a new one on this machine; or HOST:PORT."""
    shm_threshold_bytes: NotNegative = 65536
    """Payloads of at least this size pass between stages through shared memory."""


@dataclass(frozen=True, kw_only=True)
class OmniArgs(PipelineOptions):
    """All arguments of a pipeline."""

    model: str
    """A checkpoint: the name of one that a package brings (`talk`; a directory of that name is `./talk`), a directory,
    or a name on the Hugging Face hub. A stage can have its own (`engine_args.model`), which may be a directory in this
    one."""
    log_stats: bool = False
    """Record statistics of stages and requests: logged, and in vLLM's Prometheus registry."""
    stage_overrides: Mapping[str | int, Mapping[str, Any]] = field(default_factory=dict)
    """For single stages, by name or id: `{"talker": {"engine_args": {...}, "runtime": {...},
    "default_sampling_params": {...}}}`; any other key is an engine argument."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's `EngineArgs` (`dtype`, `max_model_len`, ...) for every vLLM stage, and of `DiTConfig`
    (`dtype`, `vae_tiling`, ...) for every diffusion stage."""

    def __post_init__(self) -> None:
        """
        Raises:
            StageConfigError: A value has the wrong type or is out of range, or there is no such checkpoint.
        """
        given = {name: getattr(self, name) for name in (*RUNTIME_OPTIONS, "init_timeout", "shm_threshold_bytes")}
        try:
            convert(given, PipelineOptions)
        except msgspec.ValidationError as error:
            problem, name = split_error(error)
            raise StageConfigError(f"{name}: {problem}{given_value(error, given)}") from error
        object.__setattr__(self, "model", find_checkpoint(self.model))

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "OmniArgs":
        """Makes the options of the keyword arguments of `OmniLLM`; an unknown keyword is an engine argument.

        Raises:
            StageConfigError: A size cannot be read.
            MissingPackageError: See `find_checkpoint`.
        """
        try:
            kwargs = parse_sizes(kwargs)
        except ValueError as error:
            raise StageConfigError(str(error)) from error
        known = {field.name for field in fields(cls)} - {"engine_args"}
        options = {name: value for name, value in kwargs.items() if name in known}
        options["stage_overrides"] = options.get("stage_overrides") or {}
        return cls(**options, engine_args={name: value for name, value in kwargs.items() if name not in known})

    @property
    def otlp_traces_endpoint(self) -> str | None:
        """Where OpenTelemetry spans go: an engine argument that the pipeline reads, too. None: no spans."""
        return self.engine_args.get("otlp_traces_endpoint")

    @property
    def runtime_overrides(self) -> dict[str, Any]:
        """The values that replace those of `runtime` in the stage configuration."""
        return {name: value for name in RUNTIME_OPTIONS if (value := getattr(self, name)) is not None}
