# SPDX-License-Identifier: Apache-2.0
"""Messages between an orchestrator and the processes that start stages on other machines.

    orchestrator -> node        Preload, Fork, Kill, Shutdown, KeepAlive
    node -> orchestrator        Hello, Forked, Ending, Ended, KeepAlive

`number` counts the processes that the orchestrator starts. Both sides send a `KeepAlive` twice a second. A side that
hears nothing for some time gives the other up: the orchestrator takes the node's stages for dead, and the node ends
them, so that no stage works for an orchestrator that does not know of it. Time in which a side did not listen is not
the other one's silence: a garbage collection, or a machine with too much to do, may stop a thread for seconds.
"""

import msgspec

KEEP_ALIVE_S = 0.5
NODE_TIMEOUT_S = 2.0
ORCHESTRATOR_TIMEOUT_S = 6.0
"""Longer: a thread of a process with much else to do, such as imports that hold Python's lock, sends its messages."""


class Hello(msgspec.Struct, tag=True, kw_only=True):
    """The node can start stages.

    Attributes:
        node: The machine in messages.
        run_dir: Its directory of sockets and payloads.
    """

    node: str
    run_dir: str


class Preload(msgspec.Struct, tag=True):
    modules: list[str]


class Fork(msgspec.Struct, tag=True):
    """Start a process; `spec` is a list of `StageSpec` as JSON."""

    number: int
    spec: bytes
    timeout: float


class Forked(msgspec.Struct, tag=True):
    """The process was started, or why it was not."""

    number: int
    error: str = ""


class Kill(msgspec.Struct, tag=True):
    number: int


class Ending(msgspec.Struct, tag=True):
    """The process does not serve any more, and is about to end."""

    number: int


class Ended(msgspec.Struct, tag=True):
    number: int
    how: str


class Shutdown(msgspec.Struct, tag=True):
    """End; the stages have been told to."""


class KeepAlive(msgspec.Struct, tag=True):
    pass


ToNode = Preload | Fork | Kill | Shutdown | KeepAlive
FromNode = Hello | Forked | Ending | Ended | KeepAlive

encode = msgspec.msgpack.Encoder().encode
decode_at_node = msgspec.msgpack.Decoder(ToNode).decode
decode_at_orchestrator = msgspec.msgpack.Decoder(FromNode).decode


def unheard_s(previous: float, now: float) -> float:
    """Seconds between two times at which a thread listened, if it should have listened in between, else 0."""
    passed = now - previous
    return passed if passed > KEEP_ALIVE_S else 0.0
