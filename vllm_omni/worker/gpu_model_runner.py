# SPDX-License-Identifier: Apache-2.0
"""What the autoregressive and the one-step model runner share: the state of requests and the hooks before a forward.

Prompt embeddings are overlaid by vLLM itself. Which rows leave the engine is the runners' own business.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_omni.core.sched.output import InputChunk, OmniNewRequestData, OmniSchedulerOutput
from vllm_omni.engine.settings import OmniEngineSettings
from vllm_omni.model_executor.interfaces import RequestSpan
from vllm_omni.worker.input_chunks import extend_information
from vllm_omni.worker.model_hooks import ModelHooks


class OmniGPUModelRunner(GPUModelRunner):
    """vLLM's model runner, with additional information of requests and the model's hooks.

    Attributes:
        omni_info: Each request's additional information, by vLLM's internal id, tensors on the CPU. It lives from the
            request's first step to its end, preemptions included, and the model's hooks may write to it.
        open_inputs: Requests of whose input more is to come.
        num_chunks: How many chunks of their input have arrived, of those that have any.
        without_rows: Requests that emit nothing but tokens, because nobody reads more.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.settings = OmniEngineSettings.from_vllm_config(vllm_config)
        self.omni_info: dict[str, dict[str, Any]] = {}
        self.open_inputs: set[str] = set()
        self.num_chunks: dict[str, int] = {}
        self.without_rows: set[str] = set()
        self.hooks = ModelHooks()
        self.preprocessed: dict[str, torch.Tensor] = {}
        self._num_scheduled: dict[str, int] = {}
        self._spans: list[RequestSpan] | None = None
        self._draws: dict[str, tuple[int, torch.Tensor]] = {}  # tokens at the last draw; the generator before it

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.hooks = ModelHooks.of(self.get_model())

    def abandon_step(self) -> list[str]:
        """Forgets the step that raised. Returns all requests that are known here."""
        self.execute_model_state = None
        self._spans = None
        return [*self.requests, *self.omni_info, *self.open_inputs, *self.num_chunks, *self.without_rows]

    @property
    def spans(self) -> list[RequestSpan]:
        """The requests of the current step, in batch order: made when first asked for."""
        if self._spans is None:
            self._spans = self._make_spans()
        return self._spans

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        # Before vLLM's, which asks for M-RoPE positions. Ended requests first: an id may end and start in one step.
        self._spans, self._num_scheduled = None, scheduler_output.num_scheduled_tokens
        for req_id in scheduler_output.finished_req_ids:
            self._forget(req_id)
        for data in scheduler_output.scheduled_new_reqs:
            self._remember_input(data)
        if isinstance(scheduler_output, OmniSchedulerOutput):
            self._extend_inputs(scheduler_output.input_chunks)
        return super()._update_states(scheduler_output)

    def _remember_input(self, data: NewRequestData) -> None:
        if not isinstance(data, OmniNewRequestData):
            return  # It brought nothing besides its prompt.
        if data.additional_information is not None:
            self.omni_info[data.req_id] = data.additional_information.to_dict()
        if not data.is_input_complete:
            self.open_inputs.add(data.req_id)
        if not data.emits_rows:
            self.without_rows.add(data.req_id)

    def _extend_inputs(self, input_chunks: dict[str, list[InputChunk]]) -> None:
        for req_id, chunks in input_chunks.items():
            for chunk in self._missing(req_id, chunks):
                self._extend_input(req_id, chunk)
                self._note_arrived(req_id, chunk)

    def _missing(self, req_id: str, chunks: list[InputChunk]) -> list[InputChunk]:
        """Those that have not arrived yet: after a step that raised they are sent again."""
        return [chunk for chunk in chunks if chunk.index >= self.num_chunks.get(req_id, 0)]

    def _note_arrived(self, req_id: str, chunk: InputChunk) -> None:
        self.num_chunks[req_id] = chunk.index + 1
        if chunk.is_last:
            self.open_inputs.discard(req_id)

    def _extend_input(self, req_id: str, chunk: InputChunk) -> None:
        information = dict(self.omni_info.get(req_id, {}))
        more = {} if chunk.information is None else chunk.information.to_dict()
        if self.hooks.input_chunks is not None:
            self.hooks.input_chunks.extend_information(information, more, chunk.is_last)
        else:
            extend_information(information, more)
        self.omni_info[req_id] = information  # the whole chunk, or nothing of it

    def _forget(self, req_id: str) -> None:
        self.omni_info.pop(req_id, None)
        self.open_inputs.discard(req_id)
        self.num_chunks.pop(req_id, None)
        self.without_rows.discard(req_id)
        self._draws.pop(req_id, None)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:  # type: ignore[override]
        if self.execute_model_state is not None:
            self._prepare_draws()
        sample_tokens: Any = super().sample_tokens  # whose type its decorator hides
        return sample_tokens(grammar_output)

    def _prepare_draws(self) -> None:
        """Lets a request with a seed draw each token once: a token that a step which raised has drawn, too."""
        for index, generator in self.input_batch.generators.items():
            req_id = self.input_batch.req_ids[index]
            num_tokens = len(self.requests[req_id].output_token_ids)
            drawn = self._draws.get(req_id)
            if drawn is not None and drawn[0] == num_tokens:
                generator.set_state(drawn[1])
            else:
                self._draws[req_id] = num_tokens, generator.get_state()

    def _init_mrope_positions(self, req_state: CachedRequestState) -> None:
        positions = self.omni_info.get(req_state.req_id, {}).get("mrope_positions")
        if positions is None:
            super()._init_mrope_positions(req_state)
            return
        req_state.mrope_positions = positions
        # A generated token's position is its index plus this.
        req_state.mrope_position_delta = int(positions.max()) + 1 - positions.shape[1]

    def _preprocess(self, scheduler_output: SchedulerOutput, num_input_tokens: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._preprocess(scheduler_output, num_input_tokens, *args, **kwargs)
        if self.hooks.preprocess is None:
            return prepared
        input_ids, inputs_embeds, *rest = prepared
        num_tokens = scheduler_output.total_num_scheduled_tokens
        replaced, self.preprocessed = self.hooks.preprocess.preprocess(
            self.input_ids.gpu[:num_tokens],
            None if inputs_embeds is None else inputs_embeds[:num_tokens],
            self.spans,
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
        if self.hooks.wants_information:
            kwargs["runtime_additional_information"] = [span.additional_information for span in self.spans]
        return super()._model_forward(*args, **kwargs)

    def _make_spans(self) -> list[RequestSpan]:
        batch = self.input_batch
        spans, start = [], 0
        for index, req_id in enumerate(batch.req_ids):
            request = self.requests[req_id]
            assert request.sampling_params is not None, "stages take no pooling requests"
            stop = start + self._num_scheduled[req_id]
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
                )
            )
            start = stop
        return spans
