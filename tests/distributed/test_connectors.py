# SPDX-License-Identifier: Apache-2.0
"""Payloads arrive as they were sent, and leave nothing behind."""

import errno
import os
from pathlib import Path

import msgspec
import pytest
import torch

from tests.small_file_system import small_file_system
from vllm_omni.distributed.connectors import Connector, InlineConnector, SharedMemoryConnector, ThresholdConnector
from vllm_omni.distributed.messages import PayloadRef
from vllm_omni.distributed.payload_channel import PayloadChannel
from vllm_omni.outputs import Completion, StageOutput

BUFFERS = [b"", b"x", bytes(range(256)) * 5, memoryview(b"abc")]


def payloads(folder: Path) -> list[Path]:
    """What lies there under the name of a payload; a sender's own segments do not."""
    return [path for path in folder.iterdir() if not path.name.startswith("pool-")]


@pytest.fixture(params=["inline", "shared_memory", "threshold"])
def connector(request: pytest.FixtureRequest, tmp_path: Path) -> Connector:
    return {
        "inline": InlineConnector(),
        "shared_memory": SharedMemoryConnector(tmp_path, "p"),
        "threshold": ThresholdConnector(tmp_path, "p", 1024),
    }[request.param]


def test_buffers_arrive_as_they_were_sent(connector: Connector, tmp_path: Path) -> None:
    ref, frames = connector.put(BUFFERS)
    received = connector.get(ref, [memoryview(frame) for frame in frames])
    assert [bytes(buffer) for buffer in received] == [bytes(buffer) for buffer in BUFFERS]
    received[2][0] = 7  # readers own what they get
    assert payloads(tmp_path) == []


def test_tensors_can_be_made_of_what_is_received(connector: Connector) -> None:
    ref, frames = connector.put([b"x" * size for size in (1, 8, 24, 3, 16)])
    received = connector.get(ref, [memoryview(frame) for frame in frames])
    tensors = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in received]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)  # as far as any dtype asks for


def test_a_discarded_payload_leaves_nothing(connector: Connector, tmp_path: Path) -> None:
    ref, _ = connector.put(BUFFERS)
    connector.discard(ref)
    assert payloads(tmp_path) == []


def test_the_threshold_chooses_by_size(tmp_path: Path) -> None:
    connector = ThresholdConnector(tmp_path, "p", 100)
    assert connector.put([b"x" * 99])[0].path is None
    ref, frames = connector.put([b"x" * 60, b"y" * 40])
    assert ref.path is not None and not frames


def test_a_full_file_system_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(OSError, match="No space left"):
        SharedMemoryConnector(tmp_path, "p").put([b"x" * 4096])
    assert list(tmp_path.iterdir()) == []


class FullFileSystem:
    """In the place of a test's real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        self._reserve = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self.reserve)

    def reserve(self, fd: int, offset: int, length: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._reserve(fd, offset, length)


def arrives(connector: Connector, buffer: bytes) -> PayloadRef:
    """Sends a buffer and compares it with what is received."""
    ref, frames = connector.put([buffer])
    (received,) = connector.get(ref, [memoryview(frame) for frame in frames])
    assert bytes(received) == buffer
    return ref


def test_data_travels_inline_while_the_file_system_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connector, file_system = ThresholdConnector(tmp_path, "p", 100), FullFileSystem(monkeypatch)
    for _ in range(3):
        assert arrives(connector, b"x" * 4096).path is None
    assert list(tmp_path.iterdir()) == []
    (warning,) = caplog.messages
    assert str(tmp_path) in warning and "--shm-size" in warning
    file_system.is_full = False
    assert arrives(connector, b"x" * 4096).path is not None


def test_only_a_full_file_system_is_got_round(tmp_path: Path) -> None:
    connector = ThresholdConnector(tmp_path, "p", 100)
    tmp_path.rmdir()
    with pytest.raises(FileNotFoundError):
        connector.put([b"x" * 4096])


def test_what_does_not_fit_takes_nothing_from_the_others() -> None:
    """Reserving more than there is would fill the file system for a moment."""
    with small_file_system(1 << 20) as folder:
        connector = ThresholdConnector(folder, "p", 100)
        with (folder / "other").open("wb") as other:
            os.posix_fallocate(other.fileno(), 0, 512 << 10)
        assert arrives(connector, b"x" * (768 << 10)).path is None
        assert arrives(connector, b"x" * (256 << 10)).path is not None
        (folder / "other").unlink()
        assert arrives(connector, b"x" * (700 << 10)).path is not None


@pytest.mark.parametrize("threshold", [0, 1 << 30], ids=["shared_memory", "inline"])
def test_a_stage_output_survives_the_channel(threshold: int, tmp_path: Path) -> None:
    channel = PayloadChannel(ThresholdConnector(tmp_path, "p", threshold))
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
    ref, frames = channel.put(sent)
    received = channel.get(StageOutput, ref, [memoryview(frame) for frame in frames])
    assert received.completions == sent.completions
    for name, tensor in tensors.items():
        assert received.tensors[name].dtype == tensor.dtype
        torch.testing.assert_close(received.tensors[name], tensor, rtol=0, atol=0)
    received.tensors["large"].zero_()  # in place, without a complaint about read-only memory


def test_a_payload_of_another_type_is_refused(tmp_path: Path) -> None:
    channel = PayloadChannel(InlineConnector())
    ref, frames = channel.put({"unexpected": 1})
    with pytest.raises(msgspec.MsgspecError):
        channel.get(StageOutput, ref, [memoryview(frame) for frame in frames])
