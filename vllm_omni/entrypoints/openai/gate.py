# SPDX-License-Identifier: Apache-2.0
"""How many requests a server works on, and whether more may come: what a shutdown closes and waits for."""

import threading

from vllm_omni.errors import PipelineClosedError


class Gate:
    """For the event loop, which requests pass, and the thread that shuts down."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_running = 0
        self.is_closed = False
        self._is_hurried = False

    def check(self) -> None:
        """
        Raises:
            PipelineClosedError: Nobody is let in any more.
        """
        if self.is_closed:
            raise PipelineClosedError("the server is shutting down; send the request to another one")

    def __enter__(self) -> None:
        with self._changed:
            self.check()
            self._num_running += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Lets nobody in, and waits until all are out, as long as `timeout` seconds, or until `hurry`."""
        with self._changed:
            self.is_closed = True
            self._changed.wait_for(lambda: self._num_running == 0 or self._is_hurried, timeout)

    def hurry(self) -> None:
        """Ends the wait of `close`."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()
