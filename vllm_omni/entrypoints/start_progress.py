# SPDX-License-Identifier: Apache-2.0
"""What a server or a program shows while its stages load: on a terminal a bar, elsewhere now and then a line.

For one whose log has our lines only; with vLLM's own there is enough to read.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from vllm_omni.launch.supervisor import StageHealth
from vllm_omni.metrics.logs import get_logger, is_quiet, quiet_stream
from vllm_omni.metrics.status_line import StatusLine, is_terminal

logger = get_logger(__name__)

_WIDTH = 24
LINE_INTERVAL_S = 30.0
"""Between two lines where there is no terminal."""


@contextmanager
def start_progress(health: Callable[[], list[StageHealth]], checkpoints: Iterable[str]) -> Iterator[None]:
    """Shows how many stages are ready, and how much has been downloaded, until it ends.

    Args:
        health: The state of the stages.
        checkpoints: What they load: folders, and names on the hub.
    """
    if not is_quiet():
        yield
        return
    downloads = Downloads(checkpoints)
    if is_terminal(stream := quiet_stream()):
        with StatusLine(lambda seconds: describe(health(), seconds, downloads.num_bytes()), stream):
            yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_log, args=(health, downloads, ended), name="omni-start-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def showing(what: str) -> Iterator[None]:
    """Shows on the terminal of a quiet process what is done, with its seconds, until it ends."""
    if is_quiet() and is_terminal(stream := quiet_stream()):
        with StatusLine(lambda seconds: f"{what} ... {seconds:.0f} s", stream):
            yield
    else:
        yield


def describe(health: list[StageHealth], seconds: float, num_bytes: int) -> str:
    """`loading ████░░░░ 1 of 2 stages, 12 s (llm), 3.2 GB downloaded`"""
    starting = [stage.name for stage in health if stage.state != "ready"]
    num_ready = len(health) - len(starting)
    filled = _WIDTH * num_ready // len(health)
    names = f" ({', '.join(starting)})" if starting else ""
    downloaded = f", {_size(num_bytes)} downloaded" if num_bytes else ""
    bar = "\u2588" * filled + "\u2591" * (_WIDTH - filled)
    return f"loading {bar} {num_ready} of {len(health)} stages, {seconds:.0f} s{names}{downloaded}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _log(health: Callable[[], list[StageHealth]], downloads: "Downloads", ended: threading.Event) -> None:
    start = time.monotonic()
    while not ended.wait(LINE_INTERVAL_S):
        starting = ", ".join(stage.name for stage in health() if stage.state != "ready")
        num_bytes = downloads.num_bytes()
        downloaded = f"; {_size(num_bytes)} downloaded" if num_bytes else ""
        logger.info("still loading after %.0f s: %s%s", time.monotonic() - start, starting, downloaded)


class Downloads:
    """The files that libraries download from the hub, in its cache."""

    def __init__(self, checkpoints: Iterable[str]) -> None:
        """
        Args:
            checkpoints: Those that are folders are left out.
        """
        names = [name for name in {*checkpoints} if not Path(name).exists()]
        cache = Path(constants.HF_HUB_CACHE)
        self._folders = [cache / repo_folder_name(repo_id=name, repo_type="model") / "blobs" for name in names]
        self._before = self._count()

    def num_bytes(self) -> int:
        """Bytes since the start."""
        return max(0, self._count() - self._before)

    def _count(self) -> int:
        total = 0
        for folder in self._folders:
            for path in folder.glob("*"):
                try:
                    total += path.stat().st_blocks * 512  # Of a file that is reserved as a whole, what has come.
                except FileNotFoundError:  # It has another name since.
                    continue
        return total
