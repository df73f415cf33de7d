# SPDX-License-Identifier: Apache-2.0
"""GET /v1/pipeline: what the served model reads and makes, and its stages; and the times of one request in them.

For clients that offer a person what the model supports, as the playground does.
"""

from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Path, Request
from pydantic import BaseModel, Field
from vllm.exceptions import VLLMNotFoundError

from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.diffusion.pipeline_info import PipelineInfo, call_parameters
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import FORM_ERRORS
from vllm_omni.entrypoints.openai.media_endpoint import final_stage, load_info
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.stage_params import SETTINGS

_ENDPOINTS = {"audio": "/v1/audio/speech", "image": "/v1/images/generations", "video": "/v1/videos"}


class StageDescription(BaseModel):
    """One stage."""

    name: str = Field(description="As the stage configuration names it.", examples=["stage0"])
    kind: str = Field(description="`AR`, `generation`, `DiT` or `function`.", examples=["AR"])
    output: str | None = Field(None, description="What it returns to callers, if anything.", examples=["audio"])
    sampling_params: dict[str, Any] = Field(
        description="What a request may set, with the defaults that are known. Of an `AR` stage these are only the "
        "defaults: it takes all sampling parameters."
    )


class PipelineDescription(BaseModel):
    """The served model."""

    model: str = Field(description="The first name that it is served under.")
    inputs: list[str] = Field(description="What it reads: `text`, `image`, `audio`, `video`.")
    outputs: list[str] = Field(description="What it makes: `text`, `audio`, `image`, `video`.")
    endpoints: list[str] = Field(description="The endpoints that make something with it.")
    speech_fields: list[str] = Field(description="Fields of requests for speech beside OpenAI's.")
    voices: list[str] = Field(description="Its voices, the default one first.")
    stages: list[StageDescription] = Field(description="In stage order, which is that of `sampling_params_list`.")


class StageTimes(BaseModel):
    """What one stage did for a request, in seconds since its start."""

    name: str
    arrival: float = Field(description="It had enough input to start.")
    started: float = Field(description="The engine took it.")
    first_output: float | None = Field(description="The first piece was complete; null: the output was one piece.")
    finished: float = Field(description="It was complete.")
    num_input_tokens: int
    num_cached_tokens: int = Field(description="Of these, the tokens in the engine's prefix cache.")
    num_output_tokens: int


class RequestTimes(BaseModel):
    """The times of one complete request."""

    id: str
    stages: list[StageTimes]


def describe(app: FastAPI, client: OmniEngineClient) -> PipelineDescription:
    """The description of a pipeline, whose application has all its endpoints and their handlers."""
    stages = client.config.stage_args
    model = app.state.args.model
    infos = {stage.stage_id: load_info(stage, model) for stage in stages if stage.kind == "DiT"}
    return PipelineDescription(
        model=app.state.openai_serving_models.base_model_paths[0].name,
        inputs=["text", *_media_inputs(client, infos)],
        outputs=client.config.output_types,
        endpoints=_endpoints(app, client),
        speech_fields=sorted(client.prompt_fields),
        voices=client.voices.names,
        stages=[
            StageDescription(
                name=stage.name,
                kind=stage.kind,
                output=stage.final_output_type if stage.final_output else None,
                sampling_params=_defaults(client, stage, infos),
            )
            for stage in stages
        ],
    )


def _media_inputs(client: OmniEngineClient, infos: dict[int, PipelineInfo]) -> list[str]:
    limits: Any = {}
    if client.has_renderer and (processor := client.renderer.mm_processor) is not None:
        limits = processor.info.allowed_mm_limits
    takes_images = any(info.takes_images for info in infos.values())
    known = {name for name, limit in limits.items() if limit} | ({"image"} if takes_images else set())
    if client.config.accepting_stage("audio", "text") is not None:
        known.add("audio")
    return [name for name in ("image", "audio", "video") if name in known]


def _endpoints(app: FastAPI, client: OmniEngineClient) -> list[str]:
    first = final_stage(client.config, client.config.output_types[0])
    has_chat = client.has_renderer or (first is not None and not first.runs_vllm)
    has_chat = has_chat and not client.only_transcribes
    made = ["/v1/chat/completions"] if has_chat else []
    made += [path for kind, path in _ENDPOINTS.items() if kind in app.state.omni_handlers]
    if app.state.omni_transcriptions is not None:
        made += ["/v1/audio/transcriptions", "/v1/audio/translations"]
    return made + (["/v1/realtime"] if app.state.omni_realtime is not None else [])


def _defaults(client: OmniEngineClient, stage: OmniStageConfig, infos: dict[int, PipelineInfo]) -> dict[str, Any]:
    if stage.kind == "AR":
        return {name: value for name, value in client.llm.builder.default_values(stage).items() if _is_plain(value)}
    if stage.kind != "DiT" or stage.encodes_prompts:
        return {}
    parameters = call_parameters(infos[stage.stage_id].pipeline_class)
    defaults: dict[str, Any] = {}
    for name in SETTINGS:
        if name in parameters:
            default = stage.default_sampling_params.get(name, parameters[name].default)
            defaults[name] = default if _is_plain(default) else None
    return defaults


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))


router = APIRouter()


@router.get("/v1/pipeline")
async def get_pipeline(raw_request: Request) -> PipelineDescription:
    """What the served model reads and makes, and its stages."""
    return raw_request.app.state.omni_description


@router.get("/v1/pipeline/requests/{request_id}", responses=FORM_ERRORS)
async def get_request_times(
    request_id: Annotated[str, Path(max_length=200, description="The `id` of an answer.")], raw_request: Request
) -> RequestTimes:
    """The times of one of the last requests of this API key that are complete, in each stage."""
    client: OmniEngineClient = raw_request.app.state.engine_client
    recent = client.recent.find(request_id, RequestContext.of(raw_request).owner)
    if recent is None:
        raise VLLMNotFoundError(f"there is no request {request_id!r} among the last that were completed")
    names = ("arrival", "started", "first_output", "finished")
    stages = []
    for stage in recent.stages:
        times = {name: getattr(stage, name) for name in names}
        since: dict[str, Any] = {name: None if time is None else time - recent.started for name, time in times.items()}
        stages.append(
            StageTimes(
                name=stage.name,
                num_input_tokens=stage.num_input_tokens,
                num_cached_tokens=stage.num_cached_tokens,
                num_output_tokens=stage.num_output_tokens,
                **since,
            )
        )
    return RequestTimes(id=request_id, stages=stages)
