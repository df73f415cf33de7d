# SPDX-License-Identifier: Apache-2.0
"""A stage that is a vLLM engine: autoregressive, or generating everything in one step.

The loop is vLLM's own: take what has arrived, step, hand out what is complete. All requests of the stage share the
engine's continuous batch.
"""

from typing import Any

import msgspec
from vllm.exceptions import VLLMClientError
from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams

from vllm_omni.engine.engine_args import create_engine_args
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.engine.payloads import OmniEngineCoreRequest
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.engines.base import AbortRequest, Error, NewRequest, Outbox, Result, StageEngine, Stop


class LLMStageEngine(StageEngine):
    """Runs an `OmniLLMEngine`."""

    def __init__(
        self, outbox: Outbox, stage_id: int, model: str, engine_type: str, engine_args: dict[str, Any]
    ) -> None:
        super().__init__(outbox)
        self._stage_id = stage_id
        self._engine_args = create_engine_args(model, engine_type=engine_type, **engine_args)
        self._engine: OmniLLMEngine
        self._running: set[str] = set()

    def start(self) -> None:
        self._engine = OmniLLMEngine.from_omni_engine_args(self._engine_args)

    def run(self) -> None:
        while self._take_inbox():
            self._step()

    def close(self) -> None:
        # vLLM's orderly shutdown takes seconds; all that runs in this process ends with it anyway.
        if self._engine.vllm_config.parallel_config.world_size > 1:
            self._engine.close()

    def _take_inbox(self) -> bool:
        """Takes in what has arrived; sleeps while the engine has nothing to do. False once it is to stop."""
        while not self.inbox.empty() or not self._engine.has_unfinished_requests():
            item = self.inbox.get()
            if isinstance(item, Stop):
                return False
            if isinstance(item, AbortRequest):
                self._forget(item.request_id)
            else:
                self._add(item)
        return True

    def _add(self, item: NewRequest) -> None:
        request = item.request
        try:
            self._engine.add_request(request.request_id, *_as_prompt(item))
        except Exception as error:
            self.outbox.put(
                Error.from_exception(request.request_id, error, isinstance(error, (ValueError, VLLMClientError)))
            )
        else:
            self._running.add(request.request_id)

    def _forget(self, request_id: str) -> None:
        if request_id in self._running:
            self._running.remove(request_id)
            self._engine.abort_request([request_id])

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._fail_all(error)
            return
        for output in outputs:
            if output.finished:
                self._finish(output)

    def _fail_all(self, error: Exception) -> None:
        """An exception in a step cannot be told apart by request: those that were in the engine fail."""
        self._engine.fail_all()
        for request_id in self._running:
            self.outbox.put(Error.from_exception(request_id, error))
        self._running.clear()

    def _finish(self, output: Any) -> None:
        self._running.remove(output.request_id)
        self.outbox.put(
            Result(
                request_id=output.request_id,
                output=_as_stage_output(output, self._stage_id),
                num_input_tokens=len(output.prompt_token_ids or ()),
                num_output_tokens=sum(len(c.token_ids) for c in output.outputs),
            )
        )


def _as_prompt(item: NewRequest) -> tuple[OmniEngineCoreRequest | dict[str, Any], SamplingParams]:
    """The engine's prompt, and the request's parameters with what the stage input processor adds to them."""
    stage_input, params = item.stage_input, item.request.sampling_params
    assert params is not None, "requests of vLLM stages come with sampling parameters"
    if item.request.engine_request is not None:
        return item.request.engine_request, params
    assert stage_input is not None, "a vLLM stage with sources has a stage input processor"
    prompt: dict[str, Any] = {"additional_information": stage_input.additional_information}
    if stage_input.prompt_embeds is not None:
        prompt["prompt_embeds"] = stage_input.prompt_embeds
    else:
        prompt["prompt_token_ids"] = stage_input.prompt_token_ids
    if stage_input.stop_token_ids:
        # A copy runs vLLM's own set-up again: min_tokens has to know these ids as well.
        stop_token_ids = [*(params.stop_token_ids or ()), *stage_input.stop_token_ids]
        params = msgspec.structs.replace(params, stop_token_ids=stop_token_ids)
    if stage_input.max_tokens is not None:
        params.max_tokens = min(params.max_tokens or stage_input.max_tokens, stage_input.max_tokens)
    return prompt, params


def _as_stage_output(output: Any, stage_id: int) -> StageOutput:
    """`output` is vLLM's `RequestOutput` with the `multimodal_output` that our output processor adds."""
    return StageOutput(
        request_id=output.request_id,
        stage_id=stage_id,
        prompt=output.prompt,
        prompt_token_ids=list(output.prompt_token_ids or ()),
        completions=[_as_completion(completion) for completion in output.outputs],
        tensors=output.multimodal_output,
    )


def _as_completion(completion: CompletionOutput) -> Completion:
    return Completion(
        index=completion.index,
        text=completion.text,
        token_ids=list(completion.token_ids),
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=None if completion.logprobs is None else [dict(position) for position in completion.logprobs],
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )
