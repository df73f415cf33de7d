# SPDX-License-Identifier: Apache-2.0
"""GET /: what is served, as a page or JSON, and who sees the names of the model."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.routing import WebSocketRoute

from tests.entrypoints.fake_pipelines import running
from tests.entrypoints.openai.audio_stage import AUDIO_STAGE
from tests.entrypoints.openai.fake_server import FakeServer
from tests.entrypoints.openai.small_apps import send
from vllm_omni import AsyncOmniLLM, __version__

JSON = {"accept": "application/json"}
BROWSER = {"accept": "text/html,application/xhtml+xml,application/json;q=0.9,*/*;q=0.8"}
NAMES = ("--served-model-name", "org/<b>model</b>", "other")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmniLLM]:
    with running(AsyncOmniLLM, tmp_path_factory.mktemp("config"), [AUDIO_STAGE]) as llm:
        yield llm


def names_in(llm: AsyncOmniLLM, *flags: str, **headers: str) -> list[str] | None:
    """The names of the model that the page shows, which are those of its JSON."""
    app = FakeServer(llm, *NAMES, *flags).app
    names = send(app, "GET", "/", headers=JSON | headers).json()["models"]
    page = send(app, "GET", "/", headers=headers).text
    assert ("It serves org/&lt;b&gt;model&lt;/b&gt;, other." in page) == (names == ["org/<b>model</b>", "other"])
    assert ("It needs an API key." in page) == (names is None)
    return names


def test_a_page_for_browsers_and_json_for_programs(llm: AsyncOmniLLM) -> None:
    app = FakeServer(llm, "--served-model-name", "fake").app
    answer = send(app, "GET", "/", headers=JSON)
    assert answer.json() == {
        "name": "vLLM-Omni",
        "version": __version__,
        "models": ["fake"],
        "endpoints": app.state.omni_description.endpoints,
        "links": ["docs", "health"],
    }
    assert "/v1/audio/speech" in answer.json()["endpoints"]
    for headers in (BROWSER, {"accept": "*/*"}, {"accept": ""}):
        page = send(app, "GET", "/", headers=headers)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        shown = (__version__, "fake", '<a href="docs"><code>/v1/audio/speech</code></a>')
        assert all(part in page.text for part in shown)
        assert '<link rel="icon" href="data:,">' in page.text  # Else a browser asks for one, without a key.


def test_no_name_of_a_model_is_shown_to_those_who_may_not_list_it(llm: AsyncOmniLLM) -> None:
    names = ["org/<b>model</b>", "other"]
    assert names_in(llm) == names
    assert names_in(llm, "--api-key=secret") is None
    assert names_in(llm, "--api-key=secret", authorization="Bearer secret") == names
    assert names_in(llm, "--api-key=secret", "--public-lists") == names


def test_docs_that_are_not_served_are_not_linked(llm: AsyncOmniLLM) -> None:
    app = FakeServer(llm, "--disable-fastapi-docs").app
    assert send(app, "GET", "/docs").status_code == 404
    assert send(app, "GET", "/", headers=JSON).json()["links"] == ["health"]
    assert "docs" not in send(app, "GET", "/").text


def test_docs_are_shown_without_a_network_or_a_key(llm: AsyncOmniLLM) -> None:
    app = FakeServer(llm, *NAMES, "--api-key=secret", "--root-path=/omni").app
    page = send(app, "GET", "/omni/docs")
    assert page.status_code == 200 and "://" not in page.text
    addresses = re.findall(r"""(?:href|src)="([^"]+)"|url: '([^']+)'""", page.text)
    files = {address for pair in addresses for address in pair if address and not address.startswith("data:")}
    assert files == {"static/swagger-ui.css", "static/swagger-ui-bundle.js", "openapi.json"}
    answers = {name: send(app, "GET", f"/omni/{name}") for name in files}
    assert {answer.status_code for answer in answers.values()} == {200}
    schema = answers["openapi.json"]
    assert NAMES[1] not in schema.text
    assert schema.json()["security"] == [{"key": []}] and "/v1/audio/speech" in schema.json()["paths"]
    assert "security" not in send(FakeServer(llm).app, "GET", "/openapi.json").json()


def test_every_route_and_mount_needs_the_key_with_every_method(llm: AsyncOmniLLM) -> None:
    app = FakeServer(llm, "--api-key=secret", '--allowed-origins=["*"]').app
    paths = {re.sub(r"{.*?}", "x", route.path) for route in app.routes if not isinstance(route, WebSocketRoute)}
    assert {"/metrics", "/v1/chat/completions", "/v1/videos/x/content"} <= paths
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
    open_to = {
        (method, path)
        for path in [*paths, *(f"{path.rstrip('/')}/x" for path in paths)]
        for method in methods
        if send(app, method, path).status_code != 401
    }
    probes = {(method, path) for method in methods for path in ("/health", "/ping", "/readyz")}
    assert open_to == probes | {
        (method, path) for method in ("GET", "HEAD") for path in ("/", "/docs", "/openapi.json")
    }
    page = {"origin": "http://page", "access-control-request-method": "POST"}
    answer = send(app, "OPTIONS", "/v1/chat/completions", headers=page)
    assert answer.status_code == 200, answer.text
    assert send(app, "OPTIONS", "/metrics", headers=page).text == "OK"


def test_probes_of_readiness_are_answered_as_health(llm: AsyncOmniLLM) -> None:
    app = FakeServer(llm, "--api-key=secret").app
    health, ready = (send(app, "GET", path) for path in ("/health", "/readyz"))
    assert (ready.status_code, ready.json()) == (health.status_code, health.json()) == (200, health.json())
    assert send(app, "HEAD", "/readyz").status_code == 200


@pytest.mark.parametrize("path", ["/v1/readyz", "/v1/test", "/test"])
def test_clients_do_not_take_this_server_for_another(llm: AsyncOmniLLM, path: str) -> None:
    """wyoming-openai takes a server that answers the first for LocalAI, the others for Kokoro-FastAPI, and one whose
    health is the text "OK" for Speaches; each has another list of voices. It asks this one for OpenAI's names."""
    app: Any = FakeServer(llm).app
    assert send(app, "GET", path).status_code == 404
    assert send(app, "GET", "/health").text != "OK"


def test_a_proxy_may_remove_the_root_path_or_leave_it(llm: AsyncOmniLLM) -> None:
    app = FakeServer(llm, "--root-path=/omni", "--api-key=secret").app
    inner = FastAPI()

    @inner.get("/part")
    def part(request: Request) -> str:
        return str(request.url.path)

    app.mount("/mounted", inner)
    headers = {"authorization": "Bearer secret"}
    for path in ("/mounted/part", "/omni/mounted/part"):
        assert send(app, "GET", path).status_code == 401
        assert send(app, "GET", path, headers=headers).json() == "/omni/mounted/part"
    assert [send(app, "GET", path).status_code for path in ("/health", "/omni/health", "/omnihealth")] == [
        200,
        200,
        401,
    ]
