# SPDX-License-Identifier: Apache-2.0
"""Machines of a Ray cluster.

A pipeline has one placement group, with a bundle for each process; Ray moves the bundles of a node that dies to others.
A stage whose workers Ray starts (`distributed_executor_backend: ray`) has one of its own with a bundle for each worker,
as vLLM's Ray executor requires; its process is where the first worker is. Ray also starts a `NodeServer` on each node.
It is no part of any data path, and no end of a process is learnt from it.
"""

import contextlib
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from vllm.platforms import current_platform

from vllm_omni.config.resources import instance_cpus, instance_devices
from vllm_omni.config.stage_config import PipelineConfig, StageInstance
from vllm_omni.errors import PipelineStartError, StageConfigError
from vllm_omni.launch.cluster import Cluster, Place
from vllm_omni.launch.ray_workers import StageHost, find_address, locate
from vllm_omni.placement.devices import num_devices, world_size
from vllm_omni.stage.spec import RayWorkers

Resources = dict[str, float]

_PIN = 0.001
"""Of the resource `node:ADDRESS`, which each node has."""
_REPORT_AFTER_S = 2.0


@dataclass(frozen=True)
class _Reserved:
    """What a process has of the cluster.

    Attributes:
        bundles: Their indices in the group.
        workers: Where Ray starts the workers of its engine: in these bundles; None: they belong to the process.
    """

    group: PlacementGroup
    bundles: list[int]
    workers: RayWorkers | None = None


class RayCluster(Cluster):
    """The resources of a pipeline in a Ray cluster."""

    def __init__(self, config: PipelineConfig, timeout: float) -> None:
        """Waits up to `timeout` seconds for resources that are in use.

        Raises:
            PipelineStartError: There is no such cluster, or it has not got the resources.
            StageConfigError: A stage names a node that is not in the cluster.
        """
        self._interface = config.runtime.network_interface
        self._is_closed = threading.Event()
        self._hosts: list[Any] = []  # Ray ends an actor when it is not referenced any more.
        self._opened = contextlib.ExitStack()
        try:
            self._connect(config.runtime.ray_address)
            self._bundles = {instance.label: _make_bundles(instance) for instance in config.instances.values()}
            self._check_fit()
            self._instances = config.instances
            self._reserved = self._reserve(timeout)
            self._own_node = ray.get_runtime_context().get_node_id()
            self.host = find_address(self._interface)
        except BaseException:
            self._opened.close()
            raise

    def _connect(self, address: str) -> None:
        if ray.is_initialized():
            return  # by the program that uses this one
        try:
            ray.init(address=address, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise PipelineStartError(
                f"no Ray cluster at {address!r} ({error}); start one (`ray start --head`), or set ray_address to "
                "HOST:PORT, or to 'local' for a new one on this machine"
            ) from error
        self._opened.callback(ray.shutdown)

    def _reserve(self, timeout: float) -> dict[int, _Reserved]:
        """Reserves what each replica asks for; by instance id."""
        reserved: dict[int, _Reserved] = {}
        together = [instance for instance in self._instances.values() if not instance.stage.kind.has_ray_workers]
        if together:
            group = self._make_group([self._bundles[instance.label][0] for instance in together])
            reserved |= {instance.instance_id: _Reserved(group, [bundle]) for bundle, instance in enumerate(together)}
        context = ray.get_runtime_context()
        for instance_id, instance in self._instances.items():
            if instance.stage.kind.has_ray_workers:
                name = f"vllm_omni-{uuid.uuid4().hex}"
                workers = RayWorkers(address=context.gcs_address, namespace=context.namespace, group=name)
                bundles = self._bundles[instance.label]
                reserved[instance_id] = _Reserved(self._make_group(bundles, name), list(range(len(bundles))), workers)
        deadline = time.monotonic() + timeout
        for own in reserved.values():
            if not own.group.wait(max(0.0, deadline - time.monotonic())):
                raise PipelineStartError(f"the resources were not free within {timeout:g} s\n{self._describe()}")
        return reserved

    def _make_group(self, bundles: list[Resources], name: str = "") -> PlacementGroup:
        group = placement_group(bundles, strategy="PACK", name=name)
        self._opened.callback(remove_placement_group, group)
        return group

    # What fits.

    def _check_fit(self) -> None:
        """Whether the nodes have what is asked for, be it in use or not."""
        nodes = [node["Resources"] for node in _alive_nodes()]
        for label, bundles in self._bundles.items():
            if not all(any(_fits(bundle, node) for node in nodes) for bundle in bundles):
                raise PipelineStartError(f"{label} fits on no node of the Ray cluster\n{self._describe()}")
        total: Resources = {}
        for bundle in itertools.chain.from_iterable(self._bundles.values()):
            total = {name: total.get(name, 0) + bundle.get(name, 0) for name in {*total, *bundle}}
        if not _fits(total, ray.cluster_resources()):
            raise PipelineStartError(f"the stages together do not fit in the Ray cluster\n{self._describe()}")

    def _describe(self) -> str:
        """What is asked for, and what there is, as lines."""
        free = ray._private.state.available_resources_per_node()
        return "\n".join(
            [
                "asked for (runtime.resources, runtime.node):",
                *(f"  {label}: {_join_all(bundles)}" for label, bundles in self._bundles.items()),
                "the cluster has:",
                *(
                    f"  {_node_name(node)}: {_join(node['Resources'])} (free: {_join(free.get(node['NodeID'], {}))})"
                    for node in _alive_nodes()
                ),
            ]
        )

    # Processes.

    def place(self, instance_id: int, on_wait: Callable[[str], None]) -> Place:
        reserved, bundles = self._reserved[instance_id], self._bundles[self._instances[instance_id].label]
        while not self._is_closed.is_set():
            tasks = [
                locate.options(
                    scheduling_strategy=PlacementGroupSchedulingStrategy(reserved.group, bundle),
                    num_gpus=0 if reserved.workers else bundles[0].get("GPU", 0),  # Workers take their own.
                ).remote(self._interface)
                for bundle in reserved.bundles
            ]
            try:
                if ray.wait(tasks, num_returns=len(tasks), timeout=_REPORT_AFTER_S)[1]:
                    on_wait(f"a node with {_join_all(bundles)}")
                while ray.wait(tasks, num_returns=len(tasks), timeout=_REPORT_AFTER_S)[1]:
                    if self._is_closed.is_set():
                        raise EOFError("the pipeline is closed")
                node, host, devices = ray.get(tasks)[0]
            except RayError:  # The node died meanwhile.
                self._is_closed.wait(_REPORT_AFTER_S / 4)
                continue
            is_own = node == self._own_node
            return Place("" if is_own else node, _name_of(node), host, devices or None, reserved.workers)
        raise EOFError("the pipeline is closed")

    def start_server(self, node: str, spec: bytes, timeout: float) -> None:
        host = StageHost.options(  # type: ignore[attr-defined]
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(spec)
        try:
            ray.get(host.is_started.remote(), timeout=max(0.0, timeout))
        except GetTimeoutError as error:
            raise TimeoutError(f"node {_name_of(node)} did not start an actor within {timeout:.0f} s") from error
        except RayError as error:
            raise EOFError(f"node {_name_of(node)} could not start an actor: {error}") from error
        self._hosts.append(host)

    def close(self) -> None:
        self._is_closed.set()
        self._hosts = []
        with contextlib.suppress(RayError, ConnectionError):  # The cluster may be gone.
            self._opened.close()


def _make_bundles(instance: StageInstance) -> list[Resources]:
    """What a process asks for, or each worker of its stage if Ray starts them.

    Raises:
        StageConfigError: Ray cannot start them.
    """
    bundle = _make_bundle(instance)
    if not instance.stage.kind.has_ray_workers:
        return [bundle]
    where = f"{instance.label}: distributed_executor_backend: ray"
    if not current_platform.ray_device_key:
        raise StageConfigError(f"{where}: vLLM has no such executor for a {current_platform.device_name}; remove it")
    if instance.stage.runtime.devices is not None:
        raise StageConfigError(f"{where}: Ray chooses the devices of its workers; remove runtime.devices")
    return [bundle | {current_platform.ray_device_key: 1.0}] * world_size(instance.stage)


def _make_bundle(instance: StageInstance) -> Resources:
    cpus, devices, runtime = instance_cpus(instance), instance_devices(instance), instance.stage.runtime
    bundle: Resources = {"CPU": 1.0 if cpus is None else float(cpus if isinstance(cpus, int) else len(cpus))}
    if not current_platform.is_cpu():
        bundle["GPU"] = float(num_devices(instance.stage) if devices is None else len(devices))
    bundle |= runtime.resources
    if runtime.node is not None:
        bundle[f"node:{_find_node(str(runtime.node), instance.label)}"] = _PIN
    return {name: amount for name, amount in bundle.items() if amount}


def _find_node(name: str, label: str) -> str:
    """The address of a node by its address or name."""
    nodes = _alive_nodes()
    for node in nodes:
        if name in (node["NodeManagerAddress"], node["NodeManagerHostname"], node["NodeName"]):
            return node["NodeManagerAddress"]
    known = ", ".join(map(_node_name, nodes))
    raise StageConfigError(f"{label}: runtime.node: the Ray cluster has no node {name!r}; it has {known}")


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _name_of(node_id: str) -> str:
    return next((_node_name(node) for node in ray.nodes() if node["NodeID"] == node_id), node_id)


def _node_name(node: Mapping[str, Any]) -> str:
    """`10.77.0.2 (host2)`."""
    return f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})"


def _fits(wanted: Resources, there: Mapping[str, float]) -> bool:
    return all(amount <= there.get(name, 0) for name, amount in wanted.items())


def _join_all(bundles: Sequence[Resources]) -> str:
    return _join(bundles[0]) if len(bundles) == 1 else f"{len(bundles)} times {_join(bundles[0])}"


def _join(resources: Mapping[str, float]) -> str:
    """Joins resources, without what each node has: its memory, and the resources that Ray itself names after it."""
    own = {name: amount for name, amount in resources.items() if amount != _PIN or not name.startswith("node:")}
    hidden = ("memory", "object_store_memory", "node:")
    shown = [f"{name} {amount:g}" for name, amount in sorted(own.items()) if not name.startswith(hidden)]
    pins = [f"node {name[5:]}" for name, amount in resources.items() if amount == _PIN and name.startswith("node:")]
    return ", ".join(shown + pins) or "nothing"
