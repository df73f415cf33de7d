# SPDX-License-Identifier: Apache-2.0
"""The model runner of talkers: what a step has sampled is made into the next step's input, inside the step.

It keeps requests in slots and sorts the rows of a step; what the rows hold is the business of the model's
`FeedbackStrategy`. A request's slot is taken with its first step and released when it has ended, however it ended.
"""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu_model_runner import ExecuteModelState

from vllm_omni.core.sched.output import InputChunk, OmniModelRunnerOutput
from vllm_omni.model_executor.feedback import FedBackRows, FeedbackStrategy, InputPiece, SupportsFeedback
from vllm_omni.worker.feedback_rows import RequestSlots, Rows, StepRows, sort_rows
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner
from vllm_omni.worker.host_copy import HostCopy

Outputs = dict[str, torch.Tensor]


class FeedbackARModelRunner(OmniGPUModelRunner):
    """vLLM's two phases around a model that declares `SupportsFeedback`.

    Attributes:
        slots: Of all requests that have begun.
    """

    strategy: FeedbackStrategy

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        if not self.enable_prompt_embeds:
            raise ValueError("a model whose input is fed back needs the engine argument enable_prompt_embeds=True")
        self.slots = RequestSlots()
        self._batch = BatchSlots()
        self._emitted: EmittedRows | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.get_model()
        assert isinstance(model, SupportsFeedback)
        self.strategy = model.make_feedback_strategy(self.scheduler_config.max_num_seqs)

    def abandon_step(self) -> list[str]:
        return [*super().abandon_step(), *self.slots.req_ids]

    # ---- requests come and go

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        corrections = super()._update_states(scheduler_output)
        for data in scheduler_output.scheduled_new_reqs:
            self.omni_info.pop(data.req_id, None)  # The strategy has what it needs of it.
        self._batch.update(self.input_batch.req_ids, self.slots, self.device)
        return corrections

    def _remember_input(self, data: NewRequestData) -> None:
        super()._remember_input(data)
        assert data.sampling_params is not None, "stages take no pooling requests"
        information = dict(self.omni_info.get(data.req_id, {}))
        is_complete = data.req_id not in self.open_inputs
        self.strategy.begin(self.slots.lowest_free, information, data.sampling_params, is_complete)
        self.slots.take(data.req_id)
        self._batch.clear()

    def _extend_inputs(self, input_chunks: dict[str, list[InputChunk]]) -> None:
        missing = [
            (req_id, chunk) for req_id, chunks in input_chunks.items() for chunk in self._missing(req_id, chunks)
        ]
        if missing:
            self.strategy.extend([self._as_piece(req_id, chunk) for req_id, chunk in missing])
        for req_id, chunk in missing:
            self._note_arrived(req_id, chunk)

    def _as_piece(self, req_id: str, chunk: InputChunk) -> InputPiece:
        information = {} if chunk.information is None else chunk.information.to_dict()
        return InputPiece(self.slots[req_id], information, chunk.is_last)

    def _forget(self, req_id: str) -> None:
        super()._forget(req_id)
        slot = self.slots.release(req_id)
        if slot is not None:
            self.strategy.end(slot)
            self._batch.clear()

    # ---- before the forward

    def _preprocess(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        num_tokens = scheduler_output.total_num_scheduled_tokens
        self.is_token_ids.np[:num_tokens] = False  # vLLM need not embed what is overwritten below.
        prepared = super()._preprocess(scheduler_output, *args, **kwargs)
        self._write_inputs(self._sort_rows(), self.inputs_embeds.gpu[:num_tokens])
        return prepared

    def _sort_rows(self) -> StepRows:
        batch, num_reqs = self.input_batch, self.input_batch.num_reqs
        return sort_rows(
            self._batch.slots,
            self.slots.num_frames,
            batch.num_computed_tokens_cpu[:num_reqs],
            batch.num_prompt_tokens[:num_reqs],
            np.diff(self.query_start_loc.np[: num_reqs + 1]),
        )

    def _write_inputs(self, step: StepRows, embeds: torch.Tensor) -> None:
        for prompt in step.prompts:
            stop = prompt.row + prompt.stop - prompt.start
            embeds[prompt.row : stop] = self.strategy.prompt_rows(prompt.slot, prompt.start, prompt.stop)
        emitted: list[tuple[np.ndarray, Outputs]] = []
        if step.new.num_rows:
            where, rows = self._take_rows(step.new, len(embeds))
            fed_back = self.strategy.feed_back(rows)
            embeds[where] = fed_back.embeds
            self.slots.num_frames[step.new.slots] += 1
            emitted.append((step.new.requests, fed_back.outputs))
        if step.known is not None:
            where, rows = self._take_rows(step.known, len(embeds))
            fed_back = self.strategy.replay(rows)
            embeds[where] = fed_back.embeds
            emitted += self._unemitted(step.known, fed_back.outputs)
        self._emitted = EmittedRows.join(emitted) if emitted else None

    def _unemitted(self, known: Rows, outputs: Outputs) -> list[tuple[np.ndarray, Outputs]]:
        """Of the rows that are computed again those that have not left: a row leaves with the step that samples the
        next token, so the last token's has been made by a step that raised."""
        num_reqs = self.input_batch.num_reqs
        num_tokens = self.input_batch.num_tokens_no_spec[:num_reqs] - self.input_batch.num_prompt_tokens[:num_reqs]
        indices = np.flatnonzero(known.frames == num_tokens[known.requests] - 1)
        if not len(indices):
            return []
        where = self._to_device(indices)
        return [(known.requests[indices], {name: output[where] for name, output in outputs.items()})]

    def _take_rows(self, rows: Rows, num_tokens: int) -> tuple[torch.Tensor | slice, FedBackRows]:
        """Where the rows are in the step, and what they feed back, in one copy to the device."""
        if rows.num_rows == num_tokens == self.input_batch.num_reqs:  # One row for each request of the batch.
            where: torch.Tensor | slice = slice(0, num_tokens)
            slots, frames = self._batch.device_slots, self._to_device(rows.frames)
        else:
            where, slots, frames = self._to_device(np.stack((rows.rows, rows.slots, rows.frames)))
        return where, FedBackRows(self.input_ids.gpu[where].long(), slots, frames)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return async_tensor_h2d(array, device=self.device)

    # ---- after it

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:  # type: ignore[override]
        state = self.execute_model_state
        if state is not None:
            self._remember(state)
        sample_tokens: Any = super().sample_tokens  # whose type its decorator hides
        output = sample_tokens(grammar_output)
        if state is None or self._emitted is None:
            return output
        emitted, self._emitted = self._emitted, None
        return OmniModelRunnerOutput.from_base(output, emitted.wait(len(output.req_ids)))

    def _remember(self, state: ExecuteModelState) -> None:
        """A request samples unless its prompt, or what it computes again, goes on in the next step."""
        idle = self.discard_request_mask.np[: self.input_batch.num_reqs]
        slots, hidden_states = self._batch.device_slots, state.sample_hidden_states
        if idle.any():
            samples = self._to_device(np.flatnonzero(~idle))
            slots, hidden_states = slots[samples], hidden_states[samples]
        self.strategy.remember(slots, hidden_states)


class BatchSlots:
    """The slots of the batch's requests, looked up again only when the batch has changed.

    Attributes:
        slots: `[R]` int64.
        device_slots: The same on the device.
    """

    slots: np.ndarray
    device_slots: torch.Tensor

    def __init__(self) -> None:
        self._req_ids: list[str] = []

    def clear(self) -> None:
        """A request came or went; another may come by its id."""
        self._req_ids = []

    def update(self, req_ids: list[str], slots: RequestSlots, device: torch.device) -> None:
        if req_ids == self._req_ids and req_ids:
            return
        self._req_ids = list(req_ids)
        self.slots = slots.of(req_ids)
        self.device_slots = torch.from_numpy(self.slots).to(device)


class EmittedRows:
    """The outputs of rows on their way to the CPU."""

    @classmethod
    def join(cls, parts: list[tuple[np.ndarray, Outputs]]) -> "EmittedRows":
        """Of one part or more, of different requests and with outputs of the same names."""
        (requests, outputs), *others = parts
        for more_requests, more in others:
            requests = np.concatenate((requests, more_requests))
            outputs = {name: torch.cat((output, more[name])) for name, output in outputs.items()}
        return cls(requests, outputs)

    def __init__(self, requests: np.ndarray, outputs: Outputs) -> None:
        """
        Args:
            requests: `[N]`, the rows' requests, by their index in the batch; none has two.
            outputs: By name, `[N, ...]`.
        """
        self._requests = requests
        self._names = list(outputs)
        self._copy = HostCopy(list(outputs.values()))

    def wait(self, num_reqs: int) -> list[dict[str, torch.Tensor] | None]:
        """For each request of the batch its row `[1, ...]` of each output, or None."""
        emitted: list[dict[str, torch.Tensor] | None] = [None] * num_reqs
        rows = [tensor.clone().split(1) for tensor in self._copy.wait()]
        for request, *parts in zip(self._requests.tolist(), *rows, strict=True):
            emitted[request] = dict(zip(self._names, parts, strict=True))
        return emitted
