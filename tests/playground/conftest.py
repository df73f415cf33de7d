# SPDX-License-Identifier: Apache-2.0
"""The page of the shipped models, in a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.servers import RunningServer

if TYPE_CHECKING:
    from playwright.sync_api import Playwright

KEY = "key-of-the-server"
NAME, PASSWORD = "ann", "opensesame"


def skip_without_browser() -> None:
    """Skips the test, and says what is missing."""
    pytest.importorskip("gradio", reason="needs Gradio (extra `test`)")
    pytest.importorskip("playwright", reason="needs Playwright (extra `test`)")
    if shutil.which("chromium") is None:
        pytest.skip("needs Chromium (`make programs`)")


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    """Ends with the module: while it runs, this thread has an event loop, and tests cannot run another."""
    skip_without_browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        yield running


@pytest.fixture(scope="session")
def talking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The shipped omni model, with an API key, and its page at /playground/."""
    skip_without_browser()
    log = tmp_path_factory.mktemp("server") / "log.txt"
    auth = f"--playground-auth={NAME}:{PASSWORD}"
    server = RunningServer("shapes", "--playground", auth, f"--api-key={KEY}", log=log)
    yield server
    server.stop()
