# SPDX-License-Identifier: Apache-2.0
"""A stage that runs a diffusers pipeline.

The loop is that of every stage: read the inbox, step, emit outputs. A request is one job for each of its outputs; the
jobs of all requests are batched. A separate thread encodes files.
"""

import contextlib
import inspect
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.control import AddLoRA, ResetEncoderCache, Sleep, Verb, WakeUp
from vllm_omni.diffusion.job import (
    Adapter,
    DiffusionJob,
    JobEnd,
    Progress,
    pack_encoded_prompts,
    unpack_encoded_prompts,
)
from vllm_omni.diffusion.media_inputs import call_parameters, restore
from vllm_omni.diffusion.modular_info import read_pipeline_info
from vllm_omni.diffusion.pipeline_info import PipelineInfo
from vllm_omni.diffusion.request_settings import call_arguments, default_fps
from vllm_omni.executor.diffusers_executor import DiffusersPipelineExecutor
from vllm_omni.inputs import StageInput
from vllm_omni.media import encode_outputs, to_pil
from vllm_omni.metrics.logs import get_logger
from vllm_omni.metrics.memory import device_bytes, resident_bytes
from vllm_omni.metrics.stats import CacheCounts
from vllm_omni.outputs import StageOutput, pack_trajectories
from vllm_omni.sampling_params import DiffusionRequest
from vllm_omni.stage.engines.base import (
    AbortRequest,
    Error,
    NewRequest,
    Outbox,
    RequestItem,
    Result,
    StageEngine,
    Stream,
)
from vllm_omni.stage.weights import WeightFolder

logger = get_logger(__name__)


@dataclass(slots=True)
class _Request:
    """A running request.

    Attributes:
        ends: Those of its finished outputs, by index.
    """

    diffusion: DiffusionRequest
    streams_output: bool
    ends: dict[int, JobEnd] = field(default_factory=dict)


class DiffusionStageEngine(StageEngine):
    """Runs a `DiffusersPipelineExecutor`."""

    def __init__(
        self,
        outbox: Outbox,
        stage_id: int,
        model: str,
        config: DiTConfig,
        memory: float | int | None,
    ) -> None:
        super().__init__(outbox)
        self._stage_id = stage_id
        self._model = model
        self._config = config
        self.always_compiles = config.compile
        self._executor = DiffusersPipelineExecutor(model, config, memory)
        self._requests: dict[str, _Request] = {}
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="encoding")
        self._info: PipelineInfo

    def start(self) -> None:
        self._info = read_pipeline_info(self._model, self._config)
        self._executor.on_shape = lambda shape: self.step_timer.set_shape(shape)
        self._executor.start(lambda: self.on_failure())
        self.capacity = 2 * self._executor.max_batch_size  # one batch to compute, and the next one

    def run(self) -> None:
        """Works until `stop`, without gradients.

        Raises:
            torch.AcceleratorError: The device is broken.
        """
        # Here, because grad mode belongs to the thread. Not inference mode: its tensors have no version counter, which
        # identifies arguments of networks, and weights created in it could not be changed for an adapter elsewhere.
        with torch.no_grad():
            super().run()

    def close(self) -> None:
        self._encoding.shutdown()
        self._executor.close()

    def cache_counts(self) -> dict[str, CacheCounts]:
        return {"prompt": self._executor.runner.prompt_cache.counts}

    def unbatched(self) -> list[str]:
        return self._executor.unbatched

    def control(self, verb: Verb) -> Any:
        match verb:
            case AddLoRA():
                self._executor.runner.check_adapter(verb.lora_name, verb.lora_path)
                return True
            case ResetEncoderCache():
                self._executor.runner.prompt_cache.clear()
                return None
            case Sleep():
                self._sleep(verb.level)
                return None
            case WakeUp():
                if verb.tags is None or "weights" in verb.tags:
                    self._wake_up()
                return not self._executor.is_asleep
        return super().control(verb)

    def _sleep(self, level: int) -> None:
        if self.has_requests():
            raise ValueError("requests that run need its memory; pause with abort or wait")
        in_ram, on_device = resident_bytes(), device_bytes()
        self._executor.sleep(level)
        given_back = in_ram - resident_bytes(), on_device - device_bytes()
        logger.info("sleep gave back %.1f MiB of RAM, %.1f MiB of the device", *(it / 2**20 for it in given_back))

    def _wake_up(self) -> None:
        """Takes the memory again, with the weights that it had."""
        if self._executor.wake_up():
            return
        with contextlib.ExitStack() as loading:
            model = Path(self._model)
            if self._weights_path is not None:
                self._weight_folder.check(self._weights_path)
                model = loading.enter_context(self._weight_folder.overlay(self._weights_path))
            self._executor.load_beside(str(model))()

    @cached_property
    def _weight_folder(self) -> WeightFolder:
        return WeightFolder(self._model, self._config.revision)

    def _weight_bytes(self) -> int:
        return self._executor.runner.host_weight_bytes

    def _load_weights(self, folder: Path) -> Callable[[], None]:
        return self._executor.load_beside(str(folder))

    def has_requests(self) -> bool:
        return bool(self._requests)

    # Inbox.

    def wait_for_work(self) -> bool:
        """An idle stage waits up to `batch_wait_ms` after the first item: others may join it."""
        while not self._is_stopping and not self.has_work():
            self._read(self._next_item())
            until = time.monotonic() + self._config.batch_wait_ms / 1000
            while not self._is_stopping and self._executor.has_room and (seconds := until - time.monotonic()) > 0:
                with contextlib.suppress(queue.Empty):
                    self._read(self._next_item(seconds))
        return super().wait_for_work()

    def has_work(self) -> bool:
        return self._executor.has_work

    def _take_in(self, item: RequestItem) -> None:
        match item:
            case NewRequest():
                try:
                    jobs = self._make_jobs(item)
                except (ValueError, TypeError) as error:
                    self.outbox.put(Error.from_exception(item.request_id, error, invalid=True))
                else:
                    self._start_jobs(item, jobs)
            case AbortRequest():
                self._forget(item.request_id)

    def _start_jobs(self, item: NewRequest, jobs: list[DiffusionJob]) -> None:
        assert item.request.diffusion is not None
        self._requests[item.request_id] = _Request(item.request.diffusion, item.streams_output)
        for job in jobs:
            self._executor.add(job)

    def _make_jobs(self, item: NewRequest) -> list[DiffusionJob]:
        """
        Raises:
            ValueError, TypeError: The request is wrong for this stage.
        """
        diffusion = item.request.diffusion
        if diffusion is None:
            raise ValueError("the request has no diffusion parameters (StageRequest.diffusion)")
        params = diffusion.params
        pipeline_class = self._info.class_for([*(["image"] if diffusion.images else []), *diffusion.media])
        known = call_parameters(pipeline_class)
        arguments = {**call_arguments(pipeline_class, params), **_prompt_arguments(pipeline_class, item)}
        arguments |= {name: restore(value, known[name].annotation) for name, value in diffusion.media.items()}
        if diffusion.images and "image" not in arguments:  # The stage input processor may have changed them.
            images = [to_pil(image) for image in diffusion.images]
            arguments["image"] = self._info.image_argument(pipeline_class, images)
        sources = item.sources.values()
        encoded_prompts = next(filter(None, map(unpack_encoded_prompts, sources)), None)
        max_bytes = self._config.max_trajectory_bytes // len(diffusion.seeds)
        return [
            DiffusionJob(
                request_id=item.request_id,
                index=index,
                pipeline_class=pipeline_class,
                arguments=arguments,
                seed=seed,
                latents_only=params.output_format == "latent",
                adapter=Adapter(diffusion.lora_name, diffusion.lora_path, params.lora_scale),
                preview_every=params.preview_every if item.streams_output else 0,
                stochastic_sampling=params.stochastic_sampling,
                trajectory_bytes=max_bytes if params.return_trajectory else None,
                encoded_prompts=encoded_prompts,
                on_progress=partial(self._on_progress, item.request_id),
                priority=item.request.priority,
            )
            for index, seed in enumerate(diffusion.seeds[:1] if self._config.part == "encoder" else diffusion.seeds)
        ]

    # Outputs.

    def step(self) -> None:
        started = time.perf_counter()
        ends, num_computed = self._executor.step()
        if num_computed:
            self._count_step(time.perf_counter() - started, num_computed)
        for end in ends:
            self._on_end(end)

    def _on_progress(self, request_id: str, progress: Progress) -> None:
        if self._requests[request_id].streams_output:
            piece = StageOutput(
                request_id=request_id,
                stage_id=self._stage_id,
                tensors={} if progress.preview is None else {"image": progress.preview},
                data={"index": progress.index},
                step=progress.step,
                num_steps=progress.num_steps,
                is_last=False,
            )
            self.outbox.put(Stream(request_id, piece))

    def _on_end(self, end: JobEnd) -> None:
        request_id = end.job.request_id
        request = self._requests.get(request_id)
        if request is None:
            return  # Another output of the same request has failed in this step.
        if end.error is not None:
            self._forget(request_id)
            error = Error.from_exception(request_id, end.error, end.is_invalid)
            error.traceback = end.traceback
            self.outbox.put(error)
            return
        request.ends[end.job.index] = end
        if self._config.part == "encoder":
            del self._requests[request_id]
            self._emit(request_id, *pack_encoded_prompts(end.output))
        elif len(request.ends) == len(request.diffusion.seeds):
            del self._requests[request_id]
            self._encoding.submit(self._encode, request_id, request)

    def _encode(self, request_id: str, request: _Request) -> None:
        """Runs on the encoding thread: encoding files is slow and needs no device."""
        ends = [request.ends[index] for index in range(len(request.ends))]
        outputs, sounds = [end.output for end in ends], [end.sound for end in ends if end.sound is not None]
        params = request.diffusion.params
        params = msgspec.structs.replace(params, fps=params.fps or default_fps(self._info.pipeline_class))
        try:
            sample_rate = self._executor.runner.sample_rate
            tensors, data = encode_outputs(self._info.output_type, outputs, params, sample_rate, sounds)
            tensors |= pack_trajectories([end.trajectory for end in ends if end.trajectory is not None])
            self._emit(request_id, tensors, data)
        except Exception as error:
            self.outbox.put(Error.from_exception(request_id, error))

    def _emit(self, request_id: str, tensors: dict[str, torch.Tensor], data: dict[str, Any]) -> None:
        output = StageOutput(request_id=request_id, stage_id=self._stage_id, tensors=tensors, data=data)
        self.outbox.put(Result(request_id, output))

    def _forget(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is not None:
            self._executor.abort(request_id)


def _prompt_arguments(pipeline_class: type, item: NewRequest) -> dict[str, Any]:
    """The prompt as arguments of the pipeline's call: the caller's, or the result of the stage input processor."""
    stage_input = item.stage_input or StageInput(prompt=item.request.prompt)
    arguments = dict(stage_input.additional_information)
    if stage_input.prompt is not None and "prompt" in call_parameters(pipeline_class):
        arguments["prompt"] = stage_input.prompt
    if stage_input.prompt_embeds is not None:
        takes_list = "list[" in str(inspect.signature(pipeline_class.__call__).parameters["prompt_embeds"].annotation)
        arguments["prompt_embeds"] = [stage_input.prompt_embeds] if takes_list else stage_input.prompt_embeds[None]
    return arguments
