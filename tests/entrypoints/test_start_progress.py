# SPDX-License-Identifier: Apache-2.0
"""What a server shows while its stages load."""

import logging
import threading
from pathlib import Path

import pytest

from tests.hub_cache import NAME, HubCache
from vllm_omni.entrypoints import start_progress
from vllm_omni.entrypoints.start_progress import Downloads, describe
from vllm_omni.launch.supervisor import StageHealth


def health(*states: str) -> list[StageHealth]:
    return [StageHealth(i, f"stage{i}", 0, state) for i, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "num_bytes", "line"),
    [
        (["starting"], 0, "loading " + "\u2591" * 24 + " 0 of 1 stages, 3 s (stage0)"),
        (
            ["ready", "starting", "starting"],
            3_210_000_000,
            "loading " + "\u2588" * 8 + "\u2591" * 16 + " 1 of 3 stages, 3 s (stage1, stage2), 3.2 GB downloaded",
        ),
        (["starting"], 87_600_000, "loading " + "\u2591" * 24 + " 0 of 1 stages, 3 s (stage0), 88 MB downloaded"),
        (["ready", "ready"], 0, "loading " + "\u2588" * 24 + " 2 of 2 stages, 3 s"),
    ],
)
def test_the_bar(states: list[str], num_bytes: int, line: str) -> None:
    assert describe(health(*states), 3.4, num_bytes) == line


def test_downloads_are_counted_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HubCache(tmp_path, monkeypatch)
    blobs = tmp_path / "models--organization--tiny" / "blobs"
    assert Downloads([NAME, str(tmp_path)]).num_bytes() == 0
    blobs.mkdir(parents=True)
    (blobs / "old").write_bytes(bytes(100_000))
    downloads = Downloads([NAME, NAME])
    assert downloads.num_bytes() == 0
    (blobs / "new.incomplete").write_bytes(bytes(1_000_000))
    assert 1_000_000 <= downloads.num_bytes() < 1_100_000


def test_without_a_terminal_lines_say_what_is_still_loading(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start_progress, "is_quiet", lambda: True)
    monkeypatch.setattr(start_progress, "LINE_INTERVAL_S", 0.001)
    logged = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: logged.set()  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.omni.entrypoints.start_progress")
    monkeypatch.setattr(logger, "handlers", [handler, caplog.handler])
    with (
        caplog.at_level(logging.INFO, logger.name),
        start_progress.start_progress(lambda: health("ready", "starting"), []),
    ):
        assert logged.wait(60)
    assert caplog.messages[0] == "still loading after 0 s: stage1"


def test_vllms_own_log_needs_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_progress, "is_quiet", lambda: False)
    before = threading.active_count()
    with start_progress.start_progress(lambda: pytest.fail("it asks"), []):
        assert threading.active_count() == before
