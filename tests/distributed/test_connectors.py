# SPDX-License-Identifier: Apache-2.0
"""Payloads arrive as they were sent, and nothing of them remains."""

import errno
import os
from pathlib import Path

import msgspec
import pytest
import torch

from tests.small_file_system import small_file_system
from vllm_omni.config.stage_config import ConnectorConfig
from vllm_omni.distributed.connectors import (
    Connector,
    InlineConnector,
    PayloadReceiver,
    PayloadSender,
    SharedMemoryConnector,
    make_connector,
    make_receivers,
)
from vllm_omni.distributed.messages import Frames, InlineRef, PayloadRef, SharedMemoryRef
from vllm_omni.outputs import Completion, StageOutput

BUFFERS = [b"", b"x", bytes(range(256)) * 5, memoryview(b"abc")]


def payloads(folder: Path) -> list[Path]:
    """The files of payloads, without the sender's own segments."""
    return [path for path in folder.iterdir() if not path.name.startswith("pool-")]


CONFIGURED = {
    "inline": ("InlineConnector", 0),
    "shared_memory": ("SharedMemoryConnector", 0),
    "threshold": ("SharedMemoryConnector", 1024),
}


@pytest.fixture(params=list(CONFIGURED))
def connector(request: pytest.FixtureRequest, tmp_path: Path) -> Connector:
    name, threshold = CONFIGURED[request.param]
    return make_connector(ConnectorConfig(name=name, extra={"shm_threshold_bytes": threshold}), tmp_path, 0, 1)


def get(folder: Path, ref: PayloadRef, frames: Frames) -> list[memoryview]:
    return make_receivers(folder)[type(ref)].get(ref, [memoryview(frame) for frame in frames])


def test_buffers_arrive_as_they_were_sent(connector: Connector, tmp_path: Path) -> None:
    ref, frames = connector.put(BUFFERS)
    received = get(tmp_path, ref, frames)
    assert [bytes(buffer) for buffer in received] == [bytes(buffer) for buffer in BUFFERS]
    received[2][0] = 7  # readers own what they get
    assert payloads(tmp_path) == []


def test_received_buffers_are_aligned_for_tensors(connector: Connector, tmp_path: Path) -> None:
    ref, frames = connector.put([b"x" * size for size in (1, 8, 24, 3, 16)])
    received = get(tmp_path, ref, frames)
    tensors = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in received]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)  # as far as any dtype asks for


def test_a_discarded_payload_leaves_nothing(connector: Connector, tmp_path: Path) -> None:
    ref, _ = connector.put(BUFFERS)
    make_receivers(tmp_path)[type(ref)].discard(ref)
    assert payloads(tmp_path) == []


def test_payloads_below_the_threshold_are_inline(tmp_path: Path) -> None:
    connector = SharedMemoryConnector(tmp_path, "p", 100)
    assert isinstance(connector.put([b"x" * 99])[0], InlineRef)
    ref, frames = connector.put([b"x" * 60, b"y" * 40])
    assert isinstance(ref, SharedMemoryRef) and not frames


class FullFileSystem:
    """Replaces the real one in a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        self._reserve = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self.reserve)

    def reserve(self, fd: int, offset: int, length: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._reserve(fd, offset, length)


def arrives(folder: Path, connector: Connector, buffer: bytes) -> PayloadRef:
    """Sends a buffer and compares it with what is received."""
    ref, frames = connector.put([buffer])
    (received,) = get(folder, ref, frames)
    assert bytes(received) == buffer
    return ref


def test_data_travels_inline_while_the_file_system_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connector, file_system = SharedMemoryConnector(tmp_path, "p", 100), FullFileSystem(monkeypatch)
    for _ in range(3):
        assert isinstance(arrives(tmp_path, connector, b"x" * 4096), InlineRef)
    assert list(tmp_path.iterdir()) == []
    (warning,) = caplog.messages
    assert str(tmp_path) in warning and "--shm-size" in warning
    file_system.is_full = False
    assert isinstance(arrives(tmp_path, connector, b"x" * 4096), SharedMemoryRef)


def test_other_errors_of_the_file_system_are_raised(tmp_path: Path) -> None:
    connector = SharedMemoryConnector(tmp_path, "p", 100)
    tmp_path.rmdir()
    with pytest.raises(FileNotFoundError):
        connector.put([b"x" * 4096])


def test_a_payload_that_does_not_fit_reserves_nothing() -> None:
    """A failing reservation would fill the file system for a moment."""
    with small_file_system(1 << 20) as folder:
        connector = SharedMemoryConnector(folder, "p", 100)
        with (folder / "other").open("wb") as other:
            os.posix_fallocate(other.fileno(), 0, 512 << 10)
        assert isinstance(arrives(folder, connector, b"x" * (768 << 10)), InlineRef)
        assert isinstance(arrives(folder, connector, b"x" * (256 << 10)), SharedMemoryRef)
        (folder / "other").unlink()
        assert isinstance(arrives(folder, connector, b"x" * (700 << 10)), SharedMemoryRef)


@pytest.mark.parametrize("threshold", [0, 1 << 30], ids=["shared_memory", "inline"])
def test_a_stage_output_is_received_as_it_was_sent(threshold: int, tmp_path: Path) -> None:
    tensors = {
        "large": torch.randn(300, 7, dtype=torch.float64).to(torch.bfloat16),
        "sliced": torch.arange(100).view(10, 10)[:, 3],
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5),
        "bool": torch.tensor([True, False]),
    }
    sent = StageOutput(
        request_id="r", stage_id=1, completions=[Completion(text="é", token_ids=[1, 2])], tensors=tensors
    )
    ref, frames = PayloadSender(SharedMemoryConnector(tmp_path, "p", threshold)).put(sent)
    received = PayloadReceiver(tmp_path).get(StageOutput, ref, [memoryview(frame) for frame in frames])
    assert received.completions == sent.completions
    for name, tensor in tensors.items():
        assert received.tensors[name].dtype == tensor.dtype
        torch.testing.assert_close(received.tensors[name], tensor, rtol=0, atol=0)
    received.tensors["large"].zero_()  # in place, without a complaint about read-only memory


def test_a_payload_of_another_type_is_refused() -> None:
    ref, frames = PayloadSender(InlineConnector()).put({"unexpected": 1})
    with pytest.raises(msgspec.MsgspecError):
        PayloadReceiver(Path()).get(StageOutput, ref, [memoryview(frame) for frame in frames])


@pytest.mark.parametrize("name", ["", ".", "..", "../outside", "/outside", "folder/payload"])
def test_a_reference_out_of_the_run_directory_is_refused(tmp_path: Path, name: str) -> None:
    receiver = make_receivers(tmp_path)[SharedMemoryRef]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/payload").touch()
    with pytest.raises(ValueError, match="is not the name of a payload"):
        receiver.get(SharedMemoryRef(sizes=[1], name=name), [])
    receiver.discard(SharedMemoryRef(sizes=[1], name=name))
    assert (tmp_path / "folder/payload").exists()


def test_a_link_out_of_the_run_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "run/payload").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        make_receivers(tmp_path / "run")[SharedMemoryRef].get(SharedMemoryRef(sizes=[1], name="payload"), [])
