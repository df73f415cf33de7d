# SPDX-License-Identifier: Apache-2.0
"""The paths of vLLM's application, each answered as vLLM does, by a handler of ours, or withheld with a reason."""

import os
from pathlib import Path
from unittest import mock

from fastapi import FastAPI
from vllm import envs
from vllm.entrypoints.launchers.app import build_app

from tests.entrypoints.openai.media_apps import send, server_args
from vllm_omni.entrypoints.openai import operator_routes, scale_out
from vllm_omni.entrypoints.openai.api_server import OWN_PATHS, TEXT_ONLY_PATHS, WITHHELD_PATHS

GROUP = "llm"
AS_VLLM = {
    "/openapi.json", "/docs/oauth2-redirect", "/load", "/version", "/metrics", "/tokenize",
    "/detokenize", "/v1/models", "/v1/chat/completions/batch", "/generative_scoring",
    *scale_out.PATHS, operator_routes.SCALE_OUT_PATH,
}  # fmt: skip
OPERATION = {
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/adapters/{adapter_name}", "/pause", "/resume",
    "/is_paused", "/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/reset_mm_cache",
    "/reset_encoder_cache", "/collective_rpc", "/server_info", "/start_profile", "/stop_profile",
    "/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update",
}  # fmt: skip
"""vLLM's own, in its development mode, and with its other options for operators."""
NOT_ALWAYS = {"/start_profile", "/stop_profile", "/v1/decisions"}
"""Of vLLM's application with a profiler; of 0.33."""


def paths_of(app: FastAPI) -> set[str]:
    return {getattr(route, "path", "") for route in app.router.routes}


def test_every_path_of_vllm_has_a_place(tiny_qwen3_omni_moe: Path) -> None:
    """One that the next vLLM adds is served as it is, and fails here until somebody has looked at it."""
    envs.disable_envs_cache()
    options = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with mock.patch.dict(os.environ, options):
        app = build_app(server_args(tiny_qwen3_omni_moe), ("generate", "transcription"), None)
    assert paths_of(app) | NOT_ALWAYS == AS_VLLM | OPERATION | OWN_PATHS | WITHHELD_PATHS.keys()


def test_what_is_withheld_is_not_found(omni_app: FastAPI) -> None:
    assert not paths_of(omni_app) & WITHHELD_PATHS.keys()
    assert paths_of(omni_app) >= (AS_VLLM | OWN_PATHS) - {*operator_routes.PATHS} - NOT_ALWAYS
    assert {send(omni_app, "POST", path).status_code for path in ("/sleep", "/abort_requests")} == {404}


def test_a_diffusion_model_answers_as_its_chat_would(image_app: FastAPI) -> None:
    for path in TEXT_ONLY_PATHS:
        answer = send(image_app, "POST", path, json={"model": "tiny", "messages": []})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "this model neither reads nor writes tokens; it outputs image"
    for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/cancel"):
        assert {send(image_app, method, path).status_code for method in ("GET", "POST")} == {404}


def test_the_page_has_these_lists() -> None:
    page = (Path(__file__).parents[3] / "docs/vllm_surface.md").read_text()
    answers = {
        "vLLM's own": sorted(AS_VLLM),
        "vLLM's own, for an operator": sorted(OPERATION),
        "for a pipeline": sorted(OWN_PATHS),
    }
    for path, reason in WITHHELD_PATHS.items():
        answers.setdefault(f"404: it needs {reason}", []).append(path)
    rows = [f"| {answer} | {', '.join(f'`{path}`' for path in paths)} |" for answer, paths in answers.items()]
    table = page.partition("## Paths")[2].partition("\n## ")[0].splitlines()
    assert [line for line in table if line.startswith("|")][2:] == rows
