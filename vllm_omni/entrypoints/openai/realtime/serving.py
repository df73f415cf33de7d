# SPDX-License-Identifier: Apache-2.0
"""WS /v1/realtime and POST /v1/realtime/client_secrets, as in OpenAI's API, for a pipeline whose model answers in text.

What is wrong before a session starts is an HTTP error; everything later is an event.
"""

from __future__ import annotations

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, Literal

from fastapi import APIRouter, Request, WebSocket
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import State
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai.audio_formats import DEFAULT_SAMPLE_RATE
from vllm_omni.entrypoints.openai.chat import OmniServingChat
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import describe_errors
from vllm_omni.entrypoints.openai.media_endpoint import check_model, final_stage, served_names
from vllm_omni.entrypoints.openai.media_request import MediaFetcher
from vllm_omni.entrypoints.openai.realtime.client_secrets import (
    DEFAULT_S,
    MAX_S,
    MIN_S,
    ClientSecret,
    ClientSecrets,
    sent_key,
)
from vllm_omni.entrypoints.openai.realtime.config import SessionRules, Values
from vllm_omni.entrypoints.openai.realtime.event_session import Sessions, deny
from vllm_omni.entrypoints.openai.realtime.protocol import EventError, new_id, read_session
from vllm_omni.entrypoints.openai.realtime.response import Speculations
from vllm_omni.entrypoints.openai.realtime.session import Session
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.server_args import RequestLimits, limits_from

PATH = "/v1/realtime"

_NUM_THREADS = 4  # That detect turns.
_NO_CONVERSATION = "this model holds no conversation: it does not answer in text"


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"] = "created_at"
    seconds: int = Field(DEFAULT_S, ge=MIN_S, le=MAX_S)


class ClientSecretRequest(BaseModel):
    """A key for sessions with a configuration."""

    model_config = ConfigDict(extra="forbid")

    expires_after: ExpiresAfter = ExpiresAfter(seconds=DEFAULT_S)
    session: dict[str, Any] | None = Field(
        None, description="The configuration, as in session.update.", examples=[{"type": "realtime"}]
    )


class ClientSecretResponse(BaseModel):
    value: str = Field(description="The key, for an Authorization header or a browser's WebSocket.")
    expires_at: int = Field(description="Until when a session can be opened with it, in seconds since 1970.")
    session: dict[str, Any] = Field(description="The configuration of its sessions.")


def can_converse(client: OmniEngineClient) -> bool:
    """Whether the pipeline's model reads messages and answers in text, perhaps with speech."""
    return client.has_renderer and "text" in client.config.output_types and not client.only_transcribes


class ServingRealtime:
    """The handler of the sessions.

    Attributes:
        speculations: Their speculative answers.
    """

    def __init__(self, chat: OmniServingChat, state: State, args: Namespace, sessions: Sessions) -> None:
        self._secrets: ClientSecrets = state.client_secrets
        self._chat = chat
        self._model_names = served_names(state)
        self._sessions = sessions
        self.speculations = Speculations(sessions.limits.max_realtime_speculative_responses)
        self._rules = SessionRules(chat.client, chat.asr_stage, limits_from(args, RequestLimits).max_media_parts)
        stage = final_stage(chat.client.config, "audio")
        self._sample_rate = (stage and stage.sample_rate) or DEFAULT_SAMPLE_RATE
        self._media = MediaFetcher(chat.client, args)
        # Their own: minutes of sound that several clients send at once would take all threads of the event loop.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "realtime")

    def create_secret(self, request: ClientSecretRequest, owner: bytes) -> ClientSecret:
        """
        Raises:
            VLLMValidationError: The configuration is wrong.
        """
        given = {"type": "realtime", **(request.session or {})}
        try:
            session = read_session(given)
            values = self._default(session.model)
            values = self._rules.updated(values, session)
        except EventError as error:
            raise VLLMValidationError(error.message, parameter=error.param) from error
        return self._secrets.create(request.expires_after.seconds, owner, values)

    def _default(self, model: str | None) -> Values:
        check_model(model, self._model_names)
        return self._rules.default(model or self._model_names[0])

    async def open(self, websocket: WebSocket) -> Session:
        """
        Raises:
            OmniError: The pipeline accepts no requests.
            VLLMNotFoundError: The client asks for another model.
        """
        secret = self._secrets.find(sent_key(websocket.scope))
        model = websocket.query_params.get("model")
        self._chat.client.check_admission()
        check_model(model, self._model_names)
        return Session(
            websocket,
            self._chat,
            self._rules,
            self._default(model) if secret is None else secret.values,
            self._sessions,
            sample_rate=self._sample_rate,
            threads=self._threads,
            media=self._media,
            speculations=self.speculations,
        )


router = APIRouter()


@router.websocket(PATH)
async def realtime(websocket: WebSocket) -> None:
    """A spoken conversation."""
    state = websocket.app.state
    if state.omni_realtime is None:
        await deny(websocket, _NO_CONVERSATION, HTTPStatus.BAD_REQUEST)
    else:
        await state.omni_sessions.serve(websocket, state.omni_realtime.open)


@router.post(
    f"{PATH}/client_secrets",
    responses={HTTPStatus.OK.value: {"model": ClientSecretResponse}, **describe_errors()},
)
async def create_client_secret(request: ClientSecretRequest, raw_request: Request) -> JSONResponse:
    """An ephemeral key, with which a browser can open a session."""
    handler: ServingRealtime | None = raw_request.app.state.omni_realtime
    if handler is None:
        raise VLLMValidationError(_NO_CONVERSATION, parameter="model")
    secret = handler.create_secret(request, RequestContext.of(raw_request).owner)
    session = {"id": new_id("sess"), "expires_at": secret.expires_at, **secret.values}
    answer = ClientSecretResponse(value=secret.value, expires_at=secret.expires_at, session=session)
    return JSONResponse(answer.model_dump())
