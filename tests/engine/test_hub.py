# SPDX-License-Identifier: Apache-2.0
"""A name that may be on the hub is asked about once."""

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants as constants
import pytest
from huggingface_hub import HfApi

from tests.hub_cache import NAME, HubCache
from tests.servers import free_port
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.engine import hub
from vllm_omni.entrypoints.resolve import read_pipeline
from vllm_omni.errors import StageConfigError

POLL_S = 0.01


class Hub(ThreadingHTTPServer):
    """A fake of the hub, which answers everything alike."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.status, self.code = 404, "RepoNotFound"
        self.info: dict[str, object] | None = None
        """The answer to the first request, which then has no error."""
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(POLL_S,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        is_info = self.server.info is not None and len(self.server.requests) == 1
        body = json.dumps(self.server.info).encode() if is_info else b""
        self.send_response(200 if is_info else self.server.status)
        if not is_info:
            self.send_header("X-Error-Code", self.server.code)
            self.send_header("X-Error-Message", "Invalid credentials in Authorization header")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Nowhere."""


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As for a user without variables of the hub, but for its address and an empty cache."""
    HubCache(tmp_path / "cache", monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.check_on_hub.cache_clear()
    yield
    hub.check_on_hub.cache_clear()


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(hub, "HfApi", lambda: HfApi(endpoint=url))


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        use(server.url, monkeypatch)
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "RepoNotFound", "has no model of this name; if it is private, set HF_TOKEN"),
        (401, "RepoNotFound", "has no model of this name"),
        (403, "GatedRepo", "accept them there and set HF_TOKEN"),
        (404, "RevisionNotFound", "has no revision 'v9' of it"),
        (401, "", "refuses the token; set HF_TOKEN to a valid one"),
        (503, "", "cannot be asked: "),
    ],
)
def test_the_hub_is_asked_once(fake_hub: Hub, status: int, code: str, words: str) -> None:
    fake_hub.status, fake_hub.code = status, code
    with pytest.raises(StageConfigError) as error:
        read_pipeline(OmniArgs(model="nobody/model", engine_args={"revision": "v9"}))
    assert words in str(error.value) and "nobody/model" in str(error.value) and fake_hub.url in str(error.value)
    assert fake_hub.requests == ["/api/models/nobody/model/revision/v9"]


def test_a_gated_model_is_refused_before_its_files_are(fake_hub: Hub) -> None:
    fake_hub.info = {"id": "somebody/gated", "gated": "manual"}
    fake_hub.status, fake_hub.code = 403, "GatedRepo"
    with pytest.raises(StageConfigError, match="accept them there and set HF_TOKEN"):
        read_pipeline(OmniArgs(model="somebody/gated"))
    assert fake_hub.requests == ["/api/models/somebody/gated", "/api/models/somebody/gated/auth-check"]


def test_a_hub_that_cannot_be_reached_is_one_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    use(url, monkeypatch)
    logger = logging.getLogger("vllm.omni.engine.hub")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])  # vLLM's loggers may not propagate.
    with caplog.at_level(logging.INFO, logger.name), pytest.raises(StageConfigError) as error:
        read_pipeline(OmniArgs(model="nobody/model"))
    assert f"'nobody/model' is no checkpoint: there is no such folder, and {url} cannot be asked: " in str(error.value)
    assert "check the name and the network" in str(error.value)
    assert set(caplog.messages) == {f"Asking {url} about nobody/model"}


def test_offline_it_is_not_asked(fake_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StageConfigError, match="it is not in the cache of the hub, and HF_HUB_OFFLINE is set"):
        read_pipeline(OmniArgs(model="nobody/model"))
    assert not fake_hub.requests


def test_what_is_here_is_not_asked_about(
    fake_hub: Hub, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.check_on_hub(str(tiny_qwen3))
    HubCache(tmp_path / "hub", monkeypatch).add(tiny_qwen3, "main")
    hub.check_on_hub(NAME)
    assert not fake_hub.requests


@pytest.mark.parametrize(("name", "near"), [("shpes", "shapes"), ("tlk", "talk"), ("Shapes", "shapes")])
def test_a_mistyped_name_of_an_installed_checkpoint(fake_hub: Hub, name: str, near: str) -> None:
    with pytest.raises(StageConfigError, match=f"no checkpoint '{name}'; did you mean '{near}'"):
        OmniArgs(model=name)
    assert not fake_hub.requests


def test_a_folder_of_such_a_name_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shpes").mkdir()
    assert OmniArgs(model="shpes").model == "shpes"
    assert OmniArgs(model="gpt2").model == "gpt2"
