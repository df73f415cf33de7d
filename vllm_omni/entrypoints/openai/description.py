# SPDX-License-Identifier: Apache-2.0
"""What is served: GET /v1/pipeline, GET / and GET /docs.

/v1/pipeline has what the model reads and makes, its stages, and the times of one request in them, for clients that
offer a person what the model supports, as the playground does. / is a page for a person in a browser, or JSON for a
program that asks for it. It needs no key, so it names the models only to those who may list them: the name of a model
may be a path. /docs describes every path, as a page that a browser shows without a network.
"""

from html import escape
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Path, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, Field
from vllm.exceptions import VLLMNotFoundError

from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.diffusion.media_inputs import call_parameters
from vllm_omni.diffusion.pipeline_info import PipelineInfo
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import FORM_ERRORS, MESSAGES_PATH
from vllm_omni.entrypoints.openai.last_message_chat import can_chat
from vllm_omni.entrypoints.openai.media_endpoint import served_names
from vllm_omni.entrypoints.openai.middleware import DOCS_PATHS, PLAYGROUND_PATH, api_keys
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.speech_stream import PATH as SPEECH_STREAM_PATH
from vllm_omni.entrypoints.openai.stage_params import SETTINGS
from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.version import __version__

_ENDPOINTS = {"audio": "/v1/audio/speech", "image": "/v1/images/generations", "video": "/v1/videos"}
_TIMES = ("arrival", "started", "first_output", "finished")

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<link rel="icon" href="data:,">
<style>body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 40rem; margin: 2rem auto; padding: 0 1rem }}</style>
</head>
<body>
<h1>{title}</h1>
<p>{models}</p>
<ul>
{endpoints}
</ul>
<p>{links}</p>
</body>
</html>
"""


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
    media: list[str] = Field(
        description="Of diffusers pipelines: the names of their media (`image`, `mask_image`, ...)."
    )
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


class FrontPage(BaseModel):
    name: str = "vLLM-Omni"
    version: str = Field(description="Of vLLM-Omni.", examples=[__version__])
    models: list[str] | None = Field(description="The names of the model; null to those who may not list them.")
    endpoints: list[str] = Field(description="The endpoints that make something with it.")
    links: list[str] = Field(description="Further pages, relative to this one.", examples=[["docs", "health"]])


def describe(app: FastAPI, client: OmniEngineClient) -> PipelineDescription:
    """The description of a pipeline, whose application has all its endpoints and their handlers."""
    stages = client.config.stage_args
    model = app.state.args.model
    loaded = {stage.stage_id: stage.kind.load_pipeline_info(model) for stage in stages}
    infos = {stage_id: info for stage_id, info in loaded.items() if info is not None}
    return PipelineDescription(
        model=app.state.openai_serving_models.base_model_paths[0].name,
        inputs=["text", *_media_inputs(client, infos)],
        media=list(dict.fromkeys(name for info in infos.values() for name in info.media)),
        outputs=client.config.output_types,
        endpoints=_endpoints(app, client),
        speech_fields=sorted(client.prompt_fields),
        voices=client.voices.names,
        stages=[
            StageDescription(
                name=stage.name,
                kind=stage.kind.name,
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
    accepted = {stage.accepts for stage in client.config.stage_args}
    takes_images = any(info.takes_images for info in infos.values()) or "image" in accepted
    known = {name for name, limit in limits.items() if limit} | ({"image"} if takes_images else set())
    if "audio" in accepted:
        known.add("audio")
    return [name for name in ("image", "audio", "video") if name in known]


def _endpoints(app: FastAPI, client: OmniEngineClient) -> list[str]:
    has_chat = not client.only_transcribes if client.has_renderer else can_chat(client.config)
    made = ["/v1/chat/completions"] if has_chat else []
    if has_chat and client.has_renderer and "text" in client.config.output_types:
        made += ["/v1/responses", MESSAGES_PATH]
    made += [path for kind, path in _ENDPOINTS.items() if kind in app.state.omni_handlers]
    if "audio" in app.state.omni_handlers:
        made.append(SPEECH_STREAM_PATH)
    if app.state.omni_transcriptions is not None:
        made += ["/v1/audio/transcriptions", "/v1/audio/translations"]
    return made + (["/v1/realtime"] if app.state.omni_realtime is not None else [])


def _defaults(client: OmniEngineClient, stage: OmniStageConfig, infos: dict[int, PipelineInfo]) -> dict[str, Any]:
    if stage.kind.is_autoregressive:
        return {name: value for name, value in client.llm.builder.default_values(stage).items() if _is_plain(value)}
    if not stage.kind.takes_settings:
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


def _times(stage: StageMetrics, start: float) -> StageTimes:
    values = {name: getattr(stage, name) for name in StageTimes.model_fields}
    seconds = {name: values[name] - start for name in _TIMES if values[name] is not None}
    return StageTimes(**values | seconds)


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
    stages = [_times(stage, recent.started) for stage in recent.stages]
    return RequestTimes(id=request_id, stages=stages)


@router.get("/", responses={HTTPStatus.OK.value: {"model": FrontPage, "content": {"text/html": {}}}})
async def front_page(raw_request: Request) -> Response:
    """What is served: a page, or JSON if the `Accept` header asks for it."""
    has_key = RequestContext.of(raw_request).owner != b""
    page = _describe(raw_request.app.state, has_key, [getattr(route, "path", "") for route in raw_request.app.routes])
    accept = raw_request.headers.get("accept", "")
    headers = {"Vary": "Accept, Authorization"}
    if "application/json" in accept and "text/html" not in accept:
        return JSONResponse(page.model_dump(), headers=headers)
    return HTMLResponse(_as_html(page), headers=headers)


def _describe(state: Any, has_key: bool, paths: list[str]) -> FrontPage:
    description: PipelineDescription = state.omni_description
    may_list = not api_keys(state.args) or state.args.public_lists or has_key
    links = [path for path in ("docs", "health") if f"/{path}" in paths]
    return FrontPage(
        version=__version__,
        models=served_names(state) if may_list else None,
        endpoints=description.endpoints,
        links=links + ([PLAYGROUND_PATH.strip("/")] if state.args.playground else []),
    )


def _as_html(page: FrontPage) -> str:
    models = "It needs an API key." if page.models is None else f"It serves {escape(', '.join(page.models))}."
    entry = '<a href="docs">{}</a>' if "docs" in page.links else "{}"
    return _PAGE.format(
        title=f"{page.name} {page.version}",
        models=models,
        endpoints="\n".join(f"<li>{entry.format(f'<code>{escape(path)}</code>')}</li>" for path in page.endpoints),
        links=" · ".join(f'<a href="{link}">{link}</a>' for link in page.links),
    )


def add_docs_page(app: FastAPI, has_keys: bool) -> None:
    """Adds /docs, in place of vLLM's, whose addresses do not have the path of a proxy.

    Args:
        app: Of a server with `--enable-offline-docs`.
        has_keys: Whether requests need a key: the page then asks for one to try them with.
    """
    title = app.title
    path, *addresses = DOCS_PATHS
    schema, script, style = (address.lstrip("/") for address in addresses)  # Relative to the page.

    async def page() -> HTMLResponse:
        return get_swagger_ui_html(
            title=title,
            openapi_url=schema,
            swagger_js_url=script,
            swagger_css_url=style,
            swagger_favicon_url="data:,",
        )

    app.add_api_route(path, page, methods=["GET"], include_in_schema=False)
    if has_keys:
        _describe_key(app)


def _describe_key(app: FastAPI) -> None:
    make_schema = app.openapi

    def openapi() -> dict[str, Any]:
        schema = make_schema()
        schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's page on extending OpenAPI has it
