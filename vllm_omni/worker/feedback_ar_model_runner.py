# SPDX-License-Identifier: Apache-2.0
"""The model runner of models with feedback: what a step sampled becomes the next step's input, inside the step.

It keeps requests in slots and sorts the rows of a step; the model's `FeedbackStrategy` computes the rows. A request
takes a slot with its first step and releases it when it ends, however it ends.
"""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu_model_runner import ExecuteModelState

from vllm_omni.core.sched.output import InputChunk, OmniModelRunnerOutput
from vllm_omni.model_executor.feedback import (
    FedBack,
    FedBackRows,
    FeedbackStrategy,
    InputPiece,
    RequestInput,
    SupportsFeedback,
)
from vllm_omni.worker.feedback_rows import PromptRows, RequestSlots, StepRows, TokenRows, sort_rows
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner
from vllm_omni.worker.guided_pairs import GuidedPairs
from vllm_omni.worker.step import EmittedRows, Outputs


class FeedbackARModelRunner(OmniGPUModelRunner):
    """vLLM's two phases around a model that declares `SupportsFeedback`.

    Attributes:
        slots: Of all requests that have started.
    """

    strategy: FeedbackStrategy

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        if not self.enable_prompt_embeds:
            raise ValueError("a model whose input is fed back needs the engine argument enable_prompt_embeds=True")
        self.slots = RequestSlots()
        self._batch = BatchSlots()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.get_model()
        assert isinstance(model, SupportsFeedback)
        self.strategy = model.make_feedback_strategy(self.scheduler_config.max_num_seqs)

    def reset_encoder_cache(self) -> None:
        super().reset_encoder_cache()
        if self.strategy.sound_cache is not None:
            self.strategy.sound_cache.clear()

    def discard_step(self) -> list[str]:
        return [*super().discard_step(), *self.slots.req_ids]

    # ---- requests start and end

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        corrections = super()._update_states(scheduler_output)
        for data in scheduler_output.scheduled_new_reqs:
            self.omni_info.pop(data.req_id, None)  # The strategy has taken what it needs.
        self._batch.update(self.input_batch.req_ids, self.slots, self.guided_pairs, self.device)
        return corrections

    def _add_input(self, data: NewRequestData) -> None:
        super()._add_input(data)
        pair = self.guided_pairs.of(data.req_id)
        if pair is not None and not self.strategy.takes_guidance:
            raise NotImplementedError("this model's feedback strategy has no guidance")
        self._batch.clear()
        slot = None if pair is None else self.slots.get(pair.other(data.req_id))
        if not self.guided_pairs.is_twin(data.req_id):
            self._begin(data, self.slots.lowest_free if slot is None else slot)
        if slot is None:
            self.slots.take(data.req_id)
        else:
            self.slots.share(data.req_id, slot)

    def _begin(self, data: NewRequestData, slot: int) -> None:
        assert data.sampling_params is not None, "stages take no pooling requests"
        request = RequestInput(
            token_ids=data.prompt_token_ids or [],
            information=dict(self.omni_info.get(data.req_id, {})),
            params=data.sampling_params,
            is_complete=data.req_id not in self.open_inputs,
        )
        self.strategy.begin(slot, request)

    def _extend_inputs(self, input_chunks: dict[str, list[InputChunk]]) -> None:
        new = [(req_id, chunk) for req_id, chunks in input_chunks.items() for chunk in self._new_chunks(req_id, chunks)]
        if new:
            self.strategy.extend([self._as_piece(req_id, chunk) for req_id, chunk in new])
        for req_id, chunk in new:
            self._mark_received(req_id, chunk)

    def _as_piece(self, req_id: str, chunk: InputChunk) -> InputPiece:
        information = {} if chunk.information is None else chunk.information.to_dict()
        return InputPiece(self.slots[req_id], information, chunk.is_last)

    def _remove_input(self, req_id: str) -> None:
        super()._remove_input(req_id)
        slot = self.slots.release(req_id)
        self._batch.clear()
        if slot is not None:
            self.strategy.end(slot)

    # ---- before the forward

    def _preprocess(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        num_tokens = scheduler_output.total_num_scheduled_tokens
        self.is_token_ids.np[:num_tokens] = False  # vLLM does not embed what is overwritten below.
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
            if self._batch.is_twin[prompt.request]:
                embeds[prompt.row : stop] = self.strategy.twin_rows(prompt.start, prompt.stop)
            else:
                embeds[prompt.row : stop] = self.strategy.prompt_rows(prompt.slot, prompt.start, prompt.stop)
        if self.strategy.row_mask is not None:
            self._write_mask(step.prompts, self.strategy.row_mask[: len(embeds)])
        emitted: list[tuple[np.ndarray, FedBack]] = []
        if step.new.num_rows:
            where, rows = self._take_rows(step.new, len(embeds))
            fed_back = self.strategy.feed_back(rows)
            embeds[where] = fed_back.embeds
            self.slots.num_frames[step.new.slots] += 1
            emitted.append((step.new.requests, fed_back))
        if step.known is not None:
            where, rows = self._take_rows(step.known, len(embeds))
            fed_back = self.strategy.replay(rows)
            embeds[where] = fed_back.embeds
            emitted += self._unemitted(step.known, fed_back)
        first = self._first_outputs(step.prompts)
        self._step.emitted = EmittedRows.join(emitted, first) if emitted or first else None

    def _write_mask(self, prompts: list[PromptRows], mask: torch.Tensor) -> None:
        mask.fill_(True)
        for prompt in prompts:
            stop = prompt.row + prompt.stop - prompt.start
            mask[prompt.row : stop] = self.strategy.prompt_mask(prompt.slot, prompt.start, prompt.stop)

    def _first_outputs(self, prompts: list[PromptRows]) -> dict[int, Outputs]:
        """First outputs of the requests that sample their first token in this step, by their index in the batch."""
        first = {}
        for prompt in prompts:
            samples = prompt.stop == self.input_batch.num_tokens_no_spec[prompt.request]
            if samples and (outputs := self.strategy.first_outputs(prompt.slot)):
                first[prompt.request] = outputs
        return first

    def _unemitted(self, known: TokenRows, fed_back: FedBack) -> list[tuple[np.ndarray, FedBack]]:
        """Rows that were computed before and have not left. A row leaves with the step that samples the next token, so
        that of the last token was computed by a step that raised, or that waited for the other sequence of a pair, or
        in this step by that one."""
        num_reqs = self.input_batch.num_reqs
        num_tokens = self.input_batch.num_tokens_no_spec[:num_reqs] - self.input_batch.num_prompt_tokens[:num_reqs]
        is_due = (known.frames == num_tokens[known.requests] - 1) & ~self._batch.is_twin[known.requests]
        indices = np.flatnonzero(is_due)
        if not len(indices):
            return []
        where = self._to_device(indices)
        selected = FedBack(
            embeds=fed_back.embeds[where],
            outputs={name: output[where] for name, output in fed_back.outputs.items()},
            is_last=None if fed_back.is_last is None else fed_back.is_last[where],
        )
        return [(known.requests[indices], selected)]

    def _take_rows(self, rows: TokenRows, num_tokens: int) -> tuple[torch.Tensor | slice, FedBackRows]:
        """The rows' indices in the step, and what they feed back, in one copy to the device."""
        if rows.num_rows == num_tokens == self.input_batch.num_reqs:  # One row for each request of the batch.
            where: torch.Tensor | slice = slice(0, num_tokens)
            slots, frames = self._batch.device_slots, self._to_device(rows.frames)
        else:
            where, slots, frames = self._to_device(np.stack((rows.rows, rows.slots, rows.frames)))
        return where, FedBackRows(self.input_ids.gpu[where].long(), slots, frames)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return async_tensor_h2d(array, device=self.device)

    # ---- after the forward

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:  # type: ignore[override]
        state, pairs = self.execute_model_state, self._step.pairs
        if state is not None:
            self._save_hidden_states(state)
        sample_tokens: Any = super().sample_tokens  # its decorator hides the type
        output = sample_tokens(grammar_output)
        emitted, self._step.emitted = self._step.emitted, None
        if state is None or emitted is None:
            return output
        rows, ended = emitted.wait(len(output.req_ids))
        for req_id in pairs.waiting:
            rows[output.req_ids.index(req_id)] = None  # They leave when it samples.
        ended_req_ids = frozenset(output.req_ids[index] for index in ended)
        return OmniModelRunnerOutput.from_base(output, pooler_output=rows, ended_req_ids=ended_req_ids)

    def _save_hidden_states(self, state: ExecuteModelState) -> None:
        """A request samples unless its prompt, or what it computes again, continues in the next step."""
        samples = ~self.discard_request_mask.np[: self.input_batch.num_reqs]
        for req_id in self._step.pairs.waiting:
            samples[self.input_batch.req_id_to_index[req_id]] = False
        is_twin = self._batch.is_twin
        if is_twin.any():
            self.strategy.save_twin_states(*self._select(samples & is_twin, state))
        self.strategy.save_hidden_states(*self._select(samples & ~is_twin, state))

    def _select(self, selected: np.ndarray, state: ExecuteModelState) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and hidden states of these requests of the batch."""
        slots, hidden_states = self._batch.device_slots, state.sample_hidden_states
        if selected.all():
            return slots, hidden_states
        where = self._to_device(np.flatnonzero(selected))
        return slots[where], hidden_states[where]


class BatchSlots:
    """The slots of the batch's requests, looked up again only when the batch changes.

    Attributes:
        slots: `[R]` int64.
        device_slots: The same on the device.
        is_twin: `[R]` bool, unconditional sequences of requests with guidance.
    """

    slots: np.ndarray
    device_slots: torch.Tensor
    is_twin: np.ndarray

    def __init__(self) -> None:
        self._req_ids: list[str] = []

    def clear(self) -> None:
        """A request started or ended; another can have its id."""
        self._req_ids = []

    def update(self, req_ids: list[str], slots: RequestSlots, pairs: GuidedPairs, device: torch.device) -> None:
        if req_ids == self._req_ids and req_ids:
            return
        self._req_ids = list(req_ids)
        self.slots = slots.of(req_ids)
        self.device_slots = torch.from_numpy(self.slots).to(device)
        self.is_twin = np.array([pairs.is_twin(req_id) for req_id in req_ids], dtype=bool)
