# SPDX-License-Identifier: Apache-2.0
"""Request functions for `vllm bench serve --omni`: one request each, and what the client measured of it.

They have the signature of those in `vllm.benchmarks.lib.endpoint_request_func`. Knows no statistics.
"""

import json
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pybase64 as base64
from tqdm.asyncio import tqdm
from vllm.benchmarks.lib.endpoint_request_func import (
    RequestFunc,
    RequestFuncInput,
    RequestFuncOutput,
    StreamedResponseHandler,
    _get_chat_messages,
    _get_headers,
    _update_headers_common,
    _update_payload_common,
)

OPENAI_SAMPLE_RATE = 24_000
"""Hz, mono: what OpenAI's API means by `pcm` and `pcm16`."""
_WAV_HEADER = struct.Struct("<4s18xHI6xH4s4x")  # RIFF; channels, sample rate; bits; data


class FailedRequestError(Exception):
    """The server refused a request, or its answer is not what was asked for."""


@dataclass
class OmniRequestFuncOutput(RequestFuncOutput):
    """vLLM's record of one request, and that of outputs that are not text.

    Attributes:
        text_latency: Seconds until the last text; 0 without text. `latency` is that of the whole answer.
        ttfa: Seconds until the first sample of audio; 0 without audio.
        audio_duration: Seconds that the audio plays.
        num_images: Images of the answer.
    """

    text_latency: float = 0.0
    ttfa: float = 0.0
    audio_duration: float = 0.0
    num_images: int = 0


@dataclass
class PcmCounter:
    """Counts 16-bit samples in a stream of bytes: PCM, or WAV with a header of 44 bytes.

    Attributes:
        sample_rate, num_channels: Of the samples; a WAV header replaces them.
    """

    is_wav: bool = False
    sample_rate: int = OPENAI_SAMPLE_RATE
    num_channels: int = 1
    _header: bytes = field(default=b"", repr=False)
    _num_bytes: int = 0

    def add(self, data: bytes) -> bool:
        """Whether a sample has arrived so far.

        Raises:
            FailedRequestError: The header is not that of 16-bit WAV.
        """
        if self.is_wav and len(self._header) < _WAV_HEADER.size:
            self._header += data
            if len(self._header) < _WAV_HEADER.size:
                return False
            riff, self.num_channels, self.sample_rate, bits, chunk = _WAV_HEADER.unpack_from(self._header)
            if (riff, bits, chunk) != (b"RIFF", 16, b"data"):
                raise FailedRequestError("the audio is not 16-bit WAV")
            data = self._header[_WAV_HEADER.size :]
        self._num_bytes += len(data)
        return self._num_bytes > 0

    @property
    def seconds(self) -> float:
        return self._num_bytes / (2 * self.num_channels * self.sample_rate)


async def request_chat(
    request_func_input: RequestFuncInput, session: aiohttp.ClientSession, pbar: tqdm | None = None
) -> OmniRequestFuncOutput:
    """`openai-chat-omni`: a streamed chat answer of text and speech."""
    extra_body = {"modalities": ["text", "audio"], **(request_func_input.extra_body or {})}
    # The header of a WAV stream has the sample rate.
    audio = {"format": "wav", **(extra_body.get("audio") or {})}
    fields = {
        "messages": request_func_input.chat_messages or _get_chat_messages(request_func_input),
        "max_completion_tokens": request_func_input.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request_func_input = replace(request_func_input, extra_body={**extra_body, "audio": audio})

    async def read(response: aiohttp.ClientResponse, output: OmniRequestFuncOutput) -> None:
        if audio["format"] not in ("wav", "pcm16"):
            raise FailedRequestError(f"--extra-body: audio.format must be wav or pcm16, not {audio['format']}")
        await _read_chat(response, output, extra_body["modalities"], PcmCounter(audio["format"] == "wav"))

    return await _post(request_func_input, session, pbar, fields, read)


async def _read_chat(
    response: aiohttp.ClientResponse, output: OmniRequestFuncOutput, modalities: list[str], pcm: PcmCounter
) -> None:
    async for when, chunk in _events(response, output.start_time):
        if usage := chunk.get("usage"):
            details = usage.get("completion_tokens_details") or {}
            output.output_tokens = usage["completion_tokens"] - (details.get("audio_tokens") or 0)
            output.prompt_len = usage.get("prompt_tokens") or output.prompt_len
        for choice in chunk.get("choices") or ():
            delta = choice["delta"]
            audio = delta.get("audio") or {}
            # Without text as an output, the transcript shows when text was written.
            text = delta.get("content") if "text" in modalities else audio.get("transcript")
            if text:
                if output.generated_text:
                    output.itl.append(when - output.text_latency)
                else:
                    output.ttft = when
                output.generated_text += text
                output.text_latency = when
            if audio.get("data") and pcm.add(base64.b64decode(audio["data"])):
                output.ttfa = output.ttfa or when
            output.num_images += len(delta.get("images") or ())
    output.audio_duration = pcm.seconds
    if "audio" in modalities and not output.audio_duration:
        raise FailedRequestError(
            "the answer has no audio: serve a model that speaks, or leave audio out: "
            """--extra-body '{"modalities": ["text"]}'"""
        )


async def request_speech(
    request_func_input: RequestFuncInput, session: aiohttp.ClientSession, pbar: tqdm | None = None
) -> OmniRequestFuncOutput:
    """`openai-audio-speech`: the prompt as speech, streamed as PCM."""
    fields = {"input": request_func_input.prompt, "response_format": "pcm"}
    return await _post(request_func_input, session, pbar, fields, _read_speech)


async def _read_speech(response: aiohttp.ClientResponse, output: OmniRequestFuncOutput) -> None:
    if response.content_type not in ("audio/pcm", "application/octet-stream"):
        raise FailedRequestError(
            f"the answer is {response.content_type}, not audio/pcm: --extra-body must leave response_format and "
            "stream_format as they are"
        )
    rate, channels = response.headers.get("X-Sample-Rate", OPENAI_SAMPLE_RATE), response.headers.get("X-Channels", 1)
    pcm = PcmCounter(sample_rate=int(rate), num_channels=int(channels))
    async for data in response.content.iter_any():
        if pcm.add(data):
            output.ttfa = output.ttfa or time.perf_counter() - output.start_time
    output.ttft, output.audio_duration = output.ttfa, pcm.seconds
    if not output.audio_duration:
        raise FailedRequestError("the answer has no audio")


async def request_images(
    request_func_input: RequestFuncInput, session: aiohttp.ClientSession, pbar: tqdm | None = None
) -> OmniRequestFuncOutput:
    """`openai-images`: images of the prompt, whole."""
    return await _post(request_func_input, session, pbar, {"prompt": request_func_input.prompt}, _read_images)


async def _read_images(response: aiohttp.ClientResponse, output: OmniRequestFuncOutput) -> None:
    body = await response.read()
    output.ttft = time.perf_counter() - output.start_time
    output.num_images = len(json.loads(body)["data"])
    if not output.num_images:
        raise FailedRequestError("the answer has no images")


async def _post(
    request_func_input: RequestFuncInput,
    session: aiohttp.ClientSession,
    pbar: tqdm | None,
    fields: dict[str, Any],
    read: Callable[[aiohttp.ClientResponse, OmniRequestFuncOutput], Awaitable[None]],
) -> OmniRequestFuncOutput:
    """Sends one request; what fails is in `error`, as in vLLM's own functions.

    Args:
        fields: Of the request; those that the command line sets win.
    """
    output = OmniRequestFuncOutput(prompt_len=request_func_input.prompt_len)
    payload = {"model": request_func_input.model_name or request_func_input.model, **fields}
    _update_payload_common(payload, request_func_input)
    headers = _get_headers("application/json")
    _update_headers_common(headers, request_func_input)
    output.start_time = time.perf_counter()
    try:
        async with session.post(url=request_func_input.api_url, json=payload, headers=headers) as response:
            if response.status != 200:
                raise FailedRequestError(f"{response.status} {_error_message(await response.text())}")
            await read(response, output)
        output.latency = time.perf_counter() - output.start_time
        output.success = True
    except FailedRequestError as error:
        output.error = str(error)
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        output.error = f"{type(error).__name__}: {error}"
    if pbar:
        pbar.update(1)
    return output


def _error_message(body: str) -> str:
    """The message of an error in OpenAI's form; any other body as it is."""
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return body


async def _events(response: aiohttp.ClientResponse, start_time: float) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """The events of a stream, each with the seconds until it arrived.

    Raises:
        FailedRequestError: An event is an error, or the stream ends before `[DONE]`.
    """
    handler = StreamedResponseHandler()
    async for data in response.content.iter_any():
        when = time.perf_counter() - start_time
        for message in handler.add_chunk(data):
            if message.startswith(":"):  # a comment
                continue
            event = message.removeprefix("data: ")
            if event == "[DONE]":
                return
            chunk = json.loads(event)
            if "error" in chunk:
                raise FailedRequestError(chunk["error"]["message"])
            yield when, chunk
    raise FailedRequestError("the stream ended before [DONE]")


@dataclass(frozen=True)
class Backend:
    """A value of `--backend`.

    Attributes:
        endpoint: The default of `--endpoint`, and how it must end.
        has_text: Whether answers have text, and with it TTFT, TPOT and ITL.
    """

    request: RequestFunc
    endpoint: str
    has_text: bool = False


BACKENDS = {
    "openai-chat-omni": Backend(request_chat, "/v1/chat/completions", has_text=True),
    "openai-audio-speech": Backend(request_speech, "/v1/audio/speech"),
    "openai-images": Backend(request_images, "/v1/images/generations"),
}
