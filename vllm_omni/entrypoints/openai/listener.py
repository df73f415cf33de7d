# SPDX-License-Identifier: Apache-2.0
"""The socket that a server listens on."""

import os
import socket
import stat
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from vllm.entrypoints.launchers.launcher import setup_server

UNSENT_BYTES = 1 << 17


@contextmanager
def listening(args: Namespace) -> Iterator[tuple[str, socket.socket]]:
    """The address for the log, and a socket that is bound to it; vLLM's, for `--uds`, or `--host` and `--port`.

    Sets `args.port` if the system has chosen the port. A Unix socket's file is removed at the end, and one that a
    killed server has left is removed at the start.

    Raises:
        OSError: The address is in use, or cannot be used.
    """
    if args.uds:
        _remove_unused(args.uds)
    address, listener = setup_server(args, reuse_port=False)
    with listener:
        if args.uds:
            bound = os.stat(args.uds)
            try:
                yield address, listener
            finally:
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(args.uds), bound):  # It may be another server's by now.
                        os.unlink(args.uds)
            return
        if args.port == 0:
            args.port = listener.getsockname()[1]
            address = f"{address.removesuffix(':0')}:{args.port}"
        limit_kernel_buffer(listener)
        yield address, listener


def limit_kernel_buffer(listener: socket.socket) -> None:
    """Has the system take little more of an answer than the client's window, so that progress is seen as it is made."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def _remove_unused(path: str) -> None:
    """Removes the file of a Unix socket that no process has open."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            except OSError:  # A socket of another type: a server that listens, or that still starts.
                pass
