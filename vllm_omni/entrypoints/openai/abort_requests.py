# SPDX-License-Identifier: Apache-2.0
"""`POST /abort_requests` and `POST /inference/v1/abort_requests`, in place of vLLM's, which look into an `AsyncLLM`.

The first is there in vLLM's development mode only, the second with `--enable-scale-out`.
"""

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient

PATH = "/abort_requests"
SCALE_OUT_PATH = "/inference/v1/abort_requests"

router = APIRouter()
scale_out_router = APIRouter()


class AbortRequests(BaseModel):
    """The requests to abort."""

    request_ids: list[str] = Field([], description="Ids of answers, such as `chatcmpl-...`. None: all requests.")


class AbortGenerated(BaseModel):
    """The requests of `/inference/v1/generate` to abort."""

    request_ids: list[str] = Field(description="Ids of answers, such as `generate-tokens-...`.")


class AbortedRequests(BaseModel):
    """What was aborted."""

    status: str = Field(description="`aborted`.")
    aborted: int = Field(description="How many requests were running or waiting, and are aborted.")


@router.post(PATH)
async def abort_requests(body: AbortRequests, raw_request: Request) -> AbortedRequests:
    """Aborts requests; they end as if their clients had gone. The pipeline takes the next ones."""
    client: OmniEngineClient = raw_request.app.state.engine_client
    return AbortedRequests(status="aborted", aborted=await client.llm.abort(body.request_ids or None))


@scale_out_router.post(SCALE_OUT_PATH)
async def abort_generated(body: AbortGenerated, raw_request: Request) -> AbortedRequests:
    """Aborts requests of `/inference/v1/generate`."""
    client: OmniEngineClient = raw_request.app.state.engine_client
    return AbortedRequests(status="aborted", aborted=await client.llm.abort(body.request_ids))
