# SPDX-License-Identifier: Apache-2.0
"""One stage's engine, in the calling process: vLLM's `LLMEngine` with omni inputs and outputs (design document 003).

It knows one stage only; how stages are joined is the orchestrator's business.
"""

from collections.abc import Mapping
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import EngineInput, PromptType
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.kv_hints import KvHintsEnvelope

from vllm_omni.engine.input_processor import OmniInputProcessor, PreprocessedPrompt
from vllm_omni.engine.omni_engine_core import OmniEngineCore
from vllm_omni.engine.output_processor import MultimodalOutputProcessor
from vllm_omni.engine.payloads import OmniEngineCoreRequest
from vllm_omni.engine.settings import OmniEngineSettings
from vllm_omni.errors import InvalidRequestError


class OmniLLMEngine(LLMEngine):
    """Runs one autoregressive or one-step generation stage.

    Not for use from several threads at once. vLLM keeps its forward context in the process, so several engines in one
    process must be stepped one at a time; a pipeline gives each its own process. Close an engine that is not used any
    more.

    After an exception out of `step` nothing but `fail_all` and `close` is allowed; `fail_all` makes it usable again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._is_closed = False
        self._has_failed = False
        super().__init__(*args, **kwargs)
        settings = OmniEngineSettings.from_vllm_config(self.vllm_config)
        base = self.output_processor
        self.input_processor = OmniInputProcessor(self.vllm_config, self.renderer)
        self.output_processor = MultimodalOutputProcessor(
            base.tokenizer,
            output_type=settings.engine_output_type,
            log_stats=base.log_stats,
            stream_interval=base.stream_interval,
            tracing_enabled=base.tracing_enabled,
        )
        assert isinstance(self.engine_core, InprocClient)
        self._core = OmniEngineCore.adopt(self.engine_core)

    @classmethod
    def from_omni_engine_args(
        cls, engine_args: EngineArgs, usage_context: UsageContext = UsageContext.ENGINE_CONTEXT
    ) -> "OmniLLMEngine":
        """
        Args:
            engine_args: Made by `create_engine_args`.
            usage_context: As for vLLM.
        """
        vllm_config = engine_args.create_engine_config(usage_context)
        return cls(
            vllm_config=vllm_config,
            executor_class=Executor.get_class(vllm_config),
            log_stats=not engine_args.disable_log_stats,
            usage_context=usage_context,
            multiprocess_mode=False,
        )

    def add_request(
        self,
        request_id: str,
        prompt: EngineCoreRequest | PromptType | EngineInput | PreprocessedPrompt | dict[str, Any],
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: KvHintsEnvelope | None = None,
    ) -> str:
        """Queues a request; `step` makes it progress.

        Args:
            request_id: The caller's id; outputs carry it.
            prompt: A prompt as `OmniInputProcessor` takes it, or the request that one has made of it.
            params: Sampling parameters. A ready-made request has its own, and these are not used.
            arrival_time, lora_request, tokenization_kwargs, trace_headers, priority, session_id, kv_hints: vLLM's.
            prompt_text: The text of a ready-made request, for the output.

        Returns:
            vLLM's internal id.

        Raises:
            InvalidRequestError: The request is wrong; nothing of it was queued.
        """
        self._check_usable()
        if request_id in self.output_processor.external_req_ids:
            raise InvalidRequestError("a request of this id is running", request_id)
        if isinstance(prompt, OmniEngineCoreRequest):
            prompt = _as_preprocessed_prompt(request_id, prompt, prompt_text)
        try:
            return super().add_request(
                request_id,
                prompt,  # type: ignore[arg-type]
                params,
                arrival_time=arrival_time,
                lora_request=lora_request,
                tokenization_kwargs=tokenization_kwargs,
                trace_headers=trace_headers,
                priority=priority,
                session_id=session_id,
                kv_hints=kv_hints,
            )
        except Exception:
            self.abort_request([request_id])  # Outputs may be awaited of a request that the core has refused.
            raise

    def step(self) -> list[RequestOutput | PoolingRequestOutput]:
        """Schedules, runs the model once and returns what is to be handed out.

        Each `RequestOutput` has the attribute `multimodal_output`, as `MultimodalOutputProcessor` says.

        Raises:
            Exception: Whatever the model or its hooks raised. Call `fail_all` next.
        """
        self._check_usable()
        try:
            return super().step()
        except Exception:
            self._has_failed = True
            raise

    def fail_all(self) -> list[str]:
        """Aborts every request and makes the engine usable again, also after an exception out of `step`.

        An exception inside a step cannot be told apart by request, so all end. If the device itself is broken, the
        next step raises again: close the engine then.

        Returns:
            The callers' ids of the requests that were aborted.
        """
        request_ids = list(self.output_processor.external_req_ids)
        self.abort_request(request_ids)
        self._core.abandon_all_requests()
        self._has_failed = False
        return request_ids

    def close(self) -> None:
        """Releases the model, the KV cache and vLLM's distributed groups. Does nothing the second time."""
        if self._is_closed:
            return
        self._is_closed = True
        self.renderer.shutdown()
        self.engine_core.shutdown()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise RuntimeError("the engine is closed")
        if self._has_failed:
            raise RuntimeError("the last step raised; call fail_all() before anything else")


def _as_preprocessed_prompt(
    request_id: str, request: OmniEngineCoreRequest, prompt_text: str | None
) -> PreprocessedPrompt:
    if request.request_id != request_id:
        raise InvalidRequestError(f"the request was preprocessed as {request.request_id!r}", request_id)
    return {
        "engine_core_request": request,
        "prompt": prompt_text,
        "prompt_token_ids": request.prompt_token_ids or [],
    }
