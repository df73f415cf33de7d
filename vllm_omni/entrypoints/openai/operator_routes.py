# SPDX-License-Identifier: Apache-2.0
"""vLLM's paths for an operator in whose place are ours: aborts, because vLLM's look into an `AsyncLLM`, and weights, of
which a pipeline says which stage they are of.

There in vLLM's development mode only, and `SCALE_OUT_PATH` with `--enable-scale-out`. The others are vLLM's own.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from vllm.entrypoints.rl.online.metrics import weight_operation_metrics

from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient

ABORT_PATH = "/abort_requests"
PATHS = (ABORT_PATH, "/update_weights", "/update_weight_version", "/weight_info", "/get_world_size")
SCALE_OUT_PATH = "/inference/v1/abort_requests"

router = APIRouter()
scale_out_router = APIRouter()

Stage = Annotated[str | None, Query(description="The name or number of a stage. None: all.", examples=["writer"])]

IncludeDP = Annotated[bool, Query(description="Count all replicas; else one of each stage.")]


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


class UpdateWeights(BaseModel):
    """New weights."""

    update_info: Any = Field(
        description="Where they are: `weights_path`, a folder of safetensors that is laid out as the checkpoint is.",
        examples=[{"weights_path": "/dev/shm/step-12"}],
    )


class Message(BaseModel):
    """What was done."""

    message: str = Field(description="What was done.", examples=["Weights updated"])


class UpdateWeightVersion(BaseModel):
    """A version of weights."""

    new_version: str = Field(description="What outputs call them from now on.", examples=["step-12"])


class UpdatedWeightVersion(BaseModel):
    """The version that weights have now."""

    success: bool = Field(description="`true`.")
    new_version: str = Field(description="The version.", examples=["step-12"])


class WeightInfo(BaseModel):
    """The versions of weights."""

    weight_version: str | None = Field(description="Of all stages; none where they differ.", examples=["step-12"])
    stages: dict[str, str] = Field(description="Of each stage.", examples=[{"writer": "step-12", "painter": "step-12"}])


class WorldSize(BaseModel):
    """The number of workers."""

    world_size: int = Field(description="Workers that have weights.", examples=[3])


def _client(request: Request) -> OmniEngineClient:
    return request.app.state.engine_client


@router.post(ABORT_PATH)
async def abort_requests(body: AbortRequests, raw_request: Request) -> AbortedRequests:
    """Aborts requests; they end as if their clients had gone. The pipeline takes the next ones."""
    aborted = await _client(raw_request).llm.abort(body.request_ids or None)
    return AbortedRequests(status="aborted", aborted=aborted)


@scale_out_router.post(SCALE_OUT_PATH)
async def abort_generated(body: AbortGenerated, raw_request: Request) -> AbortedRequests:
    """Aborts requests of `/inference/v1/generate`."""
    return AbortedRequests(status="aborted", aborted=await _client(raw_request).llm.abort(body.request_ids))


@router.post("/update_weights")
async def update_weights(body: UpdateWeights, raw_request: Request, stage: Stage = None) -> Message:
    """Compares new weights with the checkpoint, in all replicas; they are used after `/finish_weight_update`."""
    with weight_operation_metrics().record("update"):
        await _client(raw_request).update_weights(body.model_dump(), stage)
    return Message(message="Weights updated")


@router.post("/update_weight_version")
async def update_weight_version(
    body: UpdateWeightVersion, raw_request: Request, stage: Stage = None
) -> UpdatedWeightVersion:
    """Calls the weights by another version."""
    await _client(raw_request).update_weight_version(body.new_version, stage)
    return UpdatedWeightVersion(success=True, new_version=body.new_version)


@router.get("/weight_info")
async def weight_info(raw_request: Request, stage: Stage = None) -> WeightInfo:
    """The versions of the weights."""
    versions = _client(raw_request).operations.weight_versions(stage)
    known = set(versions.values())
    return WeightInfo(weight_version=known.pop() if len(known) == 1 else None, stages=versions)


@router.get("/get_world_size")
async def get_world_size(raw_request: Request, include_dp: IncludeDP = True, stage: Stage = None) -> WorldSize:
    """How many workers have weights: devices of replicas."""
    return WorldSize(world_size=_client(raw_request).operations.get_world_size(include_dp, stage))
