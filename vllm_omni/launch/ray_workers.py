# SPDX-License-Identifier: Apache-2.0
"""What `RayCluster` runs on nodes. Imports little: a worker of Ray imports it before anything can start there."""

import socket
import subprocess
import sys

import psutil
import ray

from vllm_omni.errors import StageConfigError


@ray.remote(num_cpus=0, max_retries=0)
def locate(interface: str | None) -> tuple[str, str, str]:
    """Describes the node that it runs on: the id, the address for others, and the accelerators of the bundle."""
    context = ray.get_runtime_context()
    devices = [str(name) for names in context.get_accelerator_ids().values() for name in names]
    return context.get_node_id(), find_address(interface), ",".join(devices)


@ray.remote(max_restarts=0)
class StageHost:
    """Starts a `NodeServer` on its node, which ends with this actor.

    It is not a child of the actor: Ray kills those at once, and they could not remove their files.
    """

    def __init__(self, spec: bytes) -> None:
        self._lifeline, its_end = socket.socketpair()
        with its_end:
            command = (sys.executable, "-m", "vllm_omni.launch.node_server", str(its_end.fileno()))
            # The shell ends at once, and the server belongs to nobody.
            subprocess.run(["sh", "-c", 'setsid "$@" &', "sh", *command], pass_fds=[its_end.fileno()], check=True)
        self._lifeline.sendall(spec)

    def is_started(self) -> bool:
        return True


def find_address(interface: str | None) -> str:
    """This machine's address on a network interface, or the one by which Ray knows it."""
    if interface is None:
        return ray.util.get_node_ip_address()
    addresses = psutil.net_if_addrs().get(interface, [])
    for address in addresses:
        if address.family == socket.AF_INET:
            return address.address
    raise StageConfigError(
        f"runtime.network_interface: {socket.gethostname()} has no IPv4 address on {interface!r}; its interfaces: "
        f"{', '.join(psutil.net_if_addrs())}"
    )
