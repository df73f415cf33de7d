# SPDX-License-Identifier: Apache-2.0
"""Hosts made of Linux namespaces: for trying pipelines on several machines with one.

Each host has its own network, mounts, `/tmp` and `/dev/shm`, processes, IPC and name, and can be switched off, frozen,
or cut off. They share the CPU, and all other files. Needs root, iproute2 and util-linux.
"""

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm import envs

_PREFIX = "omni"
"""Of namespaces; the process that made them follows."""
_numbers = itertools.count()
_SWITCH = "switch"
_RAY_PORT = 6380
_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
_START_S = 20.0
# Returns when Ray has no living node of an address.
_AWAIT_LOSS = """
import ray, sys, time
ray.init(address=sys.argv[1], log_to_driver=False)
while any(node["Alive"] and node["NodeManagerAddress"] == sys.argv[2] for node in ray.nodes()):
    time.sleep(0.05)
"""
_STALL_EVERY_S = 3.0
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
_MAX_FRAME = 1 << 16
_OF_PIPELINES = re.compile(r"vllm_omni(::|\.orchestrator)")
"""Stages, and the servers that start them."""
# Process 1 of a host: it keeps the namespaces, and collects orphans. Folders of /tmp that are shared are moved aside
# while /tmp is replaced.
_INIT = """
set -e
hostname "$1"; shift
mount -t proc proc /proc
mount -t tmpfs tmpfs /mnt
n=0; for folder in "$@"; do n=$((n+1)); mkdir "/mnt/$n"; mount --bind "$folder" "/mnt/$n"; done
mount -t tmpfs -o size=4g tmpfs /tmp
mount -t tmpfs -o size=2g tmpfs /dev/shm
n=0; for folder in "$@"; do n=$((n+1)); mkdir -p "$folder"; mount --move "/mnt/$n" "$folder"; done
mkdir -p /tmp/home
touch /tmp/is_up
trap : CHLD; while :; do sleep 3600 & wait; done
"""


class Host:
    """One host.

    Attributes:
        name: `h1`, ...
        address: On the network of the hosts.
    """

    def __init__(self, name: str, address: str, namespace: str, switch: str, shared: Sequence[Path]) -> None:
        self.name, self.address = name, address
        self._namespace, self._switch = namespace, switch
        self._shared = [str(path) for path in shared]

    def start(self) -> None:
        """Starts the host, also after `power_off`."""
        # The kernel ends it with the process that made it.
        command = ["setpriv", "--pdeathsig=KILL", "--", "setsid"]
        command += ["unshare", "-m", "-u", "-i", "-p", "-f", "--kill-child", "bash", "-c", _INIT, "init"]
        self._unshare = subprocess.Popen(
            ["ip", "netns", "exec", self._namespace, *command, self.name, *self._shared],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _START_S
        while not self._is_up():
            if time.monotonic() > deadline or self._unshare.poll() is not None:
                raise RuntimeError(f"host {self.name} did not start")
            time.sleep(0.02)

    def _is_up(self) -> bool:
        pid = self._unshare.pid
        with contextlib.suppress(OSError, ValueError, IndexError):
            self._pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
            return Path(f"/proc/{self._pid}/root/tmp/is_up").exists()
        return False

    def popen(self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen:
        """Runs a command on the host; options are those of `subprocess.Popen`."""
        enter = ["nsenter", "-t", str(self._pid), "-m", "-u", "-i", "-n", "-p", f"--wd={os.getcwd()}"]
        # What vLLM knows of models is shared: to find it out again takes a process for each, of ten seconds.
        own = {"HOME": "/tmp/home", "VLLM_CACHE_ROOT": envs.VLLM_CACHE_ROOT}
        return subprocess.Popen([*enter, *command], env={**os.environ, **own, **(env or {})}, **options)

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> str:
        """Runs a command until it has ended; returns what it wrote.

        Raises:
            subprocess.CalledProcessError: It failed.
        """
        with self.popen(command, env, stdout=subprocess.PIPE, text=True, **options) as process:
            output, _ = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, output)
        return output

    @property
    def pids(self) -> list[int]:
        """All processes of the host, as seen from outside, but the first one and its `sleep`."""
        pids = map(int, _ip("netns", "pids", self._namespace).split())
        return [pid for pid in pids if _command_of(pid)[:1] not in ([], ["sleep"], ["unshare"]) and pid != self._pid]

    def files(self, folder: str) -> list[str]:
        """The names in a folder of the host."""
        return sorted(os.listdir(f"/proc/{self._pid}/root{folder}"))

    @property
    def pipeline_parts(self) -> list[str]:
        """Command lines of the pipelines' processes, and their files in memory."""
        commands = (" ".join(_command_of(pid)) for pid in self.pids)
        files = (name for name in self.files("/dev/shm") if name.startswith("vllm_omni"))
        return [*(command for command in commands if _OF_PIPELINES.search(command)), *files]

    def power_off(self) -> None:
        """Kills all processes at once; files in memory are gone."""
        os.kill(self._pid, signal.SIGKILL)
        self._unshare.wait()

    def freeze(self) -> None:
        for pid in self.pids:
            _signal(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self.pids:
            _signal(pid, signal.SIGCONT)

    def unplug(self) -> None:
        """Nothing is received or sent any more, and nobody is told."""
        _ip("-n", self._switch, "link", "set", self.name, "down")

    def plug(self) -> None:
        _ip("-n", self._switch, "link", "set", self.name, "up")

    def limit_rate(self, rate: str) -> None:
        """Limits the rate of what it sends, such as `100mbit`."""
        options = ["rate", rate, "burst", "256kb", "latency", "50ms"]
        tc = ["ip", "netns", "exec", self._namespace, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf"]
        subprocess.run([*tc, *options], check=True)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.power_off()


class _SlowLink(threading.Thread):
    """A cable that delays all frames: two network devices, and a thread that carries frames from one to the other.

    Args:
        stall_s: At the end of each `_STALL_EVERY_S`, nothing arrives for so long.
    """

    def __init__(self, devices: Sequence[str], delay_s: float, stall_s: float) -> None:
        super().__init__(name="slow link", daemon=True)
        self._delay_s, self._stall_s = delay_s, stall_s
        self._ends = [_open_tap(device) for device in devices]
        self._on_the_way: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())  # when they arrive; by their end
        self._is_closed = False
        self.start()

    def run(self) -> None:
        while not self._is_closed:
            due = min((frames[0][0] for frames in self._on_the_way if frames), default=math.inf)
            wait_s = min(max(0.0, due - time.monotonic()), 0.1)
            for end in select.select(self._ends, [], [], wait_s)[0]:
                with contextlib.suppress(OSError):  # The device is being removed.
                    self._on_the_way[self._ends.index(end)].append((self._arrival(), os.read(end, _MAX_FRAME)))
            now = time.monotonic()
            for frames, other in zip(self._on_the_way, reversed(self._ends), strict=True):
                while frames and frames[0][0] <= now:
                    with contextlib.suppress(OSError):
                        os.write(other, frames.popleft()[1])

    def _arrival(self) -> float:
        due = time.monotonic() + self._delay_s
        in_period = due % _STALL_EVERY_S
        return due - in_period + _STALL_EVERY_S if in_period > _STALL_EVERY_S - self._stall_s else due

    def close(self) -> None:
        self._is_closed = True
        self.join()
        for end in self._ends:
            os.close(end)


def _open_tap(name: str) -> int:
    """A file that has the frames of a new network device, also after it is moved to another namespace."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return file


class RayNodes:
    """Ray on hosts; it notices a node that is switched off within 3 seconds, one that is frozen or cut off within 8.

    Attributes:
        env: For programs on the hosts that use the cluster.
    """

    def __init__(self, head: Host) -> None:
        self._head = head
        self.env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        checks = json.dumps(_HEALTH_CHECKS, separators=(",", ":"))
        options = ["--head", f"--port={_RAY_PORT}", "--include-dashboard=false", "--disable-usage-stats"]
        self._start(head, [*options, "--temp-dir=/tmp/ray", f"--system-config={checks}"])

    def add(self, host: Host) -> None:
        """It has a resource with its name."""
        self._start(host, [f"--address={self._head.address}:{_RAY_PORT}"])

    def wait_until_lost(self, host: Host) -> None:
        """Waits until Ray has given the node of a host up: one that answers again before that stays a node."""
        address = f"{self._head.address}:{_RAY_PORT}"
        self._head.run([sys.executable, "-c", _AWAIT_LOSS, address, host.address], self.env, stderr=subprocess.DEVNULL)

    def _start(self, host: Host, options: Sequence[str]) -> None:
        command = [str(Path(sys.executable).with_name("ray")), "start", *options]
        command += [f"--node-ip-address={host.address}", "--num-cpus=4", f'--resources={{"{host.name}":1}}']
        host.run([*command, "--object-store-memory=100000000"], env=self.env, stderr=subprocess.STDOUT)


class Hosts(contextlib.AbstractContextManager["Hosts"]):
    """Hosts on one network, 10.77.0.0/24.

    Attributes:
        hosts: Running hosts; they end with the context.
    """

    def __init__(self, number: int, shared: Sequence[Path] = (), delay_s: float = 0.0, stall_s: float = 0.0) -> None:
        """
        Args:
            shared: Folders below `/tmp` that the hosts see; all others are different on each.
            delay_s: Of what a host sends, until it arrives at the switch, and of what it receives.
            stall_s: Every three seconds nothing arrives for so long.
        """
        self._delay_s, self._stall_s = delay_s, stall_s
        self._names = [f"h{index + 1}" for index in range(number)]
        self._prefix = f"{_PREFIX}{os.getpid()}-{next(_numbers)}-"
        self._shared = [path.resolve() for path in shared if path.resolve().is_relative_to("/tmp")]
        self.hosts: list[Host] = []

    @staticmethod
    def why_not() -> str:
        """Why this machine cannot have such hosts; empty if it can."""
        if missing := [name for name in ("ip", "nsenter", "setpriv", "unshare", "tc") if shutil.which(name) is None]:
            return f"there is no {', '.join(missing)}"
        name = f"{_PREFIX}{os.getpid()}-probe"
        if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
            return "network namespaces are not allowed"
        _ip("netns", "delete", name)
        return ""

    def __enter__(self) -> "Hosts":
        remove_leftovers()
        with contextlib.ExitStack() as opened:
            switch = self._add_namespace(_SWITCH, opened)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for index, name in enumerate(self._names, 1):
                namespace = self._add_namespace(name, opened)
                host = Host(name, f"10.77.0.{index}", namespace, switch, self._shared)
                self._connect(namespace, switch, name, opened)
                _ip("-n", namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _ip("-n", namespace, "link", "set", device, "up")
                _ip("-n", switch, "link", "set", name, "master", "bridge", "up")
                host.start()
                opened.callback(host.stop)
                self.hosts.append(host)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def _connect(self, namespace: str, switch: str, name: str, opened: contextlib.ExitStack) -> None:
        """Its device is `eth0`, and `name` that of the switch."""
        if not self._delay_s:
            _ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", name, "netns", switch)
            return
        ends = [f"{self._prefix}{name}"[-15:], f"{self._prefix}s{name}"[-15:]]
        opened.callback(_SlowLink(ends, self._delay_s, self._stall_s).close)
        for end, where, new_name in zip(ends, (namespace, switch), ("eth0", name), strict=True):
            _ip("link", "set", end, "netns", where, "name", new_name)

    def _add_namespace(self, name: str, opened: contextlib.ExitStack) -> str:
        namespace = self._prefix + name
        _ip("netns", "add", namespace)
        opened.callback(_ip, "netns", "delete", namespace)
        return namespace


def remove_leftovers() -> None:
    """Removes the namespaces of processes that were killed."""
    for namespace in _ip("netns", "list").split():
        made_by = re.match(rf"{_PREFIX}(\d+)-", namespace)
        if made_by and not Path("/proc", made_by[1]).exists():
            _ip("netns", "delete", namespace)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _command_of(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    return []


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
