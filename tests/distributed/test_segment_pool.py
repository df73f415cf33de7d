# SPDX-License-Identifier: Apache-2.0
"""Shared memory is reused, and never while a receiver uses it."""

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni.distributed.connectors import SharedMemoryConnector, SharedMemoryReceiver
from vllm_omni.distributed.connectors.segment_pool import Segment, SegmentPool

KB = 1 << 10


def publish(pool: SegmentPool, content: bytes, path: Path) -> Segment:
    segment = pool.take(len(content))
    segment.write(memoryview(content), 0)
    segment.publish(str(path))
    return segment


def num_open_files(folder: Path) -> int:
    """Of this process; others than those of the folder are opened and closed by other threads."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # It was closed meanwhile.
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(f"{folder}/")
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_segment_is_free_when_its_payload_is_released(tmp_path: Path) -> None:
    pool, name = SegmentPool(tmp_path, "pool", 1 << 20), tmp_path / "payload"
    first = publish(pool, b"a" * 100_000, name)
    assert not first.is_free and publish(pool, b"o" * 100_000, tmp_path / "other") is not first
    name.unlink()
    assert first.is_free and publish(pool, b"b" * 90_000, name) is first
    assert name.read_bytes()[:100_000] == b"b" * 90_000 + b"a" * 10_000


def test_memory_that_a_receiver_uses_is_never_overwritten(tmp_path: Path) -> None:
    connector = SharedMemoryConnector(tmp_path, "p", 0)
    held = []
    for number in range(6):
        ref, frames = connector.put([bytes([number]) * 100_000])
        (buffer,) = SharedMemoryReceiver(tmp_path).get(ref, [memoryview(frame) for frame in frames])
        held.append(buffer[50_000:50_010])  # a part keeps the whole
        del buffer
    assert [bytes(view) for view in held] == [bytes([number]) * 10 for number in range(6)]
    used = len(names(tmp_path))
    held.clear()
    gc.collect()
    for _ in range(6):
        SharedMemoryReceiver(tmp_path).discard(connector.put([b"x" * 100_000])[0])
    assert len(names(tmp_path)) == used  # nothing new had to be made


@pytest.mark.slow
def test_a_killed_receiver_holds_nothing(tmp_path: Path) -> None:
    connector = SharedMemoryConnector(tmp_path, "p", 0)
    ref, _ = connector.put([b"x" * 100_000])
    code = f"""if True:
        import sys
        from pathlib import Path
        from vllm_omni.distributed.connectors import SharedMemoryReceiver
        from vllm_omni.distributed.messages import SharedMemoryRef
        ref = SharedMemoryRef(sizes={ref.sizes}, name={ref.name!r})
        buffers = SharedMemoryReceiver(Path({str(tmp_path)!r})).get(ref, [])
        print("has it", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "has it\n"
        (segment,) = connector._pool._sent
        assert not segment.is_free
        reader.send_signal(signal.SIGKILL)
        reader.wait()
    assert segment.is_free


def test_the_kept_bytes_are_limited(tmp_path: Path) -> None:
    pool = SegmentPool(tmp_path, "pool", 256 * KB)
    paths = [tmp_path / str(number) for number in range(5)]
    for path in paths:
        publish(pool, b"x" * 100 * KB, path)
    assert [name for name in names(tmp_path) if "pool" in name] == ["pool-0", "pool-1"]
    for path in paths:
        path.unlink()
    publish(pool, b"y" * 200 * KB, paths[0])  # takes the place of both
    assert names(tmp_path) == ["0", "pool-5"]
    paths[0].unlink()
    publish(pool, b"y" * 300 * KB, paths[0])
    assert names(tmp_path) == ["0", "pool-5"]  # too large to be kept: its name is the payload's only one


def burst(pool: SegmentPool, folder: Path, count: int) -> None:
    """Payloads that are in flight at the same time, and then released."""
    paths = [folder / str(number) for number in range(count)]
    for path in paths:
        publish(pool, b"x", path)
    for path in paths:
        path.unlink()


def num_looked_up_after(burst_size: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of segments that the payload after a burst checks."""
    folder.mkdir()
    pool = SegmentPool(folder, "pool", 64 << 20)
    burst(pool, folder, burst_size)
    looked_up: list[Segment] = []
    is_free = Segment.is_free.fget  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "is_free", property(lambda segment: looked_up.append(segment) or is_free(segment)))
        publish(pool, b"y", folder / "next")
    return len(looked_up)


def test_a_payload_costs_the_same_after_any_burst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (num_looked_up_after(size, tmp_path / str(size), monkeypatch) for size in (10, 500))
    assert small == large > 0


def test_a_burst_reuses_the_memory_of_the_previous_one(tmp_path: Path) -> None:
    pool = SegmentPool(tmp_path, "pool", 64 << 20)
    burst(pool, tmp_path, 100)
    used = names(tmp_path)
    burst(pool, tmp_path, 100)
    assert names(tmp_path) == used


def test_the_memory_of_a_burst_is_freed(tmp_path: Path) -> None:
    pool, name = SegmentPool(tmp_path, "pool", 64 << 20), tmp_path / "payload"
    burst(pool, tmp_path, 100)
    for _ in range(2000):
        publish(pool, b"x", name)
        name.unlink()
    assert len(names(tmp_path)) == 1
    open_files = num_open_files(tmp_path)
    publish(pool, b"x", name)
    assert num_open_files(tmp_path) == open_files, "and one segment stays in use"


def test_a_segment_in_long_use_does_not_block_the_others(tmp_path: Path) -> None:
    pool, name = SegmentPool(tmp_path, "pool", 64 << 20), tmp_path / "payload"
    for number in range(50):
        publish(pool, b"x", tmp_path / f"held-{number}")
    for _ in range(500):
        publish(pool, b"x", name)
        name.unlink()
    num_segments = len([path for path in names(tmp_path) if path.startswith("pool")])
    assert num_segments < 50 + 50


def test_a_small_payload_does_not_occupy_a_large_segment(tmp_path: Path) -> None:
    pool, name = SegmentPool(tmp_path, "pool", 4096 * KB), tmp_path / "payload"
    large = publish(pool, b"x" * 2048 * KB, name)
    name.unlink()
    assert publish(pool, b"x" * 64 * KB, name) is not large


def test_free_segments_are_dropped_on_a_full_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, name = SegmentPool(tmp_path, "pool", 4096 * KB), tmp_path / "payload"
    publish(pool, b"x" * 2048 * KB, name)
    name.unlink()
    reserve = os.posix_fallocate

    def full_beside_the_first(fd: int, offset: int, length: int) -> None:
        if (tmp_path / "pool-0").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full_beside_the_first)
    publish(pool, b"x" * 64 * KB, name)
    with pytest.raises(OSError, match="No space left"):
        (tmp_path / "pool-0").touch()
        pool.take(64 * KB)
    assert names(tmp_path) == ["payload", "pool-0", "pool-1"]


def test_an_unreferenced_pool_leaves_nothing(tmp_path: Path) -> None:
    connector = SharedMemoryConnector(tmp_path, "p", 0)
    ref, _ = connector.put([b"x" * 100_000])
    open_files = num_open_files(tmp_path)
    del connector
    gc.collect()
    assert names(tmp_path) == ["p-0"]  # on its way: the receiver will remove it
    assert num_open_files(tmp_path) == open_files - 1
    SharedMemoryReceiver(tmp_path).get(ref, [])
    assert names(tmp_path) == []
