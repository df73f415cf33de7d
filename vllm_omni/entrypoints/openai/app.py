# SPDX-License-Identifier: Apache-2.0
"""The HTTP application: vLLM's own, with those of its endpoints that a pipeline serves, and ours."""

import logging
from argparse import Namespace
from http import HTTPStatus
from types import ModuleType
from typing import NoReturn

from fastapi import FastAPI
from starlette.datastructures import State
from starlette.routing import BaseRoute
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.exceptions import VLLMValidationError

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.entrypoints.openai import chat, health, images, middleware, speech, videos
from vllm_omni.entrypoints.openai.chat_options import default_modalities
from vllm_omni.entrypoints.openai.diffusion_chat import DiffusionChat
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import register_error_handlers
from vllm_omni.entrypoints.openai.models import DiffusionModels
from vllm_omni.entrypoints.openai.serving_chat import OmniServingChat
from vllm_omni.entrypoints.openai.serving_completion import OmniServingCompletion
from vllm_omni.entrypoints.openai.transcripts import Transcripts
from vllm_omni.errors import StageConfigError

# The others of vLLM's are for engines with what a pipeline does not have: other tasks, profilers, caches to reset.
VLLM_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/load",
        "/version",
        "/metrics",
        "/docs",
        "/docs/oauth2-redirect",
        "/redoc",
        "/openapi.json",
        "/static",
    }
)
TEXT_PATHS = ("/v1/completions", "/tokenize", "/detokenize")
# Each has `attach_router(app)` and `init_state(state, client, args)`, as vLLM's have.
MEDIA_ENDPOINTS: tuple[ModuleType, ...] = (speech, images, videos)


async def build_omni_app(client: OmniEngineClient, args: Namespace) -> FastAPI:
    """The application for a pipeline; `args` are those of `vllm serve`."""
    root = logging.getLogger()
    level = root.level
    app = build_app(args, await client.get_supported_tasks(), client.model_config if client.has_renderer else None)
    root.setLevel(level)  # What vLLM imports for one of its endpoints silences the warnings of all other programs.
    app.router.routes[:] = [route for route in app.router.routes if _path(route) in VLLM_PATHS]
    app.title = "vLLM-Omni"
    if not client.has_renderer:
        _refuse_text(app, client.config)
    for module in (chat, health, *MEDIA_ENDPOINTS):
        module.attach_router(app)
    app.middleware_stack = None  # vLLM has built it; with ours it is built again, at the first request.
    register_error_handlers(app)
    middleware.add_middleware(app, args)
    await _init_state(app.state, client, args)
    for module in MEDIA_ENDPOINTS:
        module.init_state(app.state, client, args)
    return app


async def _init_state(state: State, client: OmniEngineClient, args: Namespace) -> None:
    modalities = default_modalities(args.default_modalities, client.config)
    if client.has_renderer:
        await init_app_state(client, state, args, await client.get_supported_tasks())
        chat_handler = OmniServingChat.from_vllm(state.openai_serving_chat)
        chat_handler.default_modalities = modalities
        chat_handler.transcripts = Transcripts()
        state.openai_serving_chat = chat_handler
        state.openai_serving_completion = OmniServingCompletion.from_vllm(state.openai_serving_completion)
    else:
        _init_diffusion_state(state, client, args)


def _init_diffusion_state(state: State, client: OmniEngineClient, args: Namespace) -> None:
    """What vLLM's routes read, where there is no vLLM stage whose tokenizer and configuration it could be made of."""
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
        [BaseModelPath(name, args.model) for name in names], args.lora_modules or ()
    )
    state.openai_serving_chat = DiffusionChat(client, state, args)


def _refuse_text(app: FastAPI, config: PipelineConfig) -> None:
    async def refuse() -> NoReturn:
        """This model neither reads nor writes tokens."""
        outputs = ", ".join(config.output_types)
        raise VLLMValidationError(f"this model neither reads nor writes tokens; it outputs {outputs}")

    for path in TEXT_PATHS:
        app.add_api_route(
            path, refuse, methods=["POST"], response_model=None, responses={HTTPStatus.BAD_REQUEST.value: {}}
        )


def _path(route: BaseRoute) -> str:
    return getattr(route, "path", "")
