# SPDX-License-Identifier: Apache-2.0
"""The server that a page is for: OpenAI's client, the description of its model, and its errors in words."""

import base64
import mimetypes
import ssl
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import httpx2
import openai
import websockets

from vllm_omni.errors import UsageError

FAILURES = (openai.OpenAIError, httpx2.HTTPError)
"""What a request to the server raises if it failed."""

_TIMEOUT_S = 10.0
"""For small answers. Those of a model take as long as they take."""


@dataclass(frozen=True)
class Stage:
    """See `/v1/pipeline`."""

    name: str
    kind: str
    output: str | None
    sampling_params: dict[str, Any]


@dataclass(frozen=True)
class Description:
    """What the served model reads and makes, see `/v1/pipeline`."""

    model: str
    inputs: list[str]
    outputs: list[str]
    endpoints: list[str]
    speech_fields: list[str]
    voices: list[str]
    stages: list[Stage] = field(default_factory=list)

    @classmethod
    def read(cls, answer: dict[str, Any]) -> "Description":
        """What the page needs of the answer; a server may say more."""
        stages = [Stage(**_known(Stage, stage)) for stage in answer["stages"]]
        return cls(**{**_known(cls, answer), "stages": stages})

    def has(self, endpoint: str) -> bool:
        return endpoint in self.endpoints

    def stage_for(self, output: str) -> Stage | None:
        """The stage that returns these outputs."""
        return next((stage for stage in self.stages if stage.output == output), None)


def _known(kind: type, answer: dict[str, Any]) -> dict[str, Any]:
    return {each.name: answer[each.name] for each in fields(kind) if each.name in answer}


class Server:
    """
    Attributes:
        url: Its address, without `/v1`.
        openai: OpenAI's client of it. It does not retry: a person sees the error, and decides.
    """

    def __init__(self, url: str, api_key: str | None = None, verify: bool = True) -> None:
        """
        Args:
            url: Its address; `http://` may be left out.
            verify: Whether the certificate of an HTTPS server is checked.
        """
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._verify = verify
        self.openai = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=api_key or "none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=verify),
        )

    def describe(self) -> Description:
        """
        Raises:
            UsageError: The server does not answer, refuses the key, or is none of ours.
        """
        try:
            answer = httpx2.get(
                f"{self.url}/v1/pipeline", headers=self._headers, verify=self._verify, timeout=_TIMEOUT_S
            )
            answer.raise_for_status()
            return Description.read(answer.json())
        except httpx2.HTTPStatusError as error:
            if error.response.status_code == httpx2.codes.NOT_FOUND:
                raise UsageError(f"{self.url} has no /v1/pipeline; give the address of a vllm-omni server") from error
            raise UsageError(f"{self.url}: {self.explain(error)}") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"no vllm-omni server answers at {self.url}: {error}") from error

    async def get(self, path: str) -> httpx2.Response:
        """A small answer, whatever its status. Raises `httpx2.HTTPError`."""
        async with httpx2.AsyncClient(verify=self._verify, timeout=_TIMEOUT_S) as client:
            return await client.get(f"{self.url}{path}", headers=self._headers)

    def connect_realtime(self, key: str) -> websockets.connect:
        """A session of `/v1/realtime` with an ephemeral key. Raises `OSError` and `WebSocketException`."""
        url = f"ws{self.url.removeprefix('http')}/v1/realtime"
        options: dict[str, Any] = {}
        if url.startswith("wss:") and not self._verify:
            options["ssl"] = context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        protocols: Any = ["realtime", f"openai-insecure-api-key.{key}"]
        return websockets.connect(url, subprotocols=protocols, max_size=None, **options)

    def explain(self, error: Exception) -> str:
        """What the server said, for a person."""
        if isinstance(error, (openai.APITimeoutError, httpx2.TimeoutException)):
            return "The server took too long to answer."
        if isinstance(error, (openai.APIConnectionError, httpx2.TransportError, OSError, websockets.ConnectionClosed)):
            return f"The server at {self.url} does not answer, or stopped in the middle. Is it running? Try again."
        if isinstance(error, openai.APIStatusError):
            return f"The server answered {error.status_code}: {_message(error.body) or error.message}"
        if isinstance(error, httpx2.HTTPStatusError):
            return f"The server answered {error.response.status_code}: {_message_of(error.response)}"
        if isinstance(error, websockets.InvalidStatus):
            answer = httpx2.Response(error.response.status_code, content=bytes(error.response.body or b""))
            return f"The server answered {answer.status_code}: {_message_of(answer)}"
        return f"The request failed: {_message(getattr(error, 'body', None)) or error}"


def _message(body: Any) -> str | None:
    """The message of an error's body, with or without the key `error` around it."""
    inner = body.get("error", body) if isinstance(body, dict) else None
    return inner.get("message") if isinstance(inner, dict) else None


def _message_of(response: httpx2.Response) -> str:
    try:
        return _message(response.json()) or response.reason_phrase
    except ValueError:
        return response.reason_phrase


def data_uri(path: str) -> str:
    """A file in an address."""
    media_type = mimetypes.guess_type(path)[0] or "application/octet-stream"
    return f"data:{media_type};base64,{base64.b64encode(Path(path).read_bytes()).decode()}"


def kind_of(path: str) -> str:
    """`image`, `audio`, `video`, or another part of the file's media type."""
    return (mimetypes.guess_type(path)[0] or "").partition("/")[0]
