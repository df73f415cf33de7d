# SPDX-License-Identifier: Apache-2.0
"""Where the processes of stages are started."""

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import msgspec

from vllm_omni.distributed.network import NetworkSpec
from vllm_omni.distributed.run_dir import RunDir, orchestrator_address
from vllm_omni.launch.cluster import Cluster, Place
from vllm_omni.launch.fork_server import ForkServer, StageProcess
from vllm_omni.launch.node_server import encode_spec
from vllm_omni.launch.nodes import Nodes
from vllm_omni.launch.spec_factory import Site, SpecFactory
from vllm_omni.launch.stage_handle import StageHandle

OnWait = Callable[[str], None]


class Launcher(ABC):
    """Starts processes. For use from any thread."""

    @abstractmethod
    def launch(self, stage: StageHandle, timeout: float, on_wait: OnWait) -> StageProcess:
        """Starts a process for this replica of a stage.

        Args:
            timeout: Seconds that the start may take, once there is a machine for it.
            on_wait: Called with what is waited for, if there is none.

        Raises:
            OSError, EOFError: It could not be started, or the launcher was closed.
        """

    @abstractmethod
    def close(self) -> None:
        """No process is started any more, and `launch` does not wait any longer. Those that run are not touched."""


class LocalLauncher(Launcher):
    """Starts processes on this machine."""

    def __init__(self, server: ForkServer, specs: SpecFactory, site: Site) -> None:
        self._server, self._specs, self._site = server, specs, site

    def launch(self, stage: StageHandle, timeout: float, on_wait: OnWait) -> StageProcess:
        return self._server.fork(self._specs.encode(stage, self._site), timeout)

    def close(self) -> None:
        self._server.close()


class ClusterLauncher(Launcher):
    """Starts processes on the machines of a cluster; those that belong on this one are forked as without it."""

    def __init__(
        self, cluster: Cluster, server: ForkServer, specs: SpecFactory, nodes: Nodes, run_dir: RunDir,
        network: NetworkSpec, inbound_address: str,
    ) -> None:  # fmt: skip
        """
        Args:
            network: Of this machine.
            inbound_address: Of the orchestrator, for other machines.
        """
        self._cluster, self._server, self._specs, self._nodes = cluster, server, specs, nodes
        self._run_dir, self._network, self._inbound_address = run_dir, network, inbound_address
        self._config = specs.config
        self._places: dict[int, Place] = {}  # by instance id
        self._servers: dict[str, str] = {}  # the name of each node's server, by node
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # of the two

    def launch(self, stage: StageHandle, timeout: float, on_wait: OnWait) -> StageProcess:
        for other in self._config.instances:  # Those of one machine share it, so all places are needed.
            if other not in self._places or other == stage.instance_id:
                self._places[other] = self._cluster.place(other, on_wait)
        place = self._places[stage.instance_id]
        stage.node, stage.node_name = place.node, place.name
        if not place.node:
            return self._server.fork(self._specs.encode(stage, self._site(place, self._run_dir.path)), timeout)
        server = self._server_of(place, timeout)
        site = self._site(place, Path(self._nodes.wait_for(server, timeout)))
        return self._nodes.fork(server, self._specs.encode(stage, site), timeout)

    def close(self) -> None:
        self._server.close()
        self._nodes.cancel_waits()
        self._cluster.close()

    def _server_of(self, place: Place, timeout: float) -> str:
        """The name of a node's server, which is started if there is none."""
        with self._lock:
            server = self._servers.get(place.node, "")
            if not self._nodes.is_alive(server):
                # A name of its own: one that was given up may still send.
                server = self._servers[place.node] = f"{place.node}.{next(self._numbers)}"
                spec = encode_spec(server, place.name, self._nodes.address, self._network.keys)
                self._cluster.start_server(place.node, spec, timeout)
                self._nodes.wait_for(server, timeout)
                self._nodes.preload(server, self._server.modules)
        return server

    def _site(self, place: Place, run_dir: Path) -> Site:
        return Site(
            run_dir=run_dir,
            orchestrator=self._inbound_address if place.node else orchestrator_address(run_dir),
            is_local=not place.node,
            network=msgspec.structs.replace(self._network, host=place.host),
            devices={
                instance_id: other.devices for instance_id, other in self._places.items() if other.node == place.node
            },
            workers=place.workers,
        )
