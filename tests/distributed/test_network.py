# SPDX-License-Identifier: Apache-2.0
"""Payloads are fetched over TCP in chunks, by peers that may; messages wait for theirs, and for no others."""

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from vllm_omni.distributed.connectors import make_receivers
from vllm_omni.distributed.connectors.network import CHUNK, NetworkConnector, PayloadFetcher, PayloadServer
from vllm_omni.distributed.curve import MAX_MESSAGE, Authenticator, CurveKeys
from vllm_omni.distributed.inbound import Inbound
from vllm_omni.distributed.messages import (
    AbortMessage,
    DataMessage,
    InlineRef,
    Message,
    NetworkRef,
    PayloadRef,
    SubmitMessage,
    recv_at_stage,
    send,
)
from vllm_omni.distributed.network import Network, NetworkSpec

HOST = "127.0.0.1"
LARGE = os.urandom(5 * CHUNK + 3)
PATIENCE_S = 120


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


class Link:
    """A payload server on a thread of its own, which `pause` stops until `go_on`, and a fetcher."""

    def __init__(self, context: zmq.Context, keys: CurveKeys | None = None) -> None:
        self.server = PayloadServer(context, HOST, keys)
        self.fetcher = PayloadFetcher(context, keys)
        self._may_serve, self._serving = threading.Event(), threading.Lock()
        self._may_serve.set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_closed:
            self._may_serve.wait()
            with self._serving:
                if self._may_serve.is_set() and self.server.socket.poll(10):
                    self.server.serve()

    def pause(self) -> None:
        """Nothing is served when it returns."""
        self._may_serve.clear()
        with self._serving:
            pass

    def go_on(self) -> None:
        self._may_serve.set()

    def wait(self, count: int = 1) -> list[tuple[NetworkRef, list[memoryview] | None]]:
        """The next payloads to end, in order."""
        ended: list[tuple[NetworkRef, list[memoryview] | None]] = []
        while len(ended) < count:
            assert self.fetcher.socket.poll(1000 * PATIENCE_S)
            ended += self.fetcher.take_ended()
        return ended

    def close(self) -> None:
        self._is_closed = True
        self.go_on()
        self._thread.join()


@pytest.fixture
def link(context: zmq.Context) -> Iterator[Link]:
    link = Link(context)
    yield link
    link.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_payloads_arrive_as_they_were(is_encrypted: bool, context: zmq.Context) -> None:
    keys = CurveKeys.make() if is_encrypted else None
    authenticator = None if keys is None else Authenticator(context, keys)
    link = Link(context, keys)
    buffers = [b"odd", LARGE, b"", os.urandom(70)]
    ref = link.server.put(3, buffers)
    link.fetcher.start(ref)
    ((fetched, views),) = link.wait()
    assert fetched == ref and views is not None and [bytes(view) for view in views] == buffers
    assert all(not view.readonly for view in views), "readers may write to their tensors"
    link.close()
    if authenticator is not None:
        authenticator.stop()


def test_a_small_payload_does_not_wait_for_a_large_one(link: Link) -> None:
    link.pause()
    large, small = link.server.put(3, [LARGE * 4]), link.server.put(3, [b"small"])
    link.fetcher.start(large)
    link.fetcher.start(small)
    link.go_on()
    assert [ref for ref, _ in link.wait(2)] == [small, large]


def test_payloads_are_kept_until_they_were_fetched_or_their_receiver_died(link: Link) -> None:
    fetched, unread, other = (link.server.put(receiver, [LARGE]) for receiver in (3, 3, 4))
    link.fetcher.start(fetched)
    assert link.wait()[0][1] is not None
    wait_until(lambda: len(link.server._payloads) == 2)
    link.server.remove_unread(3)
    link.fetcher.start(unread)
    assert link.wait() == [(unread, None)], "it is gone"
    link.fetcher.start(other)
    assert link.wait()[0][1] is not None


def test_a_fetch_that_is_stopped_releases_the_payload(link: Link) -> None:
    link.pause()
    ref = link.server.put(3, [LARGE])
    link.fetcher.start(ref)
    link.fetcher.stop(ref)
    assert list(link.fetcher.take_ended()) == [(ref, None)]
    link.go_on()
    wait_until(lambda: not link.server._payloads)
    assert list(link.fetcher.take_ended()) == [], "chunks that were on their way are dropped"


def test_the_death_of_a_sender_ends_its_fetches(link: Link) -> None:
    link.pause()
    ref = link.server.put(3, [LARGE])
    link.fetcher.start(ref)
    link.fetcher.disconnect(ref.address)
    assert list(link.fetcher.take_ended()) == [(ref, None)]


GARBAGE: list[list[bytes]] = [[b""], [b"x"], [b"x" * 33], [b"", b"x" * 32], [b"x"] * 3, [b"GET / HTTP/1.1\r\n\r\n"]]


def test_packets_of_strangers_are_dropped_counted_and_logged_once(
    link: Link, context: zmq.Context, caplog: pytest.LogCaptureFixture
) -> None:
    ref = link.server.put(3, [LARGE])
    with context.socket(zmq.DEALER) as stranger:
        stranger.connect(ref.address)
        for frames in GARBAGE:
            stranger.send_multipart(frames)
        wait_until(lambda: link.server.dropped.count == len(GARBAGE))
        stranger.send(b"x" * 32)  # a key of no server
        wait_until(lambda: link.server.dropped.count == len(GARBAGE) + 1)
        assert not stranger.poll(0), "what it does not read would fill the memory"
    assert ["no request for a payload" in line for line in caplog.messages] == [True]
    link.fetcher.start(ref)
    assert link.wait()[0][1] is not None


def test_a_stranger_cannot_fill_the_memory_with_one_packet(link: Link, context: zmq.Context) -> None:
    ref = link.server.put(3, [LARGE])
    with context.socket(zmq.DEALER) as stranger:
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.connect(ref.address)
        stranger.send(bytes(1 << 20))
        assert monitor.poll(1000 * PATIENCE_S), "the connection is closed"
        stranger.disable_monitor()
    assert not link.server.dropped.count
    link.fetcher.start(ref)
    assert link.wait()[0][1] is not None


def test_no_memory_is_taken_for_a_stranger_s_message(context: zmq.Context) -> None:
    """Before ZeroMQ knows whose it is."""
    network = Network(context, NetworkSpec(host=HOST, keys=CurveKeys.make()))
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\x00") + bytes(32)
    for size, is_closed in ((MAX_MESSAGE + 1, True), (MAX_MESSAGE, False)):
        address = HOST, int(network.address.rpartition(":")[2])
        with socket.create_connection(address, PATIENCE_S) as stranger, stranger.makefile("rb") as received:
            stranger.sendall(greeting)
            assert len(received.read(64)) == 64  # It comes in pieces.
            stranger.sendall(b"\x06" + size.to_bytes(8, "big"))  # the start of a long command
            if is_closed:
                assert received.read(1) == b""
    with zmq.Context() as friend, friend.socket(zmq.PUSH) as push:
        network.secure(push)
        push.connect(network.address)
        send(push, AbortMessage(request_ids=["a"]), sender=1)
        assert network.inbound.poll(1000 * PATIENCE_S)
    network.close()


def test_a_payload_that_would_make_a_message_too_large_is_fetched(context: zmq.Context) -> None:
    connector = NetworkConnector(PayloadServer(context, HOST, None), 3, 1 << 40)
    half = bytes(MAX_MESSAGE // 8)
    assert isinstance(connector.put([half])[0], InlineRef)
    assert isinstance(connector.put([half, half])[0], NetworkRef)


def test_a_fetcher_drops_what_is_no_chunk(link: Link, context: zmq.Context) -> None:
    """A stranger has got the port of a process that ended."""
    with context.socket(zmq.ROUTER) as stranger:
        address = f"tcp://{HOST}:{stranger.bind_to_random_port(f'tcp://{HOST}')}"
        ref = NetworkRef(sizes=[10], address=address, key="00" * 16)
        link.fetcher.start(ref)
        peer, request = stranger.recv_multipart()
        for frames in GARBAGE:
            stranger.send_multipart([peer, *frames])
        beyond = request[:16] + (1 << 40).to_bytes(8, "little") + (10).to_bytes(8, "little")
        stranger.send_multipart([peer, beyond, b"x" * 10])
        assert link.wait() == [(ref, None)]
        assert link.fetcher.dropped.count == len(GARBAGE)
    link.fetcher.start(link.server.put(3, [LARGE]))
    assert link.wait()[0][1] is not None


def test_without_the_pipeline_s_keys_nothing_is_received_and_nothing_sent(context: zmq.Context) -> None:
    network = Network(context, NetworkSpec(host=HOST, keys=CurveKeys.make()))
    secret = network.server.put(3, [LARGE])
    strangers = {
        "plain": lambda socket: None,
        "other keys": CurveKeys.make().secure_client,
        "the server's key, but not the client's": partly_right(network),
    }
    for secure in strangers.values():
        with zmq.Context() as other, other.socket(zmq.PUSH) as push, other.socket(zmq.DEALER) as dealer:
            for socket, address in ((push, network.address), (dealer, secret.address)):
                socket.setsockopt(zmq.LINGER, 0)
                secure(socket)
                socket.connect(address)
            send(push, AbortMessage(request_ids=["a"]), sender=1)
            dealer.send(bytes.fromhex(secret.key) + (0).to_bytes(8, "little") + (10).to_bytes(8, "little"))
            assert not network.inbound.poll(300) and not network.server.socket.poll(300)
    with zmq.Context() as friend, friend.socket(zmq.PUSH) as push:
        network.secure(push)
        push.connect(network.address)
        send(push, AbortMessage(request_ids=["a"]), sender=1)
        assert network.inbound.poll(1000 * PATIENCE_S)
    network.close()


def partly_right(network: Network) -> Callable[[zmq.Socket], None]:
    keys = CurveKeys.make()
    return CurveKeys(network._keys.server_public, "", keys.client_public, keys.client_secret).secure_client


class Receiver:
    """An inbound of a stage, and a sender whose payloads are fetched."""

    def __init__(self, context: zmq.Context, link: Link) -> None:
        self.link = link
        pull, self._push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        pull.bind("inproc://stage")
        self._push.connect("inproc://stage")
        self.inbound = Inbound([pull], recv_at_stage, lambda sender, epoch: True, link.fetcher)
        self._connector = NetworkConnector(link.server, 3, 1000)
        self._receivers = make_receivers(Path())
        self._numbers = itertools.count()

    def put(self, buffers: list[bytes]) -> PayloadRef:
        return self._connector.put(buffers)[0]

    def data(self, request_id: str, size: int, source: int = 1, connector: NetworkConnector | None = None) -> None:
        payload, frames = (connector or self._connector).put([b"x" * size])
        self.send(
            DataMessage(
                request_id=request_id, number=1, source=source, sequence=next(self._numbers), is_last=False, sent=0.0,
                payload=payload,
            ),
            frames,
        )  # fmt: skip

    def submit(self, request_id: str, size: int, sources: list[int]) -> None:
        payload, frames = self._connector.put([b"x" * size])
        self.send(
            SubmitMessage(
                request_id=request_id, number=1, sources=sources, targets=[], is_final=True, streams=False,
                payload=payload,
            ),
            frames,
        )  # fmt: skip

    def send(self, message: Message, frames: object = ()) -> None:
        send(self._push, message, frames, sender=1)  # type: ignore[arg-type]

    def take(self, count: int) -> list[tuple[str, int | None]]:
        """The next messages: request ids, or kinds, and the sizes of payloads, None for one that is gone."""
        taken: list[tuple[str, int | None]] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(taken) < count:
            received = self.inbound.receive()
            if received is not None:
                taken.append(self._describe(*received))
                continue
            assert time.monotonic() < deadline
            poller = zmq.Poller()
            for readable in self.inbound.readables:
                poller.register(readable, zmq.POLLIN)
            poller.poll(1000)
        return taken

    def _describe(self, message: Message, frames: list[memoryview]) -> tuple[str, int | None]:
        if isinstance(message, AbortMessage):
            return "abort", 0
        assert isinstance(message, DataMessage | SubmitMessage)
        try:
            (buffer,) = self._receivers[type(message.payload)].get(message.payload, frames)
        except OSError:
            return message.request_id, None
        return message.request_id, len(buffer)


@pytest.fixture
def receiver(context: zmq.Context, link: Link) -> Receiver:
    return Receiver(context, link)


def test_only_messages_of_the_same_request_wait_for_a_payload(receiver: Receiver) -> None:
    receiver.link.pause()
    receiver.data("a", 5000)
    receiver.data("a", 5)
    receiver.data("b", 6)
    assert receiver.take(1) == [("b", 6)]
    receiver.link.go_on()
    assert receiver.take(2) == [("a", 5000), ("a", 5)]


def test_submits_to_a_stage_with_sources_stay_in_order(receiver: Receiver) -> None:
    receiver.link.pause()
    for sources in ([1], []):
        receiver.submit(f"large {sources}", 5000, sources)
        receiver.submit(f"small {sources}", 5, sources)
    assert receiver.take(1) == [("small []", 5)]
    receiver.link.go_on()
    taken = receiver.take(3)
    assert taken.index(("large [1]", 5000)) < taken.index(("small [1]", 5))


def test_an_abort_passes_and_releases_what_waits(receiver: Receiver) -> None:
    receiver.link.pause()
    receiver.data("a", 5000)
    receiver.data("a", 5)
    receiver.data("b", 5000)
    receiver.send(AbortMessage(request_ids=["a"]))
    assert receiver.take(3) == [("abort", 0), ("a", None), ("a", 5)]
    receiver.link.go_on()
    assert receiver.take(1) == [("b", 5000)]


def test_what_waits_for_a_dead_sender_is_dropped_and_the_rest_is_not(receiver: Receiver, context: zmq.Context) -> None:
    receiver.data("a", 5000, source=2, connector=NetworkConnector(PayloadServer(context, HOST, None), 3, 1000))
    receiver.data("a", 5, source=2)
    receiver.data("a", 6, source=1)
    receiver.data("b", 5000, source=1)
    assert receiver.take(1) == [("b", 5000)]
    receiver.inbound.drop_sender(2)
    assert receiver.take(1) == [("a", 6)]


def test_small_payloads_are_in_the_message(receiver: Receiver) -> None:
    assert isinstance(receiver.put([b"x" * 999]), InlineRef)
    assert isinstance(receiver.put([b"x" * 1000]), NetworkRef)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)  # there is nothing to be woken by: what is awaited is on another thread
