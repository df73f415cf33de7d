# SPDX-License-Identifier: Apache-2.0
"""The API server: vLLM's application with the endpoints that a pipeline supports, and ours."""

import asyncio
import logging
import pkgutil
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, NoReturn

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.datastructures import State
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.models.protocol import BaseModelPath, LoRAModulePath
from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry, OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList, ModelPermission
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.utils.counter import AtomicCounter

from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.control import DEFAULT_WEIGHT_VERSION
from vllm_omni.engine.chat_template import text_chat_template
from vllm_omni.entrypoints.openai import (
    chat,
    custom_voices,
    description,
    images,
    messages,
    operator_routes,
    responses,
    resumable_streams,
    scale_out,
    speech,
    speech_stream,
    transcriptions,
    videos,
    vllm_transcriptions,
)
from vllm_omni.entrypoints.openai.asr_stage import load_asr_stage
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import MESSAGES_PATH, register_error_handlers, returned_error
from vllm_omni.entrypoints.openai.last_message_chat import make_chat
from vllm_omni.entrypoints.openai.media_endpoint import check_model, final_stage
from vllm_omni.entrypoints.openai.middleware import PLAYGROUND_PATH, add_middleware, api_keys, bound_json_routes
from vllm_omni.entrypoints.openai.realtime import serving as realtime
from vllm_omni.entrypoints.openai.server_args import RequestLimits, limits_from
from vllm_omni.errors import StageConfigError
from vllm_omni.inputs import ReplyParsers
from vllm_omni.model_packages import find_models
from vllm_omni.stage.watchdog import TIMEOUT_OPTION
from vllm_omni.vllm_protocol import ErrorResponse

STORED_PATHS = ("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel")
"""Responses that were stored. A model that makes none has none, so there these paths are not found."""
OWN_PATHS = frozenset(
    {
        "/docs", "/health", "/ping", "/v1/audio/transcriptions", "/v1/audio/translations",
        "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses",
        chat.INVOCATIONS_PATH, *STORED_PATHS, *operator_routes.PATHS,
    }
)  # fmt: skip
"""vLLM's paths in whose place are ours. All other paths of its application are as it makes them, but for these:"""

_ONE_ENGINE = "one engine; a pipeline has one in each stage"
WITHHELD_PATHS: dict[str, str] = {
    "/redoc": "a network, for the browser; `/docs` has the same and needs none",
    **dict.fromkeys(("/v1/systemone", "/v1/decisions"), "a checkpoint that was made to decide"),
    "/shutdown_weight_transfer_engine": "a connection to a trainer; weights come from folders",
    "/start_draft_weight_update": "draft models of their own; those of a stage are part of its checkpoint",
    "/weight_checker": "checksums of the tensors of one model; `/weight_info` has the versions of all stages",
    **dict.fromkeys(
        (
            "/release_kv_cache_memory", "/scale_elastic_ep", "/is_scaling_elastic_ep", "/kv_event_sources",
        ),
        _ONE_ENGINE,
    ),
}  # fmt: skip
"""vLLM's paths that a pipeline does not have, with what they need. `tests/entrypoints/openai/test_vllm_paths.py`
compares them with vLLM's application."""

TEXT_ONLY_PATHS = (
    "/v1/chat/completions/batch", "/v1/responses", MESSAGES_PATH, f"{MESSAGES_PATH}/count_tokens",
    "/generative_scoring",
)  # fmt: skip
"""Their answers cannot be without text."""
CHAT_PATHS = ("/v1/chat/completions", "/v1/completions", *TEXT_ONLY_PATHS)
TEXT_PATHS = (*CHAT_PATHS[1:], "/tokenize", "/detokenize")
# The handlers of the media endpoints, by the type of their outputs; each is made if the pipeline has a stage for it.
MEDIA_HANDLERS: dict[str, Callable[[State, OmniEngineClient, OmniStageConfig, Namespace], Any]] = {
    "audio": speech.ServingSpeech,
    "image": images.ServingImages,
    "video": videos.ServingVideos,
}

router = APIRouter()


async def build_omni_app(client: OmniEngineClient, args: Namespace) -> FastAPI:
    """The application for a pipeline; `args` are those of `vllm serve`."""
    client.limits = limits_from(args, RequestLimits)
    root = logging.getLogger()
    level = root.level
    args.enable_offline_docs = not args.disable_fastapi_docs
    app = build_app(args, await client.get_supported_tasks(), client.model_config if client.has_renderer else None)
    root.setLevel(level)  # One of the imports of vLLM's endpoints changes it, which hides warnings of other libraries.
    others = OWN_PATHS | WITHHELD_PATHS.keys() | ({operator_routes.SCALE_OUT_PATH} if args.enable_scale_out else set())
    has_operations = any(getattr(route, "path", "") == operator_routes.ABORT_PATH for route in app.router.routes)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") not in others]
    app.title = "vLLM-Omni"
    if args.enable_offline_docs:
        description.add_docs_page(app, bool(api_keys(args)))
    texts = (chat, responses, messages)
    for endpoints in (
        *texts,
        speech,
        speech_stream,
        custom_voices,
        transcriptions,
        images,
        videos,
        realtime,
        description,
    ):
        app.include_router(endpoints.router)
    app.include_router(router)
    if args.resumable_streams:
        app.include_router(resumable_streams.router)
    if has_operations:
        app.include_router(operator_routes.router)
    if args.enable_scale_out:
        app.include_router(operator_routes.scale_out_router)
    refused = _refused_paths(client)
    removed = {*refused, *(STORED_PATHS if "/v1/responses" in refused else ())}
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") not in removed]
    for path, message in refused.items():
        _refuse(app, path, message)
    bound_json_routes(app)
    app.middleware_stack = None  # vLLM has built it; it is built again with ours, at the first request.
    register_error_handlers(app)
    add_middleware(app, args)
    modalities = chat.default_modalities(args.default_modalities, client.config)
    if client.has_renderer:
        await _init_text_state(app.state, client, args, modalities)
    else:
        _init_diffusion_state(app.state, client, args)
    app.state.omni_handlers = {
        output_type: make(app.state, client, stage, args)
        for output_type, make in MEDIA_HANDLERS.items()
        if (stage := final_stage(client.config, output_type))
    }
    asr_stage = load_asr_stage(client, args)
    app.state.omni_transcriptions = None
    if asr_stage is not None:
        app.state.omni_transcriptions = transcriptions.StageTranscriptions(app.state, client, asr_stage, args)
        if client.has_renderer:
            app.state.openai_serving_chat.asr_stage = app.state.openai_serving_responses.asr_stage = asr_stage
    elif client.transcribes:
        app.state.omni_transcriptions = vllm_transcriptions.VllmTranscriptions(app.state, client, args)
    elif transcriptions.can_transcribe(client):
        app.state.omni_transcriptions = transcriptions.ChatTranscriptions(app.state.openai_serving_chat, args)
    app.state.omni_realtime = None
    if realtime.can_converse(client):
        app.state.omni_realtime = realtime.ServingRealtime(
            app.state.openai_serving_chat, app.state, args, app.state.omni_sessions
        )
        client.llm.watch_speculations(app.state.omni_realtime.speculations.counts)
    app.state.omni_description = description.describe(app, client)
    if args.playground:
        _add_playground(app, args)
    return app


def _add_playground(app: FastAPI, args: Namespace) -> None:
    """The page of an installed package: a client of this server, over the network like any other."""
    add_page = pkgutil.resolve_name(find_models().pages["playground"])
    host = "127.0.0.1" if args.host in (None, "", "0.0.0.0") else "::1" if args.host == "::" else args.host
    scheme = "https" if args.ssl_certfile else "http"
    add_page(
        app,
        url=f"{scheme}://{f'[{host}]' if ':' in host else host}:{args.port}",
        api_key=next(iter(api_keys(args)), None),
        description=app.state.omni_description.model_dump(),
        path=PLAYGROUND_PATH,
        auth=args.playground_auth,
        root_path=args.root_path or "",
    )


async def _init_text_state(
    state: State, client: OmniEngineClient, args: Namespace, default_modalities: Sequence[str]
) -> None:
    if args.chat_template is None:
        args.chat_template = text_chat_template(client.model_config)
    await init_app_state(client, state, args, await client.get_supported_tasks())
    own_chat = state.openai_serving_chat = chat.OmniServingChat.from_vllm(
        state.openai_serving_chat, default_modalities=default_modalities, parsers=_reply_parsers(args, client)
    )
    renderer = {"online_renderer": own_chat.online_renderer}  # It has media counted.
    replaced: tuple[tuple[str, type[chat.OmniServing], dict[str, Any]], ...] = (
        ("openai_serving_completion", chat.OmniServingCompletion, {}),
        ("openai_serving_chat_batch", chat.OmniServingChatBatch, renderer),
        ("openai_serving_responses", responses.OmniServingResponses, renderer),
        ("anthropic_serving_messages", messages.OmniServingMessages, {**renderer, "chat": own_chat}),
        ("serving_tokens", scale_out.OmniServingTokens, {}),
    )
    for name, handler_class, attributes in replaced:
        setattr(state, name, handler_class.from_vllm(getattr(state, name), **attributes))
    state.serving_render.default_sampling_params = own_chat.default_sampling_params
    state.serving_render.online_renderer = own_chat.online_renderer
    for handler in (state.serving_render, state.serving_derender, state.serving_generative_scoring):
        handler.create_error_response = returned_error


def _reply_parsers(args: Namespace, client: OmniEngineClient) -> ReplyParsers:
    names = ("tokenizer", "tokenizer_mode", "tokenizer_revision", "trust_remote_code")
    return ReplyParsers(
        tool_parser=args.tool_call_parser if args.enable_auto_tool_choice else None,
        reasoning_parser=args.structured_outputs_config.reasoning_parser,
        tool_parser_plugin=args.tool_parser_plugin,
        reasoning_parser_plugin=args.reasoning_parser_plugin,
        **{name: getattr(client.model_config, name) for name in names},
    )


def _init_diffusion_state(state: State, client: OmniEngineClient, args: Namespace) -> None:
    """The state that vLLM's routes read, without a vLLM stage whose tokenizer and configuration it is made of."""
    state.engine_client = client
    state.vllm_config = client.vllm_config
    state.args = args
    state.log_stats = not args.disable_log_stats
    state.enable_server_load_tracking = args.enable_server_load_tracking
    state.server_load_metrics = 0
    if args.lora_modules and not client.config.adapter_stages:
        raise StageConfigError("--lora-modules: no stage of this pipeline takes a request's adapter")
    names = args.served_model_name or [args.model]
    state.openai_serving_models = DiffusionModels(
        client, [BaseModelPath(name, args.model) for name in names], args.lora_modules or ()
    )
    state.openai_serving_chat = make_chat(client, state, args)


def _refused_paths(client: OmniEngineClient) -> dict[str, str]:
    """The paths for text that the model has no use for, each with the reason."""
    if not client.has_renderer:
        outputs = ", ".join(client.config.output_types)
        paths = (*TEXT_PATHS, *scale_out.PATHS)
        return dict.fromkeys(paths, f"this model neither reads nor writes tokens; it outputs {outputs}")
    if client.only_transcribes:
        message = "this model only transcribes; send the sound to /v1/audio/transcriptions"
        return dict.fromkeys((*CHAT_PATHS, chat.INVOCATIONS_PATH, *scale_out.PATHS), message)
    if "text" not in client.config.output_types:
        outputs = ", ".join(client.config.output_types)
        return dict.fromkeys(TEXT_ONLY_PATHS, f"this model cannot output 'text'; it outputs {outputs}")
    return {}


def _refuse(app: FastAPI, path: str, message: str) -> None:
    async def refuse() -> NoReturn:
        raise VLLMValidationError(message, parameter="model")

    app.add_api_route(
        path,
        refuse,
        methods=["POST"],
        response_model=None,
        description=message,
        responses={HTTPStatus.BAD_REQUEST.value: {}},
    )


class DiffusionModels(OpenAIModelRegistry):
    """The names of a diffusion model and its adapters, in place of vLLM's `OpenAIServingModels`, which needs a vLLM
    stage. Its methods that load and unload adapters are here, too."""

    load_lora_adapter = OpenAIServingModels.load_lora_adapter
    unload_lora_adapter = OpenAIServingModels.unload_lora_adapter
    _check_load_lora_adapter_request = OpenAIServingModels._check_load_lora_adapter_request
    _check_unload_lora_adapter_request = OpenAIServingModels._check_unload_lora_adapter_request

    def __init__(
        self,
        client: OmniEngineClient,
        base_model_paths: list[BaseModelPath],
        lora_modules: Sequence[LoRAModulePath] = (),
    ) -> None:
        """
        Raises:
            StageConfigError: Two of the models and adapters have one name.
        """
        no_context_length: Any = SimpleNamespace(max_model_len=None)
        super().__init__(no_context_length, base_model_paths)
        self.engine_client = client
        self.lora_resolver_lock: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.lora_id_counter = AtomicCounter(len(lora_modules))
        for number, module in enumerate(lora_modules, start=1):
            if self.is_base_model(module.name) or module.name in self.lora_requests:
                raise StageConfigError(f"--lora-modules: the name {module.name!r} is taken; give each adapter its own")
            self.lora_requests[module.name] = LoRARequest(module.name, number, module.path)

    async def show_available_models(self) -> ModelList:
        """The answer of `/v1/models`."""
        models = await super().show_available_models()
        models.data += [
            ModelCard(id=name, root=adapter.path, parent=self.model_name(), permission=[ModelPermission()])
            for name, adapter in self.lora_requests.items()
        ]
        return models


@router.get("/v1/models/{model:path}", responses={HTTPStatus.NOT_FOUND.value: {"model": ErrorResponse}})
async def retrieve_model(model: str, raw_request: Request) -> ModelCard:
    """The model, or an adapter, by its name, which may have slashes."""
    served = (await raw_request.app.state.openai_serving_models.show_available_models()).data
    check_model(model, [card.id for card in served])
    return next(card for card in served if card.id == model)


class StageStatus(BaseModel):
    """The state of one stage."""

    name: str = Field(
        description="The stage, as the stage configuration names it; with `.0`, `.1`, ... where it has replicas.",
        examples=["stage0"],
    )
    status: str = Field(
        description="`starting`, `ready`, `unresponsive`, `outdated`, `restarting` or `dead`.", examples=["ready"]
    )
    weight_version: str | None = Field(
        None, description="Of its weights, once they have been updated.", examples=["step-12"]
    )
    step_timeout_s: float | None = Field(
        None, description="Seconds after which a step that hangs ends its process.", examples=[300.0]
    )
    last_timeout: str | None = Field(
        None,
        description="Which limit has ended its last process, if one did.",
        examples=["stage 0 (stage0): a step took longer than 300 s (runtime.step_timeout_s)"],
    )
    node: str | None = Field(None, description="On a Ray cluster: its node.", examples=["10.0.0.2 (gpu-2)"])
    waits_for: str | None = Field(
        None, description="On a Ray cluster: what is missing to start it again.", examples=["a node with GPU 1"]
    )


class HealthResponse(BaseModel):
    """The state of the server."""

    status: str = Field(description="`ok` if a replica of every stage is ready, else `unavailable`.", examples=["ok"])
    stages: list[StageStatus] = Field(description="All stages, in stage order.")
    is_paused: bool | None = Field(
        None, description="`true` while generation is paused: requests wait.", examples=[True]
    )


@router.get(
    "/health",
    response_model=HealthResponse,
    responses={HTTPStatus.SERVICE_UNAVAILABLE.value: {"model": HealthResponse, "description": "A stage is down."}},
)
@router.get("/readyz", include_in_schema=False)
@router.get("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
async def health(raw_request: Request) -> JSONResponse:
    """Whether the server takes requests: 200 if so, 503 while a stage starts, restarts, is dead or does not answer, or
    it shuts down."""
    client: OmniEngineClient = raw_request.app.state.engine_client
    replicas = client.llm.health()
    stages = [
        StageStatus(
            name=replica.name,
            status=replica.state,
            weight_version=None if replica.weight_version == DEFAULT_WEIGHT_VERSION else replica.weight_version,
            step_timeout_s=client.config.stages[replica.stage_id].runtime.step_timeout_s or None,
            # Other deaths may quote a request, and this path is open.
            last_timeout=replica.last_death if replica.last_death.endswith(f"({TIMEOUT_OPTION})") else None,
            node=replica.node or None,
            waits_for=replica.waits_for or None,
        )
        for replica in replicas
    ]
    ready = {replica.stage_id for replica in replicas if replica.state == "ready"}
    is_ok = not client.is_stopped and ready == {replica.stage_id for replica in replicas}
    status = "ok" if is_ok else "unavailable"
    answer = HealthResponse(status=status, stages=stages, is_paused=client.operations.is_paused() or None)
    return JSONResponse(
        answer.model_dump(exclude_none=True), HTTPStatus.OK if is_ok else HTTPStatus.SERVICE_UNAVAILABLE
    )
