# SPDX-License-Identifier: Apache-2.0
"""How media of a request comes into the server: vLLM's connector, within limits and on public ground.

vLLM's own rules stay: `--allowed-media-domains`, `--allowed-local-media-path`, its time-outs and redirect switch.
"""

import argparse
import contextlib
import logging
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from aiohttp import ClientError
from vllm.exceptions import VLLMClientError, VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.base import MediaIO

from vllm_omni.entrypoints.openai.address_guard import AddressGuard, GuardedHTTPConnection
from vllm_omni.entrypoints.openai.limits import RequestLimits, limits_from, media_count
from vllm_omni.entrypoints.openai.media_guard import GuardedMediaIO, kind_of

logger = logging.getLogger("vllm.omni.server")

CONNECTOR_NAME = "omni"


def install(args: argparse.Namespace) -> None:
    """Makes vLLM's chat take its media through ours. For a program's start; a connector that the user chose stays."""
    connection = GuardedHTTPConnection(AddressGuard(args.allowed_media_domains or ()))
    make = partial(OmniMediaConnector, connection=connection, limits=limits_from(args, RequestLimits))
    MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR_NAME)(make)
    chosen = os.environ.setdefault("VLLM_MEDIA_CONNECTOR", CONNECTOR_NAME)
    if chosen != CONNECTOR_NAME:
        logger.warning(
            "VLLM_MEDIA_CONNECTOR=%s fetches the media: it is not checked for private addresses and sizes", chosen
        )


class OmniMediaConnector(MediaConnector):
    """Counts, bounds and checks every part; whatever is wrong with one is the client's error, and names the part."""

    def __init__(self, *args: Any, limits: RequestLimits, **kwargs: Any) -> None:
        """Takes the arguments of `MediaConnector`, and the limits of a request."""
        super().__init__(*args, **kwargs)
        self._limits = limits

    def load_from_url(self, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None) -> Any:
        guarded, label = self._guard(url, media_io)
        with _client_errors(label, kind_of(media_io)):
            return super().load_from_url(url, guarded, fetch_timeout=fetch_timeout)

    async def load_from_url_async(self, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None) -> Any:
        guarded, label = self._guard(url, media_io)
        with _client_errors(label, kind_of(media_io)):
            return await super().load_from_url_async(url, guarded, fetch_timeout=fetch_timeout)

    def _guard(self, url: str, media_io: MediaIO[Any]) -> tuple[GuardedMediaIO, str]:
        count = media_count.get(None)  # There is none outside of an HTTP request.
        number = "" if count is None else f"media part {count.take()} of the request, "
        label = f"{number}{kind_of(media_io)} {url[:48]!r}{'...' if len(url) > 48 else ''}"
        return GuardedMediaIO(media_io, self._limits, label), label


@contextlib.contextmanager
def _client_errors(label: str, kind: str) -> Iterator[None]:
    """What a client is told of a part that could not be had."""
    try:
        yield
    except VLLMUnprocessableEntityError as error:
        # vLLM's: the host has answered that there is nothing.
        raise VLLMUnprocessableEntityError(f"{label}: {error.args[0]}", parameter=f"{kind}_url") from error
    except VLLMClientError:
        raise
    except (OSError, ClientError, TimeoutError) as error:
        reason = str(error) or "it took too long"
        raise VLLMUnprocessableEntityError(f"{label} cannot be fetched: {reason}", parameter=f"{kind}_url") from error
    except (ValueError, RuntimeError) as error:
        # RuntimeError: vLLM's, for a local file where there may be none. NotImplementedError: data that is not base64.
        raise VLLMValidationError(f"{label}: {error}", parameter=f"{kind}_url") from error
