# SPDX-License-Identifier: Apache-2.0
"""The model runner of autoregressive stages: vLLM's two phases, and the model's rows beside the sampled tokens."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.worker.gpu_model_runner import ExecuteModelState

from vllm_omni.core.sched.output import OmniModelRunnerOutput
from vllm_omni.model_executor.interfaces import RequestSpan
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner
from vllm_omni.worker.host_copy import HostCopy
from vllm_omni.worker.row_ledger import RowLedger, Rows


class GPUARModelRunner(OmniGPUModelRunner):
    """`execute_model` is vLLM's; `sample_tokens` adds rows and the model's `postprocess`.

    A stage whose output is text, with a model without hooks, runs vLLM's own code and nothing else.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._ledger: RowLedger | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if not self.settings.emits_rows:
            return
        self._ledger = RowLedger(self.hooks.emits_prompt_rows)
        if self.hooks.aux_layers:
            model = self.get_model()
            assert supports_eagle3(model), f"{type(model).__name__} declares layers but has no way to capture them"
            model.set_aux_hidden_state_layers(self.hooks.aux_layers)
            self.use_aux_hidden_state_outputs = True

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:  # type: ignore[override]
        sample_tokens: Any = super().sample_tokens  # whose type its decorator hides
        state = self.execute_model_state
        if state is None or (self._ledger is None and self.hooks.postprocess is None):
            return sample_tokens(grammar_output)
        # Before vLLM's bookkeeping, which appends the sampled tokens to the requests.
        spans = self.spans
        rows = None if self._ledger is None else self._take_rows(state, spans, self._ledger)
        output = sample_tokens(grammar_output)
        if self.hooks.postprocess is not None:
            self._remember(state, spans)
        if self._ledger is None or rows is None:
            return output
        return OmniModelRunnerOutput.from_base(output, self._ledger.hand_out(spans, rows.wait()))

    def _forget(self, req_id: str) -> None:
        super()._forget(req_id)
        if self._ledger is not None:
            self._ledger.forget(req_id)

    def _take_rows(self, state: ExecuteModelState, spans: list[RequestSpan], ledger: RowLedger) -> "StepRows":
        selected = ledger.select(spans)
        is_read = any(start < stop for start, stop in selected)
        return StepRows(self._make_rows(state, spans) if is_read else {}, selected)

    def _make_rows(self, state: ExecuteModelState, spans: list[RequestSpan]) -> Rows:
        """Outputs by name, each `[num_tokens, ...]`, on the model's device."""
        hidden_states = _unpadded(state.hidden_states, spans)
        if self.hooks.output is None:
            return {"hidden": hidden_states, **self.preprocessed}
        aux = state.aux_hidden_states
        aux = None if aux is None else [_unpadded(layer, spans) for layer in aux]
        return self.hooks.output.make_omni_output(hidden_states, aux, self.preprocessed, spans)

    def _remember(self, state: ExecuteModelState, spans: list[RequestSpan]) -> None:
        assert self.hooks.postprocess is not None
        updates = self.hooks.postprocess.postprocess(_unpadded(state.hidden_states, spans), spans)
        for span, update in zip(spans, updates, strict=True):
            span.additional_information.update(update)


class StepRows:
    """The rows of one step on their way to the CPU; only those that leave are copied."""

    def __init__(self, outputs: Rows, selected: list[tuple[int, int]]) -> None:
        self._names = list(outputs)
        self._sizes = [stop - start for start, stop in selected]
        leaving = outputs.values() if any(self._sizes) else ()
        self._copy = HostCopy([_select_rows(output, selected) for output in leaving])

    def wait(self) -> list[Rows]:
        """For each request its rows, in memory of their own; an empty dict where it has none."""
        rows: list[Rows] = [{} for _ in self._sizes]
        for name, tensor in zip(self._names, self._copy.wait(), strict=False):
            for request_rows, part in zip(rows, tensor.split(self._sizes), strict=True):
                if len(part):
                    request_rows[name] = part.clone()
        return rows


def _select_rows(output: torch.Tensor, selected: list[tuple[int, int]]) -> torch.Tensor:
    if sum(stop - start for start, stop in selected) == len(output):
        return output
    return torch.cat([output[start:stop] for start, stop in selected])


def _unpadded(tensor: torch.Tensor, spans: list[RequestSpan]) -> torch.Tensor:
    return tensor[: spans[-1].stop]
