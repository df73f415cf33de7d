# SPDX-License-Identifier: Apache-2.0
"""What an operator asks of a running server, by vLLM's paths: pauses, caches, adapters, weights, aborts, workers."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx2
import openai
import pytest
from fastapi import FastAPI
from safetensors.torch import load_file, save_file

from tests.entrypoints.adapters import write_adapter
from tests.entrypoints.openai.media_apps import MODEL, app_of, send, use
from tests.orchestrator.pipelines import fresh_stats
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.testing.tiny.diffusion_lora import write_tiny_diffusion_lora
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

GROUP = "llm"
NUM_TOKENS = 8


def development_app(client: OmniEngineClient, model: Path) -> Iterator[FastAPI]:
    """The application in vLLM's development mode, where adapters may be loaded."""
    with mock.patch.dict(os.environ, VLLM_SERVER_DEV_MODE="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1"):
        yield app_of(client, model)


@pytest.fixture(scope="module")
def app(qwen2_5_async_llm: AsyncOmniLLM, tiny_qwen2_5_omni: Path) -> Iterator[FastAPI]:
    """Of a thinker that takes adapters, a talker and a vocoder."""
    yield from development_app(OmniEngineClient(qwen2_5_async_llm), tiny_qwen2_5_omni)


def ask(model: str = MODEL, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "a hen"}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS, **fields}


def chat(app: FastAPI, **fields: Any) -> str:
    answer = send(app, "POST", "/v1/chat/completions", json=ask(**fields))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def post(app: FastAPI, path: str, **request: Any) -> Any:
    answer = send(app, "POST", path, **request)
    assert answer.status_code == 200, answer.text
    return answer.json() if answer.content else None


def error_of(answer: httpx2.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_paused_server_keeps_requests_until_it_resumes(app: FastAPI, mode: str) -> None:
    expected = chat(app)

    async def main(client: openai.AsyncOpenAI) -> httpx2.Response:
        http = client._client
        paused = await http.post("/pause", params={"mode": mode})
        assert (paused.status_code, paused.json()) == (200, {"status": "paused"}), paused.text
        waiting = asyncio.create_task(http.post("/v1/chat/completions", json=ask()))
        assert (await http.get("/is_paused")).json() == {"is_paused": True}
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        health = await http.get("/health")
        assert (health.status_code, health.json()["is_paused"]) == (200, True)
        assert not waiting.done()
        assert (await http.post("/resume")).json() == {"status": "resumed"}
        assert (await http.get("/is_paused")).json() == {"is_paused": False}
        assert "is_paused" not in (await http.get("/health")).json()
        return await waiting

    answer = use(app, main)
    assert answer.json()["choices"][0]["message"]["content"] == expected


def test_requests_that_run_when_it_is_paused(app: FastAPI) -> None:
    long = ask(max_tokens=400, ignore_eos=True)
    orchestrator = app.state.engine_client.llm._pipeline.orchestrator

    async def main(client: openai.AsyncOpenAI) -> tuple[httpx2.Response, httpx2.Response, httpx2.Response]:
        http = client._client

        async def begun() -> None:
            """Waits until the engine has a part of its cache for it."""
            while not (await asyncio.to_thread(fresh_stats, orchestrator))[0].kv_blocks_used:
                pass

        async def running(mode: str) -> httpx2.Response:
            answer = asyncio.create_task(http.post("/v1/chat/completions", json=long))
            await begun()
            assert (await http.post("/pause", params={"mode": mode})).status_code == 200
            if mode == "keep":
                assert (await http.post("/reset_prefix_cache")).json() == {"success": False}
                assert not answer.done()
            await http.post("/resume")
            return await answer

        async def kept_and_waited_for() -> httpx2.Response:
            answer = asyncio.create_task(http.post("/v1/chat/completions", json=long))
            await begun()
            assert (await http.post("/pause", params={"mode": "keep"})).status_code == 200
            assert (await http.post("/pause", params={"mode": "wait"})).status_code == 200
            done = await answer
            await http.post("/resume")
            return done

        return await running("keep"), await running("abort"), await kept_and_waited_for()

    kept, aborted, waited = use(app, main)
    assert kept.json()["usage"]["completion_tokens"] == waited.json()["usage"]["completion_tokens"] == 400
    assert "aborted" in error_of(aborted, 503) and aborted.headers["Retry-After"]
    assert chat(app)


def test_a_server_without_memory_to_give_back_sleeps_at_level_0_only(app: FastAPI) -> None:
    expected = chat(app)
    message = error_of(send(app, "POST", "/sleep"), 400)
    assert "stage 0 (thinker), stage 1 (talker), stage 2 (token2wav)" in message and "enable_sleep_mode" in message
    assert send(app, "GET", "/is_sleeping").json() == {"is_sleeping": False}
    assert post(app, "/sleep", params={"level": 0}) == {"status": "sleeping", "level": 0}
    assert send(app, "GET", "/is_sleeping").json() == {"is_sleeping": True}
    assert "tags: heap" in error_of(send(app, "POST", "/wake_up", params={"tags": "heap"}), 400)
    assert post(app, "/wake_up", params={"tags": "scheduling"})["status"] == "awake"
    assert send(app, "GET", "/is_sleeping").json() == {"is_sleeping": False}
    assert chat(app) == expected


def test_caches_are_forgotten(app: FastAPI) -> None:
    expected = chat(app)
    assert post(app, "/reset_prefix_cache") == {"success": True}
    post(app, "/reset_mm_cache")
    post(app, "/reset_encoder_cache")
    assert chat(app) == expected


def test_methods_of_all_workers_are_called(app: FastAPI) -> None:
    results = post(app, "/collective_rpc", json={"method": "get_supported_tasks"})["results"]
    assert len(results) == 3 and "generate" in results[0]
    message = error_of(send(app, "POST", "/collective_rpc", json={"method": "no_such_method"}), 400)
    assert "stage 0 (thinker)" in message and "no_such_method" in message
    assert send(app, "GET", "/server_info", params={"config_format": "json"}).json()["vllm_config"]["model_config"]


def test_an_adapter_is_loaded_and_unloaded(app: FastAPI, tiny_qwen2_5_omni: Path, tmp_path: Path) -> None:
    expected = chat(app)
    folder = write_adapter(tiny_qwen2_5_omni, tmp_path / "adapter", 1, prefix="thinker.model.")
    app.state.openai_serving_models.lora_id_counter.inc(100)  # Other tests have given their own numbers to adapters.
    body = {"lora_name": "hens", "lora_path": str(folder)}

    missing = send(app, "POST", "/v1/load_lora_adapter", json=body | {"lora_path": str(tmp_path / "none")})
    assert "No adapter found" in error_of(missing, 404)
    assert send(app, "POST", "/v1/load_lora_adapter", json=body).status_code == 200
    assert "hens" in [card["id"] for card in send(app, "GET", "/v1/models").json()["data"]]
    assert chat(app, model="hens") != expected and chat(app) == expected
    assert "already been loaded" in error_of(send(app, "POST", "/v1/load_lora_adapter", json=body), 400)
    assert send(app, "POST", "/v1/unload_lora_adapter", json={"lora_name": "hens"}).status_code == 200
    assert "hens" in error_of(send(app, "POST", "/v1/chat/completions", json=ask(model="hens")), 404)

    assert send(app, "POST", "/adapters", json={"name": "hens", "src": str(folder)}).status_code == 200
    assert chat(app, model="hens") != expected
    assert send(app, "DELETE", "/adapters/hens").status_code == 200
    assert "hens" in error_of(send(app, "POST", "/v1/chat/completions", json=ask(model="hens")), 404)


def test_weights_of_a_stage_change(app: FastAPI, tiny_qwen2_5_omni: Path, tmp_path: Path) -> None:
    """Those of all stages, and of one: the others stay as they are. A wrong folder changes nothing."""
    expected = chat(app)
    other = write_tiny_checkpoint("qwen2_5_omni", tmp_path / "other", seed=1)
    tensors = load_file(other / "model.safetensors")
    thinker = {name: tensor for name, tensor in tensors.items() if name.startswith("thinker.")}
    (tmp_path / "thinker").mkdir()
    save_file(thinker, tmp_path / "thinker" / "model.safetensors")
    assert send(app, "GET", "/weight_info").json()["weight_version"] == "default"
    assert send(app, "GET", "/get_world_size").json() == {"world_size": 3}
    assert send(app, "GET", "/get_world_size", params={"stage": "talker"}).json() == {"world_size": 1}

    def update(folder: Path, version: str, **params: str) -> None:
        assert post(app, "/init_weight_transfer_engine", json={"init_info": {}})["message"]
        assert post(app, "/start_weight_update") == {"message": "Weight update started"}
        body = {"update_info": {"weights_path": str(folder)}}
        assert post(app, "/update_weights", json=body, params=params) == {"message": "Weights updated"}
        finished = post(app, "/finish_weight_update", json={"weight_version": version})
        assert finished == {"message": "Weight update finished"}

    update(tmp_path / "thinker", "step-1", stage="thinker")
    changed = chat(app)
    assert changed != expected
    versions = {"thinker": "step-1", "talker": "default", "token2wav": "default"}
    assert send(app, "GET", "/weight_info").json() == {"weight_version": None, "stages": versions}
    health = send(app, "GET", "/health").json()["stages"]
    assert [stage.get("weight_version") for stage in health] == ["step-1", None, None]

    post(app, "/start_weight_update")
    body = {"update_info": {"weights_path": str(tmp_path)}}
    message = error_of(send(app, "POST", "/update_weights", json=body), 400)
    assert "stage 0 (thinker)" in message and "the checkpoint has no weights in a folder" in message
    tensors = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "ipc_handles_pickled": "gA=="}
    for info in (tensors, [tensors], 5):
        post(app, "/start_weight_update")
        refused = send(app, "POST", "/update_weights", json={"update_info": info})
        assert "not over NCCL or CUDA IPC" in error_of(refused, 400)
    assert "stage: there is no 'ear'" in error_of(send(app, "GET", "/weight_info", params={"stage": "ear"}), 400)
    assert error_of(send(app, "POST", "/finish_weight_update", json={}), 400)
    assert chat(app) == changed

    update(tiny_qwen2_5_omni, "default")
    assert chat(app) == expected
    assert post(app, "/update_weight_version", json={"new_version": "x"}) == {"success": True, "new_version": "x"}
    assert send(app, "GET", "/weight_info").json()["weight_version"] == "x"
    post(app, "/update_weight_version", json={"new_version": "default"})


def test_requests_are_aborted_by_id(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> tuple[Any, httpx2.Response]:
        http = client._client
        headers = {"X-Request-Id": "mine"}
        answer = asyncio.create_task(
            http.post("/v1/chat/completions", json=ask(max_tokens=400, ignore_eos=True), headers=headers)
        )
        while not any(app.state.engine_client.llm._pipeline.orchestrator.activity().values()):
            await asyncio.sleep(0)
        unknown = await http.post("/abort_requests", json={"request_ids": ["unknown"]})
        assert unknown.json() == {"status": "aborted", "aborted": 0}
        aborted = await http.post("/abort_requests", json={"request_ids": ["chatcmpl-mine"]})
        return aborted.json(), await answer

    aborted, answer = use(app, main)
    assert aborted == {"status": "aborted", "aborted": 1}
    assert "aborted" in error_of(answer, 503)
    assert post(app, "/abort_requests", json={}) == {"status": "aborted", "aborted": 0}


@pytest.mark.slow
def test_adapters_of_a_diffusion_model(
    image_app: FastAPI, tiny_diffusion: Callable[[str], Path], tmp_path: Path
) -> None:
    client: OmniEngineClient = image_app.state.engine_client
    for app in development_app(client, tiny_diffusion("z_image")):
        other = write_tiny_diffusion_lora(tiny_diffusion("flux"), tmp_path / "other")
        refused = send(app, "POST", "/v1/load_lora_adapter", json={"lora_name": "ink", "lora_path": str(other)})
        assert "ink" in error_of(refused, 500) and "AddLoRA" in error_of(refused, 500)
        own = write_tiny_diffusion_lora(tiny_diffusion("z_image"), tmp_path / "own", seed=0)
        answer = send(app, "POST", "/v1/load_lora_adapter", json={"lora_name": "ink", "lora_path": str(own)})
        assert answer.status_code == 200, answer.text
        picture = {"prompt": "a hen", "num_inference_steps": 1, "seed": 1, "height": 32, "width": 32}
        plain, inked = (post(app, "/v1/images/generations", json=picture | more) for more in ({}, {"model": "ink"}))
        assert plain["data"] != inked["data"]
        post(app, "/reset_encoder_cache")
        assert "no stage knows it" in error_of(send(app, "POST", "/reset_prefix_cache"), 400)
        assert "on the host already; use level 2" in error_of(send(app, "POST", "/sleep"), 400)
        assert "are kept" in error_of(send(app, "POST", "/sleep", params={"level": 2, "mode": "keep"}), 400)
        assert post(app, "/sleep", params={"level": 2}) == {"status": "sleeping", "level": 2}
        assert send(app, "GET", "/is_sleeping").json() == {"is_sleeping": True}
        assert post(app, "/wake_up")["status"] == "awake"
        assert post(app, "/v1/images/generations", json=picture | {"model": "ink"})["data"] == inked["data"]
        assert post(app, "/pause") and post(app, "/resume")
