# SPDX-License-Identifier: Apache-2.0
"""The servers of the shipped models that all files of this folder share; a key is set."""

from collections.abc import Iterator

import pytest

from tests.clients.running import KEY, skip_without_clients
from tests.servers import RunningServer


@pytest.fixture(scope="session")
def shapes_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`shapes`: hears, sees, writes and speaks, and calls tools."""
    yield from _serve("shapes", tmp_path_factory, "--enable-auto-tool-choice", "--tool-call-parser=pythonic")


@pytest.fixture(scope="session")
def painter_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`shapes-painter`: paints."""
    yield from _serve("shapes-painter", tmp_path_factory)


def _serve(model: str, tmp_path_factory: pytest.TempPathFactory, *flags: str) -> Iterator[RunningServer]:
    skip_without_clients()
    log = tmp_path_factory.mktemp("server") / "log.txt"
    server = RunningServer(model, f"--api-key={KEY}", "--public-lists", *flags, log=log)
    yield server
    server.stop()
