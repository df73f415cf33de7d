# SPDX-License-Identifier: Apache-2.0
"""The stage configuration of a pipeline: typed and frozen.

`load_pipeline_config` reads the YAML file; `PipelineConfig` describes the graph. Independent of how a stage is run, and
of any model. `stage.py` has a single stage.
"""

import itertools
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec

from vllm_omni.config.stage import (
    LONGEST_S,
    NotNegative,
    OmniStageConfig,
    Positive,
    PositiveSeconds,
    Seconds,
)
from vllm_omni.errors import StageConfigError

ROUTING_POLICIES = ("least_loaded", "round_robin", "prefix")


class StageInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a stage: an engine in a process. Messages between processes carry its id.

    Attributes:
        instance_id: Unique in the pipeline; of a stage's first replica it is the stage's id.
        replica: Counts the replicas of the stage, from 0.
        stage: The stage's configuration with the resources of this replica.
    """

    instance_id: int
    replica: int
    stage: OmniStageConfig

    @property
    def name(self) -> str:
        """`thinker`, or `thinker.1` where there are several replicas."""
        return self.stage.name if self.stage.runtime.replicas == 1 else f"{self.stage.name}.{self.replica}"

    @property
    def label(self) -> str:
        """The replica in messages: `stage 0 (thinker)`, or `stage 0 (thinker.1)`."""
        return f"stage {self.stage.stage_id} ({self.name})"


SENTENCES = "sentences"
"""The unit of windows that consist of whole sentences."""


class EdgeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"source": "from"}):
    """`runtime.edges[]`: how one stage's output reaches another.

    Attributes:
        window_size: Units in a window; -1: one window, the complete result. Default: `runtime.defaults`, and 1 of
            sentences.
        first_window_size: Units in the first window. Default: declared by the consumer, else `window_size`; of
            sentences -1, the first clause.
        window_growth: Ratio of the sizes of successive windows, above 1, until `window_size` is reached. Default: the
            second window has `window_size`.
        left_context: Units before a window that are sent again with it. Default: declared by the consumer.
        right_context: Units at the end of a window whose output comes with the next one, which is to be made while that
            of this one is played: windows grow without them. Default: declared by the consumer.
        unit: `tokens`, `sentences` of a text, or the name of a tensor, whose rows are counted. Default: declared by the
            consumer.
        only_if_streaming: Use windows for streaming clients (`stream=True`) only, and one window for other requests.
            For a consumer whose result is better with the complete input.
    """

    source: int
    to: int
    window_size: int | None = None
    first_window_size: int | None = None
    window_growth: Annotated[float, msgspec.Meta(gt=1, le=1e6)] | None = None
    left_context: int | None = None
    right_context: int | None = None
    unit: str | None = None
    only_if_streaming: bool = False


NIXL = "NixlConnector"
SHM_THRESHOLD = "shm_threshold_bytes"


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`runtime.connectors`: a named transport of payloads.

    Attributes:
        name: `SharedMemoryConnector`, `InlineConnector`, or `NixlConnector`: between machines, NIXL; on one, as the
            first.
        extra: `shm_threshold_bytes` of the first and the last: smaller payloads are sent inline.
    """

    name: Literal["SharedMemoryConnector", "InlineConnector", "NixlConnector"]
    extra: dict[str, NotNegative] = {}

    @property
    def shm_threshold_bytes(self) -> int:
        return self.extra[SHM_THRESHOLD]


class RuntimeDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`runtime.defaults`: for edges and stages without these keys.

    Attributes:
        window_size: As in `edges`.
        max_inflight, max_queued: As in a stage's `runtime`.
        high_watermark_bytes: Bytes that may wait in a stage for its engine. Beyond that its sources start no new
            request.
    """

    window_size: int = -1
    max_inflight: Positive | None = None
    max_queued: Positive = 64
    high_watermark_bytes: Positive = 256 << 20


class SegmentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`runtime.ar`: when an autoregressive stage sends a segment of its output to a streaming client.

    Attributes:
        max_segment_tokens: When the segment has this many tokens ...
        min_flush_interval_ms: ... or with the first token this many milliseconds after the last segment; twice as long
            after it if none comes. The first token of all is sent at once.
    """

    max_segment_tokens: Positive = 8
    min_flush_interval_ms: Annotated[float, msgspec.Meta(ge=0, le=1000 * LONGEST_S)] = 20.0


class RestartConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`runtime.restart`: what happens when a stage's process dies.

    Attributes:
        max_restarts: Restarts in `window_s` seconds. A stage that needs more is dead: its requests fail immediately,
            until it has started again after `max_backoff_s`. 0: never restart.
        window_s: See `max_restarts`.
        backoff_s: Seconds before the first restart; doubled for each further restart in the window.
        max_backoff_s: Upper bound of the back-off.
    """

    max_restarts: NotNegative = 5
    window_s: Seconds = 300.0
    backoff_s: Seconds = 0.5
    max_backoff_s: Seconds = 30.0


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`runtime`: settings of the whole pipeline.

    Attributes:
        max_inflight: Requests that the pipeline processes at once.
        max_queued: Requests that may wait for admission. Beyond that `OmniLLM` blocks, and `AsyncOmniLLM` raises
            `PipelineFullError`.
        request_timeout_s: Seconds after a request's arrival, including the time in the queue, after which it fails with
            `RequestTimeoutError`. 0: no limit.
        stage_init_timeout: Seconds that a single stage may take to become ready.
        distributed_backend: `ray`: stages run on the nodes of a Ray cluster. Default: on this machine.
        ray_address: Of the cluster: `auto` (the one that runs on this machine), `local` (a new one), or `HOST:PORT`.
        encrypt: What is encrypted between machines: `all`, or only `control`: messages and payloads below 64 KiB.
            Everything is authenticated in both cases.
        network_interface: That machines reach each other on (`eth1`). Default: the one with the address by which Ray
            knows the node.
    """

    enabled: bool = True
    defaults: RuntimeDefaults = RuntimeDefaults()
    ar: SegmentConfig = SegmentConfig()
    restart: RestartConfig = RestartConfig()
    max_inflight: Positive = 256
    max_queued: NotNegative = 256
    request_timeout_s: Seconds = 21600.0
    stage_init_timeout: PositiveSeconds = 600.0
    distributed_backend: Literal["ray"] | None = None
    ray_address: str = "auto"
    encrypt: Literal["all", "control"] = "all"
    network_interface: str | None = None
    connectors: dict[str, ConnectorConfig] = {}
    edges: list[EdgeConfig] = []


class WindowConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The windows of one edge, all defaults filled in. See `EdgeConfig`."""

    window_size: int = -1
    first_window_size: int = -1
    window_growth: float | None = None
    left_context: int = 0
    right_context: int = 0
    unit: str = "tokens"
    only_if_streaming: bool = False

    @property
    def streams(self) -> bool:
        return self.window_size != -1

    @property
    def first_is_clause(self) -> bool:
        """Whether the first window ends with the first clause."""
        return self.unit == SENTENCES and self.first_window_size == -1

    def for_request(self, streams: bool) -> "WindowConfig":
        """The windows of a request, which streams or not."""
        return WindowConfig() if self.only_if_streaming and not streams else self


class PipelineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A stage configuration file. `stage_args` is sorted by stage id."""

    stage_args: list[OmniStageConfig]
    runtime: RuntimeConfig = RuntimeConfig()

    @cached_property
    def stages(self) -> dict[int, OmniStageConfig]:
        return {stage.stage_id: stage for stage in self.stage_args}

    @cached_property
    def targets(self) -> dict[int, list[int]]:
        """The stages that read each stage's output, by stage id."""
        return {
            stage_id: [s.stage_id for s in self.stage_args if stage_id in s.engine_input_source]
            for stage_id in self.stages
        }

    @property
    def adapter_stages(self) -> set[int]:
        """The diffusion stages that apply a request's LoRA adapter."""
        return {stage.stage_id for stage in self.stage_args if stage.kind.takes_adapter(self.stage_args)}

    @cached_property
    def instances(self) -> dict[int, StageInstance]:
        """The replicas of all stages by instance id, in the order of stages and replicas."""
        found = {}
        further = itertools.count(max(self.stages, default=0) + 1)
        for stage in self.stage_args:
            for replica in range(stage.runtime.replicas):
                instance_id = next(further) if replica else stage.stage_id
                own = msgspec.structs.replace(stage, runtime=stage.runtime.of_replica(replica))
                found[instance_id] = StageInstance(instance_id=instance_id, replica=replica, stage=own)
        return found

    @cached_property
    def replicas(self) -> dict[int, list[StageInstance]]:
        """The replicas of each stage, by stage id."""
        return {
            stage_id: [instance for instance in self.instances.values() if instance.stage.stage_id == stage_id]
            for stage_id in self.stages
        }

    def without(self, stage_ids: Iterable[int]) -> "PipelineConfig":
        """This configuration without some stages and those that read their outputs.

        A stage that nobody reads any more emits text only.
        """
        left_out: set[int] = set()
        todo = list(stage_ids)
        while todo:
            left_out.add(stage_id := todo.pop())
            todo += self.targets[stage_id]
        edges = [edge for edge in self.runtime.edges if not {edge.source, edge.to} & left_out]
        stages = []
        for stage in self.stage_args:
            readers = set(self.targets[stage.stage_id])
            if readers and readers <= left_out:
                stage = stage.kind.without_readers()
            stages += [] if stage.stage_id in left_out else [stage]
        return self.with_stage_args(stages).with_runtime(edges=edges)

    @property
    def output_types(self) -> list[str]:
        """The output modalities of requests that name no stage, in stage order."""
        return self.output_types_from(None)

    def output_types_from(self, start: int | None) -> list[str]:
        """The output modalities of requests that begin at a stage (None: that name no stage), in stage order."""
        reached = self._reached(start)
        return [s.final_output_type for s in reached if s.final_output and s.final_output_type]

    def final_stages(self, modalities: Collection[str], start: int | None = None) -> list[int]:
        """The final stages of a request with these output modalities, in stage order."""
        reached = self._reached(start)
        return [s.stage_id for s in reached if s.final_output and s.final_output_type in modalities]

    def stages_for(self, modalities: list[str], start: int | None = None) -> list[int]:
        """The stages that a request with these output modalities runs through, in stage order.

        Args:
            start: The stage that the request names, see `OmniStageConfig.accepts`.
        """
        reached = {stage.stage_id for stage in self._reached(start)}
        needed: set[int] = set()
        todo = self.final_stages(modalities, start)
        while todo:
            stage_id = todo.pop()
            if stage_id in reached and stage_id not in needed:
                needed.add(stage_id)
                todo += self.stages[stage_id].engine_input_source
        return sorted(needed)

    def _reached(self, start: int | None) -> list[OmniStageConfig]:
        """The stages to which a request can come that begins at `start`, in stage order."""
        without_sources = [stage.stage_id for stage in self.stage_args if not stage.engine_input_source]
        unnamed = [stage_id for stage_id in without_sources if self.stages[stage_id].accepts is None]
        todo = (unnamed or without_sources) if start is None else [start]
        reached: set[int] = set()
        while todo:
            stage_id = todo.pop()
            if stage_id not in reached:
                reached.add(stage_id)
                todo += self.targets[stage_id]
        return [stage for stage in self.stage_args if stage.stage_id in reached]

    def accepting_stage(self, given: str, output_type: str) -> OmniStageConfig | None:
        """The first stage that accepts this of a caller, and is or leads to a final stage of a type; None: none."""
        stages = (stage for stage in self.stage_args if stage.accepts == given)
        return next((stage for stage in stages if output_type in self.output_types_from(stage.stage_id)), None)

    def connector(self, stage: OmniStageConfig, target: int, shm_threshold_bytes: int) -> ConnectorConfig:
        """The connector for payloads from `stage` to `target`.

        Args:
            shm_threshold_bytes: For connectors without this key.
        """
        name = stage.output_connectors.get(f"to_stage_{target}") or self.stages[target].input_connectors.get(
            f"from_stage_{stage.stage_id}"
        )
        connector = ConnectorConfig(name="SharedMemoryConnector") if name is None else self.runtime.connectors[name]
        extra = {SHM_THRESHOLD: shm_threshold_bytes} | connector.extra
        return msgspec.structs.replace(connector, extra=extra)

    def window(self, source: int, target: int, declared: WindowConfig | None) -> WindowConfig:
        """The windows of an edge; `declared` are those of the consumer's `StageInputProcessor`."""
        declared = declared or WindowConfig()
        edges = (edge for edge in self.runtime.edges if (edge.source, edge.to) == (source, target))
        edge = next(edges, EdgeConfig(source=source, to=target))
        unit = edge.unit or declared.unit
        default = 1 if unit == SENTENCES else self.runtime.defaults.window_size
        size = default if edge.window_size is None else edge.window_size
        if size == -1:
            return WindowConfig()
        first = declared.first_window_size if edge.first_window_size is None else edge.first_window_size
        return WindowConfig(
            window_size=size,
            first_window_size=size if first == -1 and unit != SENTENCES else first,
            window_growth=edge.window_growth or declared.window_growth,
            left_context=declared.left_context if edge.left_context is None else edge.left_context,
            right_context=declared.right_context if edge.right_context is None else edge.right_context,
            unit=unit,
            only_if_streaming=edge.only_if_streaming,
        )

    def max_queued(self, stage: OmniStageConfig) -> int:
        """Requests that may wait in a stage for its engine."""
        own = stage.runtime.max_queued
        return self.runtime.defaults.max_queued if own is None else own

    def max_inflight(self, stage: OmniStageConfig) -> int | None:
        """Requests that a stage's engine holds at once; None: the engine's default."""
        own = stage.runtime.max_inflight
        return self.runtime.defaults.max_inflight if own is None else own

    def with_stage_args(self, stage_args: list[OmniStageConfig]) -> "PipelineConfig":
        return msgspec.structs.replace(self, stage_args=stage_args)

    def with_runtime(self, **values: Any) -> "PipelineConfig":
        """This configuration, with other values of `runtime`'s own keys."""
        return msgspec.structs.replace(self, runtime=msgspec.structs.replace(self.runtime, **values))


class PartOfPipeline(PipelineConfig, frozen=True, kw_only=True, dict=True):
    """The replicas of a pipeline that share one machine: `instances` has no others.

    Attributes:
        instance_ids: Theirs.
    """

    instance_ids: list[int]

    @cached_property
    def instances(self) -> dict[int, StageInstance]:
        every = PipelineConfig(stage_args=self.stage_args, runtime=self.runtime).instances
        return {instance_id: every[instance_id] for instance_id in self.instance_ids}


def find_stage(config: PipelineConfig, key: str | int) -> OmniStageConfig:
    """The stage with this name or id.

    Raises:
        StageConfigError: There is none; lists the stages.
    """
    for stage in config.stage_args:
        if key in (stage.name, stage.stage_id, str(stage.stage_id)):
            return stage
    names = ", ".join(f"{s.name!r} ({s.stage_id})" for s in config.stage_args)
    raise StageConfigError(f"there is no stage {key!r}; this pipeline has {names}")
