# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni on two hosts that share nothing but the CPU: it says what it says on one, whatever happens to a host."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.speakers import Speakers, is_, make_options, speak
from tests.examples.running import decode_sound, run_example
from tests.orchestrator.test_failure import wait_until
from vllm_omni.entrypoints.async_omni_llm import AsyncOmniLLM
from vllm_omni.testing.hosts import Host, Hosts, RayNodes, remove_leftovers

pytest.importorskip("ray")

GROUP = "machines"
WHY_NOT = Hosts.why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"hosts need namespaces: {WHY_NOT}"),
]
COUNT = 20
"""Requests at once: more than a stage runs (16)."""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def expected(tiny_qwen3_omni_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what is said on one machine."""
    folder = tmp_path_factory.mktemp("expected")

    async def say() -> None:
        with AsyncOmniLLM(str(tiny_qwen3_omni_moe), **make_options(on_two_hosts=False)) as llm:
            await asyncio.gather(*(speak(llm, f"all-{number}", number, folder) for number in range(COUNT)))

    asyncio.run(say())
    return folder


@pytest.fixture(scope="module")
def hosts(tiny_qwen3_omni_moe: Path) -> Iterator[tuple[list[Host], RayNodes]]:
    """Two, with Ray, on a network with delays and stalls. They see the temporary files of this run."""
    with Hosts(2, shared=[tiny_qwen3_omni_moe.parents[1], ROOT], delay_s=0.01, stall_s=0.5) as opened:
        nodes = RayNodes(opened.hosts[0])
        nodes.add(opened.hosts[1])
        yield opened.hosts, nodes


@pytest.fixture(scope="module")
def speakers(
    tiny_qwen3_omni_moe: Path, hosts: tuple[list[Host], RayNodes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Speakers]:
    """On the first host; talker and vocoder are on the second. Tests but the last leave them as they found them."""
    (first, second), nodes = hosts
    speakers = Speakers(tiny_qwen3_omni_moe, tmp_path_factory.mktemp("hosts") / "said", first, nodes.env)
    speakers.read_until(is_("ready"))
    yield speakers
    speakers.close()
    wait_until_clean(second)


def wait_until_clean(host: Host) -> None:
    parts: list[str] = []

    def is_clean() -> bool:
        parts[:] = host.pipeline_parts
        return not parts

    wait_until(is_clean, lambda: f"{host.name} still has {parts}")


def assert_right(speakers: Speakers, expected: Path, names: list[str]) -> None:
    assert [name for name in names if speakers.differs(name, expected)] == []


def test_two_hosts_say_what_one_says(expected: Path, speakers: Speakers, hosts: tuple[list[Host], RayNodes]) -> None:
    """`expected` comes first: its pipeline has ended when the others start."""
    for name in ("all", "slow"):
        speakers.ask(name, COUNT)
        speakers.read_until(is_("done", name=name))
        ends = speakers.ends(name)
        assert len(ends) == COUNT and set(ends.values()) == {None}
        assert_right(speakers, expected, list(ends))
        for host in hosts[0]:
            host.limit_rate("100mbit")


@pytest.mark.parametrize("fault", ["power_off", "freeze", "unplug"])
def test_each_request_ends_once_when_a_host_is_lost(
    fault: str, speakers: Speakers, expected: Path, hosts: tuple[list[Host], RayNodes]
) -> None:
    (_, second), nodes = hosts
    speakers.ask(fault, COUNT)
    speakers.read_until(is_("first"))
    getattr(second, fault)()
    speakers.read_until(is_("done"))
    revive(fault, second, nodes)

    ends = speakers.ends(fault)
    assert len(ends) == COUNT
    failed = [error for error in ends.values() if error is not None]
    assert failed and all(error.startswith("StageDeadError") and second.address in error for error in failed)
    assert_right(speakers, expected, [name for name, error in ends.items() if error is None])
    again = f"after_{fault}"
    speakers.ask(again, 4)
    speakers.read_until(is_("done", name=again))
    assert set(speakers.ends(again).values()) == {None}
    assert_right(speakers, expected, list(speakers.ends(again)))


def revive(fault: str, host: Host, nodes: RayNodes) -> None:
    """The host is as new: Ray does not take a node back that it has given up."""
    nodes.wait_until_lost(host)
    if fault != "power_off":
        host.thaw()
        host.plug()
        wait_until_clean(host)
        host.power_off()
    host.start()
    nodes.add(host)


def test_the_second_host_is_clean_when_the_drivers_is_lost(
    speakers: Speakers, hosts: tuple[list[Host], RayNodes]
) -> None:
    """The last test: it ends the speakers."""
    (first, second), _ = hosts
    assert second.pipeline_parts
    first.power_off()
    wait_until_clean(second)


def test_the_tutorial_speaks(tmp_path: Path) -> None:
    run_example("online/two_hosts.py", "--output", tmp_path / "speech.wav")
    samples, rate = decode_sound(tmp_path / "speech.wav")
    assert rate == 24_000 and len(samples) > rate


KILLED = """
import signal
from vllm_omni.entrypoints.async_omni_llm import AsyncOmniLLM
from vllm_omni.testing.hosts import Hosts

with Hosts(1) as opened:
    program = opened.hosts[0].popen(["sh", "-c", "echo up; while :; do sleep 1000; done"])
    print(opened.hosts[0]._pid, flush=True)
    signal.pause()
"""


def test_hosts_end_with_the_process_that_made_them() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE, text=True) as maker:
        try:
            assert maker.stdout is not None
            numbers = {maker.stdout.readline().strip(), maker.stdout.readline().strip()} - {"up"}
            host = psutil.Process(int(numbers.pop()))
            (program,) = [process for process in psutil.process_iter() if is_on(process, host)]
        finally:
            maker.kill()
    psutil.wait_procs([host, program], timeout=60)
    assert not host.is_running() and not program.is_running()
    assert namespaces_of(maker)
    remove_leftovers()
    assert not namespaces_of(maker)


def namespaces_of(maker: subprocess.Popen[str]) -> list[str]:
    names = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout.split()
    return [name for name in names if name.startswith(f"omni{maker.pid}-")]


def is_on(process: psutil.Process, host: psutil.Process) -> bool:
    """Whether it is that shell, in the host's process namespace."""
    with contextlib.suppress(OSError, psutil.Error, IndexError):  # a thread of the kernel has no arguments
        spaces = {os.readlink(f"/proc/{pid}/ns/pid") for pid in (process.pid, host.pid)}
        return process.cmdline()[0] == "sh" and len(spaces) == 1
    return False
