# SPDX-License-Identifier: Apache-2.0
"""The base of our model runners: requests' additional information, the model's hooks before a forward, guidance.

vLLM itself overlays prompt embeddings. Each subclass decides which rows leave the engine.
"""

import inspect
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_omni.core.sched.output import InputChunk, OmniNewRequestData, OmniSchedulerOutput
from vllm_omni.engine.engine_args import OmniEngineSettings
from vllm_omni.model_executor.interfaces import (
    RequestSpan,
    SupportsAuxHiddenStates,
    SupportsOmniOutput,
    SupportsPostprocess,
    SupportsPreprocess,
    SupportsSuppressedTokens,
)
from vllm_omni.worker.guided_pairs import GuidedPairs
from vllm_omni.worker.step import RunnerStep

_MAX_STEPS = 2
"""That are in flight at once: the most that can be computed again."""


@dataclass(frozen=True)
class ModelHooks:
    """The hooks of `model_executor.interfaces` that a model has.

    Attributes:
        preprocess, output, postprocess: The model, where it has the hook.
        aux_layers: The layers whose inputs are captured.
        takes_information: Its forward takes `runtime_additional_information`.
    """

    preprocess: SupportsPreprocess | None = None
    output: SupportsOmniOutput | None = None
    postprocess: SupportsPostprocess | None = None
    aux_layers: tuple[int, ...] = ()
    takes_information: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> "ModelHooks":
        return cls(
            preprocess=model if isinstance(model, SupportsPreprocess) else None,
            output=model if isinstance(model, SupportsOmniOutput) else None,
            postprocess=model if isinstance(model, SupportsPostprocess) else None,
            aux_layers=tuple(model.omni_aux_hidden_state_layers) if isinstance(model, SupportsAuxHiddenStates) else (),
            takes_information="runtime_additional_information" in inspect.signature(model.forward).parameters,
        )

    @property
    def emits_prompt_rows(self) -> bool:
        return self.output is None or self.output.omni_output_rows == "all"


class OmniGPUModelRunner(GPUModelRunner):
    """vLLM's model runner, with additional information of requests and the model's hooks.

    Attributes:
        omni_info: Each request's additional information, by vLLM's internal id, tensors on the CPU. It exists from the
            request's first step to its end, preemptions included, and the model's hooks may write to it.
        open_inputs: Requests whose input is not complete.
        num_chunks: How many chunks of its input a request has received; absent for none.
        without_rows: Requests that emit tokens only.
        guided_pairs: Of the requests with guidance.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.settings = OmniEngineSettings.from_vllm_config(vllm_config)
        self.omni_info: dict[str, dict[str, Any]] = {}
        self.open_inputs: set[str] = set()
        self.num_chunks: dict[str, int] = {}
        self.without_rows: set[str] = set()
        self.guided_pairs = GuidedPairs()
        self.hooks = ModelHooks()
        self._step = RunnerStep()
        self._draws: dict[str, dict[int, torch.Tensor]] = {}  # the generator before each of the last draws, by tokens

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.get_model()
        self.hooks = ModelHooks.of(model)
        if isinstance(model, SupportsSuppressedTokens):
            self.sampler = SuppressingSampler(self.sampler, model.suppressed_tokens())

    def discard_step(self) -> list[str]:
        """Discards the step that raised. Returns the ids of all requests that are held here."""
        self.execute_model_state = None
        self._step = RunnerStep()
        batch = self.input_batch
        batch.prev_sampled_token_ids = batch.prev_req_id_to_index = None
        batch.sampled_token_ids_cpu = batch.async_copy_ready_event = None
        return [*self.requests, *self.omni_info, *self.open_inputs, *self.num_chunks, *self.without_rows]

    @property
    def spans(self) -> list[RequestSpan]:
        """The requests of the current step, in batch order; made on first use."""
        if self._step.spans is None:
            self._step.spans = self._make_spans()
        return self._step.spans

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        # Before vLLM's, which reads M-RoPE positions. Ended requests first: an id may end and start in one step.
        self._step = RunnerStep(scheduler_output.num_scheduled_tokens)
        for req_id in scheduler_output.finished_req_ids:
            self._remove_input(req_id)
        for data in scheduler_output.scheduled_new_reqs:
            self._add_input(data)
        if isinstance(scheduler_output, OmniSchedulerOutput):
            self._extend_inputs(scheduler_output.input_chunks)
        corrections = super()._update_states(scheduler_output)
        self._step.pairs = self.guided_pairs.select(self._sampling_index)
        return corrections

    def _sampling_index(self, req_id: str) -> int | None:
        """The index in the batch of a request whose last token this step computes; None for any other."""
        num_scheduled = self._step.num_scheduled_tokens.get(req_id)
        if num_scheduled is None:
            return None
        index = self.input_batch.req_id_to_index[req_id]
        stop = int(self.input_batch.num_computed_tokens_cpu[index]) + num_scheduled
        return index if stop >= self.requests[req_id].num_tokens else None

    def _add_input(self, data: NewRequestData) -> None:
        if not isinstance(data, OmniNewRequestData):
            return  # It has a prompt only.
        if data.additional_information is not None:
            self.omni_info[data.req_id] = data.additional_information.to_dict()
        if not data.is_input_complete:
            self.open_inputs.add(data.req_id)
        if not data.emits_rows:
            self.without_rows.add(data.req_id)
        if data.pair is not None:
            self.guided_pairs.add(data.pair)

    def _extend_inputs(self, input_chunks: dict[str, list[InputChunk]]) -> None:
        for req_id, chunks in input_chunks.items():
            for chunk in self._new_chunks(req_id, chunks):
                self._extend_input(req_id, chunk)
                self._mark_received(req_id, chunk)

    def _new_chunks(self, req_id: str, chunks: list[InputChunk]) -> list[InputChunk]:
        """The chunks that were not received yet: after a step that raised they are sent again."""
        return [chunk for chunk in chunks if chunk.index >= self.num_chunks.get(req_id, 0)]

    def _mark_received(self, req_id: str, chunk: InputChunk) -> None:
        self.num_chunks[req_id] = chunk.index + 1
        if chunk.is_last:
            self.open_inputs.discard(req_id)

    def _extend_input(self, req_id: str, chunk: InputChunk) -> None:
        information = dict(self.omni_info.get(req_id, {}))
        more = {} if chunk.information is None else chunk.information.to_dict()
        extend_information(information, more)
        self.omni_info[req_id] = information  # the whole chunk, or, if it does not fit, nothing of it

    def _remove_input(self, req_id: str) -> None:
        self.omni_info.pop(req_id, None)
        self.open_inputs.discard(req_id)
        self.num_chunks.pop(req_id, None)
        self.without_rows.discard(req_id)
        self._draws.pop(req_id, None)
        self.guided_pairs.remove(req_id)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:  # type: ignore[override]
        if self.execute_model_state is not None:
            for req_id in self._step.pairs.waiting:
                # As in a chunk of a prompt that continues: its sample is dropped.
                self.discard_request_mask.np[self.input_batch.req_id_to_index[req_id]] = True
            self._prepare_draws()
        sample_tokens: Any = super().sample_tokens  # its decorator hides the type
        return sample_tokens(grammar_output)

    def _sample(self, logits: torch.Tensor | None, *args: Any, **kwargs: Any) -> SamplerOutput:
        if logits is not None:
            self._step.pairs.combine(logits)
        with _uncompiled():
            output = super()._sample(logits, *args, **kwargs)
        self._step.pairs.share_tokens(output.sampled_token_ids)
        return output

    def _get_prompt_logprobs_dict(self, *args: Any, **kwargs: Any) -> dict[str, LogprobsTensors | None]:
        with _uncompiled():
            return super()._get_prompt_logprobs_dict(*args, **kwargs)

    def _prepare_draws(self) -> None:
        """A request with a seed draws each token from the same state of its generator, also after a step that raised
        and had drawn it."""
        for index, generator in self.input_batch.generators.items():
            req_id = self.input_batch.req_ids[index]
            num_tokens = len(self.requests[req_id].output_token_ids)
            draws = self._draws.setdefault(req_id, {})
            if num_tokens in draws:
                generator.set_state(draws[num_tokens])
                continue
            draws[num_tokens] = generator.get_state()
            draws.pop(num_tokens - _MAX_STEPS, None)

    def _init_mrope_positions(self, req_state: CachedRequestState) -> None:
        positions = self.omni_info.get(req_state.req_id, {}).get("mrope_positions")
        if positions is None:
            super()._init_mrope_positions(req_state)
            return
        req_state.mrope_positions = positions
        # The position of a token without a given one is its index plus this.
        req_state.mrope_position_delta = int(positions.max()) + 1 - positions.shape[1]

    def _calc_mrope_positions(self, scheduler_output: SchedulerOutput) -> None:
        """vLLM counts on after the prompt; a request can have positions of its generated tokens as well."""
        super()._calc_mrope_positions(scheduler_output)
        stop = 0
        for index, req_id in enumerate(self.input_batch.req_ids):
            start, stop = stop, stop + scheduler_output.num_scheduled_tokens[req_id]
            request = self.requests[req_id]
            positions = request.mrope_positions
            assert positions is not None
            if positions.shape[1] <= request.num_prompt_tokens:
                continue  # vLLM has used them.
            first = int(self.input_batch.num_computed_tokens_cpu[index])
            given = positions[:, first : first + stop - start]
            self.mrope_positions.cpu[:, start : start + given.shape[1]] = given

    def _preprocess(self, scheduler_output: SchedulerOutput, num_input_tokens: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._preprocess(scheduler_output, num_input_tokens, *args, **kwargs)
        if self.hooks.preprocess is None:
            return prepared
        input_ids, inputs_embeds, *rest = prepared
        num_tokens = scheduler_output.total_num_scheduled_tokens
        replaced, self._step.preprocessed = self.hooks.preprocess.preprocess(
            self.input_ids.gpu[:num_tokens], None if inputs_embeds is None else inputs_embeds[:num_tokens], self.spans
        )
        if replaced is not None:
            input_ids, inputs_embeds = None, self._place_embeds(replaced, num_input_tokens)
        return (input_ids, inputs_embeds, *rest)

    def _place_embeds(self, embeds: torch.Tensor, num_input_tokens: int) -> torch.Tensor:
        """Puts embeddings `[num_tokens, hidden]` where a CUDA graph reads them; returns that with its padding."""
        buffer = self.inputs_embeds.gpu
        if embeds.data_ptr() != buffer.data_ptr():
            buffer[: embeds.shape[0]].copy_(embeds)
        return buffer[:num_input_tokens]

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.hooks.takes_information:
            kwargs["runtime_additional_information"] = [span.additional_information for span in self.spans]
        return super()._model_forward(*args, **kwargs)

    def _make_spans(self) -> list[RequestSpan]:
        batch = self.input_batch
        spans, start = [], 0
        for index, req_id in enumerate(batch.req_ids):
            request = self.requests[req_id]
            assert request.sampling_params is not None, "stages take no pooling requests"
            stop = start + self._step.num_scheduled_tokens[req_id]
            spans.append(
                RequestSpan(
                    req_id=req_id,
                    start=start,
                    stop=stop,
                    position=int(batch.num_computed_tokens_cpu[index]),
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_tokens=request.num_tokens,
                    sampling_params=request.sampling_params,
                    additional_information=self.omni_info.setdefault(req_id, {}),
                    is_input_complete=req_id not in self.open_inputs,
                    emits_rows=req_id not in self.without_rows,
                    waits_for_twin=req_id in self._step.pairs.waiting,
                )
            )
            start = stop
        return spans


class SuppressingSampler(Sampler):
    """Never samples some tokens; see `SupportsSuppressedTokens`."""

    def __init__(self, sampler: Sampler, suppressed: torch.Tensor) -> None:
        """
        Args:
            sampler: Whose settings it has.
            suppressed: `[vocab]` bool, on the device of the logits.
        """
        super().__init__(sampler.logprobs_mode, sampler.use_fp64_gumbel)
        self.apply_penalties = sampler.apply_penalties  # type: ignore[method-assign]
        self._suppressed = suppressed

    def apply_logits_processors(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().apply_logits_processors(logits.masked_fill_(self._suppressed, float("-inf")), *args, **kwargs)


def _uncompiled() -> AbstractContextManager[None]:
    """Has vLLM's small compiled functions of sampling run as they are.

    Each would be compiled by the first request that needs it, such as one with logprobs, and the stage's other requests
    would wait for that: for most of a minute on a busy CPU, to save less than a millisecond of a step.
    """
    return torch.compiler.set_stance("force_eager")


def extend_information(information: dict[str, Any], chunk: dict[str, Any]) -> None:
    """Appends a chunk's tensors to those of the same name along their first dimension; replaces everything else."""
    for name, value in chunk.items():
        known = information.get(name)
        if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor):
            value = torch.cat((known, value.to(known.device)))
        information[name] = value
