# SPDX-License-Identifier: Apache-2.0
"""vLLM's output processing, with outputs of the model beside the text.

Rows accumulate as lists, step by step, and are concatenated once. This file does not know what the rows mean.
"""

from collections import defaultdict
from typing import Any

import torch
from vllm.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestOutputCollector, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats

from vllm_omni.outputs import concatenate, stream_dim

# Set on vLLM's own output objects, which have no such field.
_ATTRIBUTE = "multimodal_output"


class OmniRequestState(RequestState):
    """vLLM's state of one sequence, and the outputs of the model that were not returned yet."""

    multimodal_chunks: dict[str, list[torch.Tensor]]

    @classmethod
    def adopt(cls, state: RequestState) -> None:
        """Turns vLLM's state, which vLLM builds from some 25 fields, into one of ours."""
        state.__class__ = cls
        assert isinstance(state, cls)
        state.multimodal_chunks = defaultdict(list)

    def add_multimodal_output(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self.multimodal_chunks[name].append(tensor)

    def _new_completion_output(
        self, token_ids: list[int], finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> CompletionOutput:
        output = super()._new_completion_output(token_ids, finish_reason, stop_reason)
        is_due = finish_reason is not None or self.output_kind == RequestOutputKind.DELTA
        setattr(output, _ATTRIBUTE, self._take_multimodal_output() if is_due else {})
        return output

    def _new_request_output(
        self, external_req_id: str, outputs: list[CompletionOutput] | list[PoolingOutput], *args: Any, **kwargs: Any
    ) -> RequestOutput | PoolingRequestOutput:
        output = super()._new_request_output(external_req_id, outputs, *args, **kwargs)
        if isinstance(output, RequestOutput):
            setattr(output, _ATTRIBUTE, getattr(output.outputs[0], _ATTRIBUTE))
        return output

    def _take_multimodal_output(self) -> dict[str, torch.Tensor]:
        chunks, self.multimodal_chunks = self.multimodal_chunks, defaultdict(list)
        return {name: concatenate(tensors, stream_dim(name)) for name, tensors in chunks.items()}


class MultimodalOutputProcessor(OutputProcessor):
    """Attaches `multimodal_output: dict[str, Tensor]` to every `RequestOutput` and to each of its completions.

    Tensors are on the CPU and concatenated along their first dimension, `audio` along its last: time. With output kind
    DELTA each output has the increment; otherwise the last output has everything, and those before it an empty dict.
    The `RequestOutput`'s own is that of its first completion.
    """

    def __init__(self, tokenizer: TokenizerLike | None, *, output_type: str, **kwargs: Any) -> None:
        """
        Args:
            tokenizer: None where no text is made.
            output_type: The engine's output type: the name of an output without a name of its own.
            kwargs: vLLM's own arguments.
        """
        super().__init__(tokenizer, **kwargs)
        self._output_type = output_type

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        is_new = request.request_id not in self.request_states
        super().add_request(request, prompt, parent_req, request_index, queue)
        if is_new:
            OmniRequestState.adopt(self.request_states[request.request_id])

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        weight_version: str | None = None,
    ) -> OutputProcessorOutput:
        for output in engine_core_outputs:
            if output.pooling_output is not None:
                self._route_and_normalize(output)
        return super().process_outputs(engine_core_outputs, engine_core_timestamp, iteration_stats, weight_version)

    def _route_and_normalize(self, output: EngineCoreOutput) -> None:
        """Moves the model's outputs to our state: with a pooling output vLLM would not detokenize the tokens."""
        state = self.request_states.get(output.request_id)
        if not isinstance(state, OmniRequestState) or state.detokenizer is None:
            return  # Aborted meanwhile, or a pooling request, which keeps its output.
        payload: Any = output.pooling_output
        state.add_multimodal_output(payload if isinstance(payload, dict) else {self._output_type: payload})
        output.pooling_output = None
