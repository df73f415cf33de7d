# SPDX-License-Identifier: Apache-2.0
"""Payloads are read with NIXL, over UCX's TCP."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import zmq

pytest.importorskip("nixl", reason="NIXL is an optional extra")

from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.distributed.connectors.network import PayloadFetcher
from vllm_omni.distributed.connectors.nixl import NixlAgent
from vllm_omni.distributed.messages import NetworkRef
from vllm_omni.errors import StageConfigError

HOST = "127.0.0.1"
SENDER = """
import sys, msgspec, zmq
from vllm_omni.distributed.connectors.network import PayloadServer
from vllm_omni.distributed.connectors.nixl import NixlAgent

server = PayloadServer(zmq.Context(), "127.0.0.1", None, NixlAgent())
for line in sys.stdin:
    ref = server.put(3, [b"odd", bytes(int(line)), b"", b"end"], uses_nixl=True)
    print(msgspec.json.encode(ref).decode(), flush=True)
    while server._payloads and server.socket.poll():
        server.serve()
    print("released", flush=True)
"""


class Sender:
    """A process with payloads."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def put(self, size: int) -> NetworkRef:
        print(size, file=self.process.stdin, flush=True)
        return msgspec.json.decode(self._read("{"), type=NetworkRef)

    def wait_until_released(self) -> None:
        self._read("released")

    def _read(self, beginning: str) -> str:
        """The next line that begins like this: NIXL writes others."""
        return next(line for line in self.process.stdout if line.startswith(beginning))


@pytest.fixture(autouse=True)
def only_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # Otherwise it reads the memory of a process of this machine directly.


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.process.kill()
    sender.process.communicate()


@pytest.fixture
def fetcher() -> Iterator[PayloadFetcher]:
    context, agent = zmq.Context(), NixlAgent()
    yield PayloadFetcher(context, None, agent)
    agent.close()
    context.destroy(linger=1000)


def wait(fetcher: PayloadFetcher) -> tuple[NetworkRef, list[memoryview] | None]:
    poller = zmq.Poller()
    for readable in fetcher.readables:
        poller.register(readable, zmq.POLLIN)
    while poller.poll(240_000):
        for ended in fetcher.take_ended():
            return ended
    raise AssertionError("nothing has ended")


@pytest.mark.parametrize("size", [1, 5_000_001])
def test_payloads_arrive_as_they_were_and_are_released(size: int, sender: Sender, fetcher: PayloadFetcher) -> None:
    for _ in range(3):
        ref = sender.put(size)
        fetcher.start(ref)
        fetched, views = wait(fetcher)
        assert fetched == ref and views is not None
        assert [bytes(view) for view in views] == [b"odd", bytes(size), b"", b"end"]
        sender.wait_until_released()


def test_a_read_that_is_stopped_releases_the_payload(sender: Sender, fetcher: PayloadFetcher) -> None:
    ref = sender.put(200_000_000)
    fetcher.start(ref)
    fetcher.stop(ref)
    assert list(fetcher.take_ended()) == [(ref, None)]
    poller = zmq.Poller()
    for readable in fetcher.readables:
        poller.register(readable, zmq.POLLIN)
    while fetcher._stopping:
        assert poller.poll(240_000)
        assert list(fetcher.take_ended()) == []
    sender.wait_until_released()


def test_the_death_of_a_sender_ends_its_reads(sender: Sender, fetcher: PayloadFetcher) -> None:
    first = sender.put(10)
    fetcher.start(first)
    assert wait(fetcher)[1] is not None
    sender.wait_until_released()
    ref = sender.put(400_000_000)
    sender.process.send_signal(signal.SIGSTOP)  # It sends nothing more, so that the read cannot end before it dies.
    fetcher.start(ref)
    sender.process.kill()
    assert wait(fetcher) == (ref, None)


def test_it_is_for_trusted_networks(tmp_path) -> None:
    config = """
        stage_args:
          - stage_id: 0
            engine_type: function
            function: os.path.join
            engine_args: {model_stage: a}
            final_output: true
            final_output_type: text
        runtime: {connectors: {fast: {name: NixlConnector}}}
    """
    path = tmp_path / "config.yaml"
    path.write_text(config)
    with pytest.raises(StageConfigError, match=r"runtime.connectors.fast: NixlConnector does not encrypt"):
        load_pipeline_config(path)
