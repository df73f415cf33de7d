# SPDX-License-Identifier: Apache-2.0
"""The memory that decoded media may take: of one request, of those of one client, and of all.

A file of kilobytes may be decoded to gigabytes. So a part of the budget is taken before it is decoded, by what its
header says, and corrected afterwards. It is free again when the decoded media is, which is earlier than the request
ends: the model's processor has made its input of it. Does not know how media is read. Thread-safe.
"""

import gc
import threading
import weakref
from typing import Any

import numpy as np

from vllm_omni.entrypoints.openai.request_context import RequestContext, TooMuchMediaError
from vllm_omni.entrypoints.openai.server_args import flag
from vllm_omni.errors import PipelineFullError

_RETRY_S = 1.0


class MediaBudget:
    """The budget of one server."""

    def __init__(self, max_request_bytes: int, max_total_bytes: int, max_client_bytes: int | None = None) -> None:
        """`max_client_bytes`: None: half of all."""
        self._max_request_bytes = max_request_bytes
        self._max_total_bytes = max_total_bytes
        self._max_client_bytes = max_client_bytes or max(max_total_bytes // 2, max_request_bytes)
        self._lock = threading.Lock()
        # Media may be freed at any moment, on any thread: that is one `pop`, without the lock.
        self._taken: dict[MediaShare, int] = {}

    @property
    def taken_bytes(self) -> int:
        return sum(list(self._taken.values()))

    def take(self, share: "MediaShare", num_bytes: int) -> None:
        """Has a share be of a size.

        Raises:
            TooMuchMediaError: The request has more than one may have.
            PipelineFullError: All requests, or the client's, would have more; the share is as before.
        """
        with self._lock:
            share.context.num_decoded_bytes += num_bytes - share.num_request_bytes
            share.num_request_bytes = num_bytes
            if share.context.num_decoded_bytes > self._max_request_bytes:
                raise TooMuchMediaError(
                    f"the media of this request would take more than {self._max_request_bytes} bytes when they are "
                    f"decoded ({flag('max_decoded_bytes')}); send fewer or smaller images, or shorter videos"
                )
        if self._try_take(share, num_bytes):
            gc.collect()  # Media in a cycle, such as that of an error with its frames.
            if full := self._try_take(share, num_bytes):
                raise PipelineFullError(f"the decoded media of {full}; try again later", _RETRY_S)

    def _try_take(self, share: "MediaShare", num_bytes: int) -> str:
        """Takes it, or returns whose limit has been reached."""
        client = share.context.client
        with self._lock:
            taken = [(other.context.client, size) for other, size in list(self._taken.items()) if other is not share]
            if sum(size for _, size in taken) + num_bytes > self._max_total_bytes:
                return (
                    f"all requests would take more than {self._max_total_bytes} bytes "
                    f"({flag('max_total_decoded_bytes')})"
                )
            own = sum(size for other, size in taken if other == client)
            if client and own + num_bytes > self._max_client_bytes:
                return (
                    f"your requests would take more than {self._max_client_bytes} bytes "
                    f"({flag('max_client_decoded_bytes')})"
                )
            self._taken[share] = num_bytes
            return ""

    def release(self, share: "MediaShare") -> None:
        self._taken.pop(share, None)


class MediaShare:
    """What one image, sound or video takes of a budget.

    Attributes:
        context: Of its request.
        num_request_bytes: That its request counts for it.
    """

    def __init__(self, budget: MediaBudget, context: RequestContext) -> None:
        self._budget = budget
        self.context = context
        self.num_request_bytes = 0

    def take(self, num_bytes: int) -> None:
        """See `MediaBudget.take`."""
        self._budget.take(self, num_bytes)

    def release(self) -> None:
        self._budget.release(self)

    def release_with(self, media: Any) -> None:
        """Releases it when an image, or the memory of an array, is freed."""
        while isinstance(media, np.ndarray) and isinstance(media.base, np.ndarray):
            media = media.base
        weakref.finalize(media, self._budget.release, self).atexit = False
