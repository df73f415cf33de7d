# SPDX-License-Identifier: Apache-2.0
"""What one-step models remember of streams from one window to the next.

A step may raise after the model is done with it, here or in another worker, and the window then runs again. So the
state before the last window is kept as well as the one after it.

Knows no model: what a state holds is the model's business.
"""

from dataclasses import dataclass
from typing import Any

from vllm_omni.core.sched.output import StreamWindow

State = dict[str, Any]


@dataclass(slots=True)
class _Stream:
    """
    Attributes:
        last: Index of the last window that has been computed.
        before, after: The state before and after it.
    """

    last: int
    before: State
    after: State


class Streams:
    """States by stream id."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, window: StreamWindow) -> State:
        """A copy of the state that this window starts from; empty for the first one.

        Raises:
            RuntimeError: The window before it has not been computed.
        """
        return dict(self._before(window))

    def save(self, window: StreamWindow, state: State) -> None:
        """Takes in the state after a window: what `open` gave, changed. That of a whole, one window, is not kept."""
        if not (window.is_first and window.is_last):
            self._streams[window.stream_id] = _Stream(window.index, self._before(window), state)

    def release(self, stream_id: str) -> None:
        """Forgets a stream, if it is known."""
        self._streams.pop(stream_id, None)

    def _before(self, window: StreamWindow) -> State:
        if window.is_first:
            return {}
        stream = self._streams.get(window.stream_id)
        if stream is None or stream.last not in (window.index - 1, window.index):
            raise RuntimeError(f"window {window.index} of stream {window.stream_id!r} came without the one before it")
        return stream.before if stream.last == window.index else stream.after
