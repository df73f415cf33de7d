# SPDX-License-Identifier: Apache-2.0
"""/v1/responses for a pipeline that writes text: vLLM's handler, with a store that is bounded and belongs to a key.

An answer has text, and pictures where the request has OpenAI's tool for them; OpenAI's API has no speech there.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, MutableMapping
from http import HTTPStatus
from mimetypes import guess_type
from typing import Any, Self
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from openai.types.responses import ResponseFunctionToolCall
from openai.types.responses.response_output_item import ImageGenerationCall
from pydantic import ModelWrapValidatorHandler, model_validator
from vllm.entrypoints.openai.responses.api_router import cancel_responses as vllm_cancel_responses
from vllm.entrypoints.openai.responses.api_router import create_responses as vllm_create_responses
from vllm.entrypoints.openai.responses.api_router import retrieve_responses as vllm_retrieve_responses
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai.asr_stage import ASRStage
from vllm_omni.entrypoints.openai.chat import GenerateBaseServing, OmniServing, ResponsesRequest
from vllm_omni.entrypoints.openai.chat_messages import read_part
from vllm_omni.entrypoints.openai.http_errors import describe_errors
from vllm_omni.entrypoints.openai.image_calls import CALL, image_call_events, make_image_calls, read_image_tool
from vllm_omni.entrypoints.openai.json_body import num_bytes
from vllm_omni.entrypoints.openai.request_context import RequestContext, RequestOptions
from vllm_omni.entrypoints.openai.server_args import MIB
from vllm_omni.entrypoints.openai.sse import MEDIA_TYPE, defer_headers
from vllm_omni.entrypoints.openai.stage_params import explicit_fields

MAX_STORED = 1000
"""Responses that are kept for each API key; the oldest leave first."""
MAX_STORED_BYTES, MAX_TOTAL_STORED_BYTES = 64 * MIB, 512 * MIB
"""That the messages, or the events, of these take, of one key and of all: a key whose own leave keeps its newest one at
least."""


class OmniResponsesRequest(ResponsesRequest):
    """OpenAI's and vLLM's fields. Parts of messages may be sounds and videos as well, in the forms that a chat has."""

    @model_validator(mode="wrap")
    @classmethod
    def _read_media(cls, data: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        """vLLM's types know texts and pictures, so the other parts are kept from them."""
        given = data.get("input") if isinstance(data, Mapping) else None
        items = list(given) if isinstance(given, list) else []
        media = [(i, j, part) for i, item in enumerate(items) for j, part in enumerate(_parts(item)) if _is_media(part)]
        for i in {i for i, _, _ in media}:
            items[i] = {**items[i], "content": list(items[i]["content"])}
        for i, j, _ in media:
            items[i]["content"][j] = _PLACEHOLDER
        request = check({**data, "input": items} if media else data)
        for i, j, part in media:
            read: Any = request.input[i]
            where = f"input[{i}].content[{j}]"
            read["content"][j] = read_part(_read_file(part, where) if part["type"] == _FILE else part, where)
        return request


_FILE = "input_file"
_MEDIA = ("input_audio", "audio_url", "video_url", "image_url", _FILE)
_PLACEHOLDER = {"type": "input_text", "text": ""}


def _parts(item: Any) -> list[Any]:
    content = item.get("content") if isinstance(item, Mapping) else None
    return content if isinstance(content, list) else []


def _is_media(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _MEDIA


def _read_file(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A file as the image, sound or video that its name, or its data URI, says it is.

    Raises:
        VLLMValidationError: It is none of these, or is not in the request.
    """
    url, name = part.get("file_data") or part.get("file_url"), part.get("filename")
    if not isinstance(url, str):
        raise VLLMValidationError(f"{where} is an {_FILE} without file_data and file_url", parameter=where)
    media_type = url[len("data:") :].partition(";")[0] if url[:5].lower() == "data:" else None
    media_type = media_type or guess_type(name if isinstance(name, str) and name else urlsplit(url).path)[0] or ""
    kind = media_type.partition("/")[0]
    if kind not in ("image", "audio", "video"):
        given = media_type or "an unknown type"
        raise VLLMValidationError(
            f"{where} is an {_FILE} of {given}; it may be an image, a sound or a video", parameter=where
        )
    if part.get("file_data") and url[:5].lower() != "data:":
        url = f"data:{media_type};base64,{url}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


class OmniServingResponses(OmniServing, OpenAIServingResponses):
    """vLLM's, sampling as the stage is configured. Responses are stored, as OpenAI stores them, within bounds.

    Attributes:
        asr_stage: As `OmniServingChat`'s.
    """

    asr_stage: ASRStage | None = None

    @classmethod
    def from_vllm(cls, handler: GenerateBaseServing, **attributes: Any) -> Self:
        stores = {name: OwnedStore() for name in ("response_store", "msg_store", "event_store")}
        return super().from_vllm(handler, enable_store=True, **stores, **attributes)

    async def create_responses(self, request: ResponsesRequest, raw_request: Request | None = None) -> Any:
        """Answers. Who reads a stream first awaits the context's `started`, or early errors are events in it."""
        names = explicit_fields(request)
        names |= {"max_tokens"} if request.max_output_tokens is not None else set()
        stage_params = None
        if request.tool_choice != "none":
            stage_params = read_image_tool(request.tools, self.client.config)
        RequestContext.current().options = RequestOptions(
            modalities=("text",) if stage_params is None else ("text", "image"),
            stage_params=stage_params,
            explicit_fields=names,
            keeps_media=stage_params is not None,
        )
        if (previous := request.previous_response_id) is not None and previous not in self.msg_store:
            self.response_store.pop(previous, None)  # Else the answer would be to its last message alone.
        if isinstance(request.input, list):
            calls = self._earlier_calls(request.previous_response_id)
            # The model reads the texts of earlier answers, not their pictures.
            items: list[Any] = [item for item in request.input if _type_of(item) != CALL]
            request.input = [*calls, *(items if self.asr_stage is None else await self.asr_stage.as_text(items))]
        return await super().create_responses(request, raw_request)

    async def responses_full_generator(self, request: ResponsesRequest, *args: Any, **kwargs: Any) -> Any:
        answer = await super().responses_full_generator(request, *args, **kwargs)
        if isinstance(answer, ResponsesResponse) and (calls := await _take_image_calls()):
            answer.output += calls
            if self.response_store.get(answer.id) is answer:
                self.response_store[answer.id] = answer  # Its pictures count, too.
        return answer

    async def _process_simple_streaming_events(
        self,
        request: ResponsesRequest,
        sampling_params: Any,
        result_generator: Any,
        context: Any,
        model_name: str,
        tokenizer: Any,
        request_metadata: Any,
        created_time: int,
        _increment_sequence_number_and_return: Callable[[Any], Any],
    ) -> AsyncGenerator[Any, None]:
        """The events of the text, and, once it is painted, those of a picture."""
        number = _increment_sequence_number_and_return
        async for event in super()._process_simple_streaming_events(
            request, sampling_params, result_generator, context, model_name, tokenizer, request_metadata, created_time,
            number,
        ):  # fmt: skip
            yield event
        for call in await _take_image_calls():
            for event in image_call_events(call, len(context.streamed_output_items), number):
                yield event
            context.streamed_output_items.append(call)

    async def _run_background_request_stream(self, request: ResponsesRequest, *args: Any, **kwargs: Any) -> None:
        """vLLM keeps the events of a stream while it is made; here they count once they are all there."""
        try:
            await super()._run_background_request_stream(request, *args, **kwargs)
        finally:
            if (kept := self.event_store.get(request.request_id)) is not None:
                self.event_store[request.request_id] = kept

    def _earlier_calls(self, response_id: str | None) -> list[ResponseFunctionToolCall]:
        """The calls of the response that a request continues: vLLM repeats its texts only, and the results that the
        request has would follow no call."""
        previous = None if response_id is None else self.response_store.get(response_id)
        outputs = [] if previous is None else previous.output
        return [item for item in outputs if isinstance(item, ResponseFunctionToolCall)]


async def _take_image_calls() -> list[ImageGenerationCall]:
    """Those of the current request, once."""
    events, RequestContext.current().completed = RequestContext.current().completed, []
    return [call for event in events for call in await asyncio.to_thread(make_image_calls, event)]


def _type_of(item: Any) -> str | None:
    return item.get("type") if isinstance(item, Mapping) else item.type


class OwnedStore(MutableMapping[str, Any]):
    """A store of vLLM's, in which each API key finds its own entries only. The oldest of a key leave first."""

    def __init__(self) -> None:
        self._entries: defaultdict[bytes, OrderedDict[str, tuple[Any, int]]] = defaultdict(OrderedDict)
        self._num_bytes: Counter[bytes] = Counter()

    @property
    def _own(self) -> OrderedDict[str, tuple[Any, int]]:
        return self._entries[RequestContext.current().owner]

    def __getitem__(self, key: str) -> Any:
        return self._own[key][0]

    def __setitem__(self, key: str, value: Any) -> None:
        owner, own = RequestContext.current().owner, self._own
        if key in own:
            del self[key]
        own[key] = (value, num_bytes(value))
        self._num_bytes[owner] += own[key][1]
        while len(own) > 1 and (
            len(own) > MAX_STORED
            or self._num_bytes[owner] > MAX_STORED_BYTES
            or self._num_bytes.total() > MAX_TOTAL_STORED_BYTES
        ):
            del self[next(iter(own))]

    def __delitem__(self, key: str) -> None:
        _, size = self._own.pop(key)
        self._num_bytes[RequestContext.current().owner] -= size

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


router = APIRouter()


@router.post(
    "/v1/responses",
    response_model=None,
    responses={
        HTTPStatus.OK.value: {"model": ResponsesResponse, "content": {MEDIA_TYPE: {}}},
        **describe_errors(),
    },
)
async def create_responses(request: OmniResponsesRequest, raw_request: Request) -> Any:
    """Text as the answer to a conversation, whole or as a stream, in the form of OpenAI's Responses API."""
    return defer_headers(await vllm_create_responses(request, raw_request), RequestContext.of(raw_request))


router.get("/v1/responses/{response_id}", response_model=None)(vllm_retrieve_responses)
router.post("/v1/responses/{response_id}/cancel", response_model=None)(vllm_cancel_responses)
