# SPDX-License-Identifier: Apache-2.0
"""Containers: process and mount namespaces. Creating them requires root."""

import ctypes
import os
import shutil
import subprocess

UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc")
"""Runs a command in a process namespace of its own."""

_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


def why_not() -> str:
    """Why namespaces cannot be created; empty if they can."""
    if shutil.which(UNSHARE[0]) is None:
        return "there is no unshare"
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    return f"no namespace can be made: {tried.stderr.strip()}" if tried.returncode else ""


def enter_own_memory() -> None:
    """Gives this process and its children their own empty /dev/shm."""
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    _call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)


def fork_container() -> int:
    """Forks the first process of a new process namespace: its processes are numbered from 1 and end with it.

    Returns:
        The child's process id; 0 in the child.
    """
    pid = os.fork()
    if pid:
        return pid
    _call("unshare", _CLONE_NEWPID | _CLONE_NEWNS)
    first = os.fork()
    if first:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    _call("mount", b"proc", b"/proc", b"proc", 0, None)
    return 0


def _call(function: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{function}: {os.strerror(error)}")
