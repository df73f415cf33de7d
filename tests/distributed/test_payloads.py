# SPDX-License-Identifier: Apache-2.0
"""Senders and receivers in several threads of one process."""

import subprocess
import sys
import textwrap

import pytest

SEVERAL_THREADS = textwrap.dedent("""
    import sys, threading
    from pathlib import Path
    import msgspec
    from vllm_omni.distributed.connectors import InlineConnector, PayloadReceiver, PayloadSender

    def receive():
        receiver = PayloadReceiver(Path())
        barrier.wait()
        received.append(receiver.get(outer, ref, [memoryview(frame) for frame in frames]).y0)

    sys.setswitchinterval(1e-6)
    for round in range(100):
        inner = msgspec.defstruct(f"Inner{round}", [(f"x{i}", list[int], []) for i in range(20)])
        outer = msgspec.defstruct(f"Outer{round}", [(f"y{i}", list[inner], []) for i in range(20)])
        ref, frames = PayloadSender(InlineConnector()).put(outer(y0=[inner()]))
        received, barrier = [], threading.Barrier(4)
        threads = [threading.Thread(target=receive) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert received == [[inner()]] * 4
""")


@pytest.mark.slow
def test_threads_may_receive_the_first_payload_of_a_type_at_the_same_time() -> None:
    """In its own process, because a failure would crash it."""
    subprocess.run([sys.executable, "-c", SEVERAL_THREADS], check=True)
