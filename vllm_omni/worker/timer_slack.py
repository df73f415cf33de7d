# SPDX-License-Identifier: Apache-2.0
"""How late the timeouts of threads may be."""

import contextlib
import ctypes
import sys
from collections.abc import Iterator

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 200_000_000


@contextlib.contextmanager
def patient_threads() -> Iterator[None]:
    """Threads that are started inside may oversleep their timeouts by 0.2 s; whatever else they wait for is not late.

    For the threads of gloo, on a CPU; threads that a GPU's libraries start would be late as well. vLLM makes a dozen
    gloo groups for an engine, also for one that has nobody to talk to, and each group has a thread that looks every
    10 ms whether it is to end. In an idle pipeline of three stages they alone would take several percent of a core. The
    price is that the end of a group takes so much longer.
    """
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS))  # of this thread, and inherited by those that it starts
    try:
        yield
    finally:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(0))  # back to the default
