# SPDX-License-Identifier: Apache-2.0
"""The model runner of stages that make a request's whole output in one step: no logits, no sampler, no KV cache."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_omni.core.sched.output import OmniModelRunnerOutput, OmniNewRequestData, RequestWindow
from vllm_omni.model_executor.interfaces import RequestSpan
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner
from vllm_omni.worker.step import HostCopy, Outputs

State = dict[str, Any]


class GPUGenerationModelRunner(OmniGPUModelRunner):
    """One phase: `execute_model` runs the model once over all requests of the step and returns their outputs.

    Attributes:
        states: The model's states of requests that are computed window by window.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.states = ModelStates()
        self._windows: dict[str, RequestWindow] = {}

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> ModelRunnerOutput:
        self._update_states(scheduler_output)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if not num_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        input_ids, positions = self._make_inputs()
        with set_forward_context(None, self.vllm_config, num_tokens=num_tokens):
            outputs = self._model_forward(input_ids=input_ids, positions=positions)
        output = self._make_output(outputs)
        self._save_model_states()
        return output

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        if super().get_kv_cache_spec():
            raise ValueError(f"{type(self.get_model()).__name__} has a KV cache: it needs engine_type 'ar'")
        return {}

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to profile: no KV cache needs memory."""

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        """A step of no requests; without them the model has no input of the right kind."""
        empty = torch.empty(0, device=self.device)
        return empty, empty

    def _make_inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`[num_tokens]` placeholder ids and positions, requests one after the other in batch order."""
        prompts = [self.requests[span.req_id].prompt_token_ids or [] for span in self.spans]
        ids = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32)
        positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
        return ids.to(self.device), positions.to(self.device)

    def _model_forward(self, *args: Any, **kwargs: Any) -> list[Outputs]:
        # Not vLLM's call, which passes arguments that only a language model takes.
        information = [self._load_model_state(span) for span in self.spans]
        return self.model(*args, runtime_additional_information=information, **kwargs)

    def _load_model_state(self, span: RequestSpan) -> dict[str, Any]:
        """The request's information, with the two keys of `SupportsOneStepGeneration`."""
        window = self._windows.get(span.req_id)
        span.additional_information["state"] = {} if window is None else self.states.load(window)
        span.additional_information["is_last"] = window is None or window.is_last
        return span.additional_information

    def _save_model_states(self) -> None:
        for span in self.spans:
            if span.req_id in self._windows:
                self.states.save(self._windows[span.req_id], span.additional_information["state"])

    def _add_input(self, data: NewRequestData) -> None:
        super()._add_input(data)
        if isinstance(data, OmniNewRequestData) and data.window is not None:
            self._windows[data.req_id] = data.window

    def _remove_input(self, req_id: str) -> None:
        super()._remove_input(req_id)
        self._windows.pop(req_id, None)

    def _make_output(self, outputs: list[Outputs]) -> OmniModelRunnerOutput:
        req_ids = [span.req_id for span in self.spans]
        if len(outputs) != len(req_ids):
            raise RuntimeError(f"the model made {len(outputs)} outputs for {len(req_ids)} requests")
        return OmniModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=[[] for _ in req_ids],
            pooler_output=list(_to_host(outputs)),
        )


@dataclass(slots=True)
class _ModelState:
    """
    Attributes:
        last: Index of the last window that was computed.
        before, after: The state before and after it.
    """

    last: int
    before: State
    after: State


class ModelStates:
    """The states that a model keeps between the windows of a request, by the pipeline's request id.

    A step can raise after the model has computed it, here or in another worker, and the window then runs again. So
    the state before the last window is kept as well as the state after it.
    """

    def __init__(self) -> None:
        self._states: dict[str, _ModelState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def load(self, window: RequestWindow) -> State:
        """A copy of the state that this window starts from; empty for the first one.

        Raises:
            RuntimeError: The window before it was not computed.
        """
        return dict(self._before(window))

    def save(self, window: RequestWindow, state: State) -> None:
        """Stores the state after a window. That of a request of one window is not kept."""
        if not (window.is_first and window.is_last):
            self._states[window.request_id] = _ModelState(window.index, self._before(window), state)

    def release(self, request_id: str) -> None:
        """Removes a request's state, if there is one."""
        self._states.pop(request_id, None)

    def _before(self, window: RequestWindow) -> State:
        if window.is_first:
            return {}
        state = self._states.get(window.request_id)
        if state is None or state.last not in (window.index - 1, window.index):
            raise RuntimeError(f"window {window.index} of request {window.request_id!r} came without the one before it")
        return state.before if state.last == window.index else state.after


def _to_host(outputs: list[Outputs]) -> list[Outputs]:
    copies = iter(HostCopy([tensor for output in outputs for tensor in output.values()]).wait())
    return [{name: _own_memory(next(copies)) for name in output} for output in outputs]


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy of it where it is part of a larger one, whose memory it would keep."""
    is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
    return tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)
