# SPDX-License-Identifier: Apache-2.0
"""`GET /health`: whether the server takes requests, and how each stage is. For load balancers and probes."""

from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient

router = APIRouter()


class StageStatus(BaseModel):
    """How one stage is."""

    name: str = Field(description="The stage, as the stage configuration names it.", examples=["talker"])
    status: str = Field(description="`starting`, `ready`, `restarting` or `dead`.", examples=["ready"])


class HealthResponse(BaseModel):
    """How the server is."""

    status: str = Field(description="`ok` if every stage is ready, else `unavailable`.", examples=["ok"])
    stages: list[StageStatus] = Field(description="All stages, in stage order.")


@router.get(
    "/health",
    response_model=HealthResponse,
    responses={HTTPStatus.SERVICE_UNAVAILABLE.value: {"model": HealthResponse, "description": "A stage is down."}},
)
@router.get("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
async def health(raw_request: Request) -> JSONResponse:
    """Whether the server takes requests: 200 if so, 503 while a stage starts, restarts or is dead, or it shuts down."""
    client: OmniEngineClient = raw_request.app.state.engine_client
    stages = [StageStatus(name=stage.name, status=stage.state) for stage in client.llm.health()]
    is_ok = not client.is_stopped and all(stage.status == "ready" for stage in stages)
    answer = HealthResponse(status="ok" if is_ok else "unavailable", stages=stages)
    return JSONResponse(answer.model_dump(), HTTPStatus.OK if is_ok else HTTPStatus.SERVICE_UNAVAILABLE)


def attach_router(app: FastAPI) -> None:
    """Adds `/health` and `/ping`; vLLM's own must not be there."""
    app.include_router(router)
