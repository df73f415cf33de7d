# SPDX-License-Identifier: Apache-2.0
"""`POST /abort_requests`, in place of vLLM's, which looks into an `AsyncLLM`. There in vLLM's development mode only."""

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient

PATH = "/abort_requests"

router = APIRouter()


class AbortRequests(BaseModel):
    """The requests to abort."""

    request_ids: list[str] = Field([], description="Ids of answers, such as `chatcmpl-...`. None: all requests.")


class AbortedRequests(BaseModel):
    """What was aborted."""

    status: str = Field(description="`aborted`.")
    aborted: int = Field(description="How many requests were running or waiting, and are aborted.")


@router.post(PATH)
async def abort_requests(body: AbortRequests, raw_request: Request) -> AbortedRequests:
    """Aborts requests; they end as if their clients had gone. The pipeline takes the next ones."""
    client: OmniEngineClient = raw_request.app.state.engine_client
    return AbortedRequests(status="aborted", aborted=await client.llm.abort(body.request_ids or None))
