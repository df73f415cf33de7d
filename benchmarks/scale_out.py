# SPDX-License-Identifier: Apache-2.0
"""What replicas bring, how many requests one orchestrator carries, and what it costs to use several machines.

    python benchmarks/scale_out.py [--only replicas orchestrator ...] [--output FILE.json] [--quick]
    python benchmarks/scale_out.py --simulate --listeners 100 --stages '[{"name": "thinker", ...}, ...]'

The parts `ray`, `hops` and `faults` need Ray, the last two also hosts made of Linux namespaces (root). The notes below
the table explain each ratio. `--simulate` measures nothing, see `simulation.py`.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import simulation
from report import Report, make_parser, parse, percentile, progress, tiny_checkpoint
from runtime import MB, OMNI_ARGS, SHORT_RESULT, open_chain, rates_of
from runtime_stages import WAIT_S
from speakers import Speakers, is_

from vllm_omni import OmniLLM
from vllm_omni.distributed.curve import CurveKeys
from vllm_omni.testing.hosts import Host, Hosts, RayNodes
from vllm_omni.testing.media import make_prompt

REPLICAS = (1, 4, 16)
HOP_PORTS = (7000, 7001)
NUM_SPEAKERS = 32
RATE = "requests/s"
ENDED_S = 10.0
"""After the end of a pipeline, or of a host's connection, when what is left of it is counted."""


def measure_replicas(report: Report, quick: bool) -> None:
    """Adds `replicas_2`."""
    rounds, count = (3, 50) if quick else (7, 100)
    medians = {}
    for replicas in (1, 2):
        progress(f"replicas: {replicas} of the slowest stage")
        with (
            tempfile.TemporaryDirectory() as name,
            open_chain(Path(name), ["nothing", "wait", "nothing"], [{}, {"replicas": replicas}, {}]) as llm,
        ):
            rates = rates_of(llm, [""] * count, rounds)
        report.add_values(f"replicas: {replicas} of a stage whose step takes {1000 * WAIT_S:g} ms", rates, RATE)
        medians[replicas] = percentile(rates, 50)
    report.ratios["replicas_2"] = medians[2] / medians[1]
    report.notes.append(
        "replicas_2: requests per second with two replicas of the slowest of three stages, to those with one; its step "
        "waits instead of computing, so that two cores suffice; target at least 1.7"
    )


def measure_orchestrator(report: Report, quick: bool) -> None:
    """Adds rows only: there is no baseline."""
    rounds, count = (3, 300) if quick else (7, 1000)
    for replicas in REPLICAS:
        progress(f"orchestrator: {replicas} of each stage")
        with (
            tempfile.TemporaryDirectory() as name,
            open_chain(Path(name), ["nothing"] * 3, [{"replicas": replicas}] * 3) as llm,
        ):
            rates = rates_of(llm, [""] * count, rounds)
        report.add_values(f"orchestrator: three stages that do nothing, {replicas} of each", rates, RATE)


def measure_ray(report: Report, quick: bool) -> None:
    """Adds `ray_overhead`."""
    rounds, count = (2, 16) if quick else (4, 48)
    rates: dict[str, list[float]] = {"without": [], "with": []}
    with tiny_checkpoint("qwen3_omni_moe") as model:
        prompts = [make_prompt(model, "text", seed) for seed in range(count)]
        for opening in range(2):
            for label, values in rates.items():
                progress(f"ray: {label} Ray, {opening + 1} of 2")
                with open_omni(model, uses_ray=label == "with") as llm:
                    values += rates_of(llm, prompts, rounds, SHORT_RESULT)
    for label, values in rates.items():
        report.add_values(f"ray: tiny Qwen3-Omni, {label} Ray", values, RATE)
    report.ratios["ray_overhead"] = percentile(rates["with"], 50) / percentile(rates["without"], 50)
    report.notes.append(
        "ray_overhead: requests per second of one pipeline on one machine, with Ray to without; target at least 0.95"
    )


def open_omni(model: Path, uses_ray: bool) -> OmniLLM:
    options: dict[str, Any] = {}
    if uses_ray:
        options = {
            "distributed_backend": "ray",
            "ray_address": "local",
            "stage_overrides": {
                stage: {"runtime": {"resources": {"CPU": 0.1}}} for stage in ("thinker", "talker", "code2wav")
            },
        }
    return OmniLLM(str(model), **OMNI_ARGS, **options)


@contextlib.contextmanager
def two_hosts(*shared: str) -> Iterator[tuple[list[Host], RayNodes]]:
    """With Ray."""
    root = Path(__file__).parents[1]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "benchmarks")])  # for the stages' functions
    with Hosts(2, shared=[root, *map(Path, shared)]) as opened:
        nodes = RayNodes(opened.hosts[0])
        nodes.add(opened.hosts[1])
        yield opened.hosts, nodes


def measure_hops(report: Report, quick: bool) -> None:
    """Adds `remote_hop_small` and `remote_hop_64mb`, encrypted and not."""
    rounds, count = (3, 100) if quick else (7, 300)
    program = [sys.executable, str(Path(__file__).with_name("remote_hop.py"))]
    with two_hosts() as ((first, second), nodes):
        peers = [f"{second.address}:{port}" for port in HOP_PORTS]
        for encrypt, suffix in (("all", ""), ("control", "_plain")):
            progress(f"hops: encrypt: {encrypt}")
            keys = msgspec.to_builtins(CurveKeys.make())
            for peer, own in zip(peers, (keys, keys if encrypt == "all" else None), strict=True):
                second.popen([*program, "echo", json.dumps({"peer": peer, "keys": own})])
            options = {"host": first.address, "peers": peers, "encrypt": encrypt, "rounds": rounds, "count": count}
            output = first.run([*program, "measure", json.dumps({**options, "keys": keys})], nodes.env)
            seconds = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
            for what, name in (("ZMQ round trip", "zmq"), ("small message", "hop")):
                report.add_values(f"hops: {what}, encrypt: {encrypt}", [1000 * value for value in seconds[name]], "ms")
            for what, name in (("ZMQ, 64mb", "zmq_64mb"), ("64mb", "hop_64mb")):
                rates = [64 * MB / MB / value for value in seconds[name]]
                report.add_values(f"hops: {what}, encrypt: {encrypt}", rates, "MB/s")
            beside = 1000 * percentile(seconds["hop_beside_64mb"], 99)
            report.add_values(f"hops: small message beside 64mb, p99, encrypt: {encrypt}", [beside], "ms")
            medians = {name: percentile(values, 50) for name, values in seconds.items()}
            report.ratios[f"remote_hop_small{suffix}"] = medians["hop"] / medians["zmq"]
            report.ratios[f"remote_hop_64mb{suffix}"] = medians["zmq_64mb"] / medians["hop_64mb"]
    report.notes += [
        "remote_hop_small: a hop between two hosts (namespaces joined by veth) to a ZMQ round trip between them, both "
        "encrypted and in turns, so that each begins at rest; below is better, target at most 3",
        "remote_hop_64mb: bytes per second of a hop to those of one ZMQ message, encrypted in the same way; target at "
        "least 0.6. _plain: with `encrypt: control`, payloads and the ZMQ message are not encrypted",
    ]


def measure_faults(report: Report, quick: bool) -> None:
    """Adds rows only: each has one value."""
    with tiny_checkpoint("qwen3_omni_moe") as model:
        folder = model.parent
        progress("faults: what is said on one machine")
        with contextlib.closing(Speakers(model, folder / "expected")) as speakers:
            speakers.ask("all", NUM_SPEAKERS)
            speakers.read_until(is_("done"))
        for fault in ("power_off", "freeze", "unplug"):
            progress(f"faults: {fault}")
            with two_hosts(str(folder)) as (hosts, nodes):
                speakers = Speakers(model, folder / fault, hosts[0], nodes.env)
                for what, value, unit in try_fault(fault, speakers, folder / "expected", hosts):
                    report.add_values(f"faults: {fault}: {what}", [value], unit)
    report.notes.append(
        f"faults: {NUM_SPEAKERS} requests to a tiny Qwen3-Omni, its talker and vocoder on a host that is lost after "
        "the first sound; noticed: by `health()`, target at most 3 s; wrong, left behind (processes and files in "
        f"memory, {ENDED_S:g} s later, on both hosts): target 0"
    )


def try_fault(fault: str, speakers: Speakers, expected: Path, hosts: list[Host]) -> Iterator[tuple[str, float, str]]:
    first, second = hosts
    speakers.read_until(is_("ready"))
    speakers.ask("all", NUM_SPEAKERS)
    speakers.read_until(is_("first"))
    lost = time.monotonic()
    getattr(second, fault)()
    has_died = False
    while not has_died:  # `health` is read every 0.1 s: the requests may have ended before
        health = speakers.read_until(is_("health"))
        has_died = health["time"] > lost and any(stage["last_death"] for stage in health["stages"])
    yield "noticed after", health["time"] - lost, "s"
    if not any(line["what"] == "done" for line in speakers.told):
        speakers.read_until(is_("done"))
    ends = speakers.ends("all")
    completed = [name for name, error in ends.items() if error is None]
    yield "completed", len(completed), "requests"
    yield "failed", len(ends) - len(completed), "requests"
    yield "wrong", sum(speakers.differs(name, expected) for name in completed), "requests"
    yield "without an end", NUM_SPEAKERS - len(ends), "requests"
    speakers.close()
    second.thaw()  # Frozen processes end when they can.
    time.sleep(ENDED_S)
    running = [first] if fault == "power_off" else hosts
    yield "left behind", sum(len(host.pipeline_parts) for host in running), "processes and files"


PARTS = {
    "replicas": measure_replicas,
    "orchestrator": measure_orchestrator,
    "ray": measure_ray,
    "hops": measure_hops,
    "faults": measure_faults,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure (default: all)")
    simulation.add_arguments(parser)
    args = parse(parser)
    if args.simulate:
        simulation.simulate_all(args).finish(args.output)
        return
    if why_not := Hosts.why_not():
        args.only = [part for part in args.only if part not in ("hops", "faults")]
        progress(f"without hops and faults: {why_not}")
    report = Report("scale_out", {"parts": ", ".join(args.only)})
    for part in args.only:
        PARTS[part](report, args.quick)
    report.finish(args.output)


if __name__ == "__main__":
    main()
