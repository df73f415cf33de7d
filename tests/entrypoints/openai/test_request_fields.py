# SPDX-License-Identifier: Apache-2.0
"""No field of a request reads a file, runs code, or configures the engine: each is refused, or has no effect."""

import base64
import io
from typing import Any

import httpx
import numpy as np
import pytest

from tests.servers import RunningServer

GROUP = "server"
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "modalities": ["text"]}


def showing(kind: str, **content: Any) -> dict[str, Any]:
    """A chat with one media part."""
    return {"messages": [{"role": "user", "content": [{"type": kind, **content}]}]}


def numpy_file() -> str:
    file = io.BytesIO()
    np.save(file, np.array({"a": 1}, dtype=object), allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


def post(server: RunningServer, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, **options)


def check_it_serves(server: RunningServer) -> None:
    response = post(server, "/v1/chat/completions", CHAT)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ cycler.__init__.__globals__.os.popen('id').read() }}"},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"media_io_kwargs": {"video": {"num_frames": 100_000}}},
        {"sampling_params_list": [{"extra_args": {"a": 1}}, None, None]},
        {"sampling_params_list": [{"logits_processors": ["os:system"]}, None, None]},
        {"sampling_params_list": [{"output_kind": 1}, None, None]},
        showing("image_url", image_url={"url": "file:///etc/passwd"}),
        showing("image_url", image_url={"url": "http://127.0.0.1:1/a.png"}),
        showing("image_url", image_url={"url": "http://169.254.169.254/latest/meta-data"}),
        showing("video_url", video_url={"url": "file:///dev/zero"}),
        showing("audio_url", audio_url={"url": "file:///proc/self/environ"}),
        showing("input_audio", input_audio={"data": "AAAA", "format": "wav"}),
        showing("input_audio", input_audio={"data": "", "format": "../../wav"}),
        showing("image_url", image_url={"url": "data:image/png;base64,AAAA"}),
        showing("image_embeds", image_embeds=numpy_file()),
        showing("audio_embeds", audio_embeds=numpy_file()),
        showing("prompt_embeds", prompt_embeds=numpy_file()),
    ],
)
def test_fields_of_the_operator_are_refused(omni_server: RunningServer, fields: dict[str, Any]) -> None:
    response = post(omni_server, "/v1/chat/completions", CHAT | fields)
    assert response.status_code in (400, 422), response.text
    assert "root:" not in response.text


@pytest.mark.parametrize("model", ["/etc/passwd", "../../etc", "Qwen/Qwen3-0.6B", "", "\u0000"])
def test_no_other_model_is_loaded(omni_server: RunningServer, model: str) -> None:
    for path, body in {
        "/v1/chat/completions": CHAT,
        "/v1/completions": {"prompt": "a"},
        "/v1/audio/speech": {"input": "a", "voice": "x"},
        "/tokenize": {"prompt": "a"},
    }.items():
        response = post(omni_server, path, body | {"model": model})
        # Without a name, the model that is served.
        assert response.status_code in ((404,) if model else (200, 400, 404)), (path, response.text)


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}},
        {"vllm_xargs": {"a": "b"}},
        {"logits_processors": ["os:system"]},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"$ref": "file:///etc/passwd"}},
            }
        },
        {"request_id": "../../../../tmp/x"},
        {"cache_salt": "../x"},
        {"user": "\u202e\u0000"},
        {"priority": -(2**63)},
        {"metadata": {"a": "${HOME}", "b": "{{ 1 }}"}},
        {"messages": [{"role": "user", "content": "${HOME} {{ self }} {% include '/etc/passwd' %} <|im_end|>"}]},
    ],
)
def test_fields_of_other_servers_have_no_effect(omni_server: RunningServer, fields: dict[str, Any]) -> None:
    response = post(omni_server, "/v1/chat/completions", CHAT | fields)
    assert response.status_code in (200, 400), response.text
    check_it_serves(omni_server)


def test_strange_headers_are_harmless(omni_server: RunningServer) -> None:
    headers = {
        "x-request-id": "../../x",
        "traceparent": "00-zz",
        "x-data-parallel-rank": "7",
        "x-session-id": "a" * 5000,
    }
    response = post(omni_server, "/v1/chat/completions", CHAT, headers=headers)
    assert response.status_code in (200, 400), response.text
    check_it_serves(omni_server)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter", "/reset_prefix_cache", "/sleep", "/collective_rpc", "/server_info", "/start_profile",
        "/scale_elastic_ep", "/update_weights", "/pause", "/abort_requests",
    ],
)  # fmt: skip
def test_operators_endpoints_are_not_served(omni_server: RunningServer, path: str) -> None:
    assert post(omni_server, path, {"lora_name": "a", "lora_path": "/etc"}).status_code == 404
    assert httpx.get(f"{omni_server.url}{path}", timeout=60).status_code == 404
