# SPDX-License-Identifier: Apache-2.0
"""vLLM's scale-out endpoints (`--enable-scale-out`): one server renders prompts, another makes tokens of them."""

import traceback
from collections.abc import AsyncGenerator

from starlette.requests import Request
from vllm import SamplingParams
from vllm.entrypoints.scale_out.token_in_token_out.mm_features import mm_kwargs_from_features
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest, GenerateResponse
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai.chat import OmniServing
from vllm_omni.entrypoints.openai.request_context import RequestContext, RequestOptions
from vllm_omni.vllm_protocol import ErrorResponse

PATHS = (
    "/v1/chat/completions/render", "/v1/messages/render", "/v1/completions/render", "/v1/responses/render",
    "/v1/chat/completions/derender", "/v1/completions/derender", "/inference/v1/generate",
)  # fmt: skip


class OmniServingTokens(OmniServing, ServingTokens):
    """vLLM's, sampling as the stage is configured. Text only."""

    async def serve_tokens(
        self, request: GenerateRequest, raw_request: Request | None = None
    ) -> GenerateResponse | ErrorResponse | AsyncGenerator[str, None]:
        self.client.check_admission(request.sampling_params.n)
        names = filter(request.is_sampling_param_provided, SamplingParams.__struct_fields__)
        RequestContext.current().options = RequestOptions(explicit_fields=frozenset(names))
        try:
            return await super().serve_tokens(request, raw_request)
        except Exception as error:
            if _was_decoding(error):  # It raises all kinds of errors.
                raise VLLMValidationError(f"features cannot be decoded: {error}", parameter="features") from error
            raise


def _was_decoding(error: Exception) -> bool:
    """Whether vLLM's decoder of features has raised it, which has no hook."""
    code = mm_kwargs_from_features.__code__
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))
