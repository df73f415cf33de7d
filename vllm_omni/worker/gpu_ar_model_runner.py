# SPDX-License-Identifier: Apache-2.0
"""The model runner of autoregressive stages: vLLM's two phases, and the model's rows beside the sampled tokens.

A row is the model's output at one position of a request. Every row leaves the engine exactly once: a request that was
preempted, or whose step raised, computes again rows that have left, and a chunked prefill computes rows in steps that
sample nothing, which vLLM must not see as outputs.

With asynchronous scheduling the rows of a step arrive on the CPU while the next one is computed, with its tokens. Which
rows leave with which step is decided before that.
"""

from collections import defaultdict
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import ExecuteModelState

from vllm_omni.core.sched.output import OmniModelRunnerOutput
from vllm_omni.model_executor.interfaces import RequestSpan
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner
from vllm_omni.worker.step import HostCopy, Outputs


class GPUARModelRunner(OmniGPUModelRunner):
    """`execute_model` is vLLM's; `sample_tokens` adds rows and the model's `postprocess`.

    A stage whose output is text, with a model without hooks, runs vLLM's own code and nothing else.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._row_tracker: RowTracker | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if not self.settings.emits_rows:
            return
        self._row_tracker = RowTracker(self.hooks.emits_prompt_rows)
        if self.hooks.aux_layers:
            model = self.get_model()
            assert supports_eagle3(model), f"{type(model).__name__} declares layers but has no way to capture them"
            model.set_aux_hidden_state_layers(self.hooks.aux_layers)
            self.use_aux_hidden_state_outputs = True

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:  # type: ignore[override]
        sample_tokens: Any = super().sample_tokens  # its decorator hides the type
        state, tracker = self.execute_model_state, self._row_tracker
        if state is None or (tracker is None and self.hooks.postprocess is None):
            return sample_tokens(grammar_output)
        # Before vLLM's bookkeeping, which appends the sampled tokens to the requests.
        spans = self.spans
        rows = None if tracker is None else self._select_rows(state, spans, tracker)
        output = sample_tokens(grammar_output)
        if self.hooks.postprocess is not None:
            self._run_postprocess(state, spans)
        if tracker is None or rows is None:
            return output
        leaving = LeavingRows(rows, tracker.emit(spans, rows.parts))
        return OutputWithRows(output, leaving) if isinstance(output, AsyncModelRunnerOutput) else leaving.add_to(output)

    def _remove_input(self, req_id: str) -> None:
        super()._remove_input(req_id)
        if self._row_tracker is not None:
            self._row_tracker.remove(req_id)

    def _select_rows(self, state: ExecuteModelState, spans: list[RequestSpan], tracker: "RowTracker") -> "SelectedRows":
        selected = tracker.select(spans)
        is_read = any(start < stop for start, stop in selected)
        return SelectedRows(self._make_rows(state, spans) if is_read else {}, selected)

    def _make_rows(self, state: ExecuteModelState, spans: list[RequestSpan]) -> Outputs:
        """Outputs by name, each `[num_tokens, ...]`, on the model's device."""
        hidden_states = _unpadded(state.hidden_states, spans)
        if self.hooks.output is None:
            return {"hidden": hidden_states, **self._step.preprocessed}
        aux = state.aux_hidden_states
        aux = None if aux is None else [_unpadded(layer, spans) for layer in aux]
        return self.hooks.output.make_omni_output(hidden_states, aux, self._step.preprocessed, spans)

    def _run_postprocess(self, state: ExecuteModelState, spans: list[RequestSpan]) -> None:
        assert self.hooks.postprocess is not None
        updates = self.hooks.postprocess.postprocess(_unpadded(state.hidden_states, spans), spans)
        for span, update in zip(spans, updates, strict=True):
            span.additional_information.update(update)


class RowTracker:
    """Tracks which rows of each request have left. A request has rows for its prompt and its generated tokens but one.

    Rows leave with the step that samples a token, and a request has the token only if that step succeeded. So of a
    request with tokens all rows but the last one's have left; only requests without a token need an entry here, and
    those that wait for their twin.
    """

    def __init__(self, emits_prompt_rows: bool) -> None:
        self._emits_prompt_rows = emits_prompt_rows
        self._next_position: dict[str, int] = {}
        self._pending: defaultdict[str, list[Outputs]] = defaultdict(list)

    def select(self, spans: list[RequestSpan]) -> list[tuple[int, int]]:
        """Selects for each span the rows `[start, stop)` of the flat batch that have not left yet; may be empty."""
        return [(span.stop - (self._num_new(span) if span.emits_rows else 0), span.stop) for span in spans]

    def emit(self, spans: list[RequestSpan], parts: list[Outputs]) -> list[list[Outputs]]:
        """
        Args:
            spans: As for `select`.
            parts: For each span its selected rows. They need not have arrived.

        Returns:
            For each span the parts that leave with this step: none while the prompt is incomplete.
        """
        return [self._emit_one(span, part) for span, part in zip(spans, parts, strict=True)]

    def remove(self, req_id: str) -> None:
        self._next_position.pop(req_id, None)
        self._pending.pop(req_id, None)

    def _num_new(self, span: RequestSpan) -> int:
        first = 0 if self._emits_prompt_rows else span.num_prompt_tokens
        has_tokens = span.num_tokens > span.num_prompt_tokens
        first = max(first, self._next_position.get(span.req_id, 0), span.num_tokens - 1 if has_tokens else 0)
        return min(max(span.position + span.num_rows - first, 0), span.num_rows)

    def _emit_one(self, span: RequestSpan, part: Outputs) -> list[Outputs]:
        if not span.samples:
            end = span.position + span.num_rows
            self._next_position[span.req_id] = max(end, self._next_position.get(span.req_id, 0))
            self._pending[span.req_id].append(part)
            return []
        parts = [*self._pending.get(span.req_id, ()), part]
        self.remove(span.req_id)
        return parts


class SelectedRows:
    """The selected rows of one step, while they are copied to the CPU.

    Attributes:
        parts: The rows of each request, in memory of their own, after `wait`; an empty dict for no rows.
    """

    def __init__(self, outputs: Outputs, selected: list[tuple[int, int]]) -> None:
        self.parts: list[Outputs] = [{} for _ in selected]
        self._names = list(outputs)
        self._sizes = [stop - start for start, stop in selected]
        leaving = outputs.values() if any(self._sizes) else ()
        self._copy = HostCopy([_select(output, selected) for output in leaving])

    def wait(self) -> None:
        for name, tensor in zip(self._names, self._copy.wait(), strict=False):
            for part, rows in zip(self.parts, tensor.split(self._sizes), strict=True):
                if len(rows):
                    part[name] = rows.clone()


class LeavingRows:
    """The rows that leave with a step: those that it has computed, and those of steps before it."""

    def __init__(self, selected: SelectedRows, parts: list[list[Outputs]]) -> None:
        self._selected = selected
        self._parts = parts

    def add_to(self, output: ModelRunnerOutput) -> OmniModelRunnerOutput:
        """Waits for the rows, after those of the steps before."""
        self._selected.wait()
        rows = [_join([part for part in parts if part]) for parts in self._parts]
        return OmniModelRunnerOutput.from_base(output, pooler_output=rows)


class OutputWithRows(AsyncModelRunnerOutput):
    """The output of a step, while it is copied to the CPU. Outputs are fetched in the order of their steps."""

    def __init__(self, output: AsyncModelRunnerOutput, rows: LeavingRows) -> None:
        self._output = output
        self._rows = rows

    def get_output(self) -> OmniModelRunnerOutput:
        return self._rows.add_to(self._output.get_output())

    def get_kv_connector_output(self) -> Any:
        """What vLLM keeps of a step whose `get_output` has raised; not every version asks for it."""
        output: Any = self._output
        return output.get_kv_connector_output()


def _join(parts: list[Outputs]) -> Outputs | None:
    """Parts of the rows of one request, one after the other; None for no rows."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _select(output: torch.Tensor, selected: list[tuple[int, int]]) -> torch.Tensor:
    if sum(stop - start for start, stop in selected) == len(output):
        return output
    return torch.cat([output[start:stop] for start, stop in selected])


def _unpadded(tensor: torch.Tensor, spans: list[RequestSpan]) -> torch.Tensor:
    return tensor[: spans[-1].stop]
