# SPDX-License-Identifier: Apache-2.0
"""Chat with a custom pipeline: a language model rewrites the request, a diffusion model makes an image of its text."""

import asyncio
import base64
import io
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from fastapi import FastAPI
from PIL import Image
from pydantic import ValidationError

from tests.diffusion.rewriting import RewrittenPrompt
from tests.entrypoints.fake_pipelines import record_events
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.cli.serve import OmniServeCommand
from vllm_omni.entrypoints.openai.api_server import build_omni_app
from vllm_omni.entrypoints.openai.chat import OmniChatCompletionRequest, OmniServingChat
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.errors import RequestTimeoutError, StageConfigError
from vllm_omni.events import CompletedEvent, ErrorEvent

BOTH = ["text", "image"]
SIZE = {"height": 32, "width": 48, "num_inference_steps": 2}


def configuration(shows_text: bool) -> dict[str, Any]:
    writer: dict[str, Any] = {
        "stage_id": 0,
        "engine_args": {"model_stage": "writer", "model": "writer", "max_model_len": 256},
        "default_sampling_params": {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True},
    }
    denoiser = {
        "stage_id": 1,
        "engine_type": "DiT",
        "engine_args": {"model_stage": "denoiser", "model": "denoiser"},
        "engine_input_source": [0],
        "custom_process_input_func": f"{RewrittenPrompt.__module__}.{RewrittenPrompt.__name__}",
        "final_output": True,
        "final_output_type": "image",
        "default_sampling_params": {**SIZE, "seed": 3},
    }
    shown = {"final_output": True, "final_output_type": "text"} if shows_text else {}
    return {"stage_args": [writer | shown, denoiser]}


@pytest.fixture(scope="module")
def folder(tiny_qwen3: Path, tiny_diffusion: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    (folder / "writer").symlink_to(tiny_qwen3)
    (folder / "denoiser").symlink_to(tiny_diffusion("z_image"))
    return folder


def open_llm(folder: Path, shows_text: bool) -> AsyncOmniLLM:
    path = folder / f"shows_text_{shows_text}.yaml"
    path.write_text(yaml.safe_dump(configuration(shows_text)))
    options: dict[str, Any] = {
        "dtype": "float32",
        "stage_overrides": {"writer": {"max_num_seqs": 4, "enforce_eager": True}},
    }
    return AsyncOmniLLM(str(folder), str(path), log_stats=True, **options)


@pytest.fixture(scope="module")
def showing(folder: Path) -> Iterator[AsyncOmniLLM]:
    with open_llm(folder, shows_text=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def silent(folder: Path) -> Iterator[AsyncOmniLLM]:
    with open_llm(folder, shows_text=False) as llm:
        yield llm


def chat(
    llm: AsyncOmniLLM, path: str = "/v1/chat/completions", flags: Sequence[str] = (), **body: Any
) -> httpx.Response:
    """One request to an application made for it."""

    async def main() -> httpx.Response:
        args = OmniServeCommand().parse(["model", *flags]).args
        app: FastAPI = await build_omni_app(OmniEngineClient(llm), args)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", timeout=60) as http:
            return await http.post(path, json={"messages": [{"role": "user", "content": "a hen"}], **body})

    return asyncio.run(main())


def image_of(choice: dict[str, Any], part: str = "message") -> np.ndarray:
    (image,) = choice[part]["images"]
    data = image["image_url"]["url"].removeprefix("data:image/png;base64,")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_text_and_image_are_one_message(showing: AsyncOmniLLM) -> None:
    (choice,) = chat(showing, modalities=BOTH).json()["choices"]
    assert choice["message"]["content"]
    assert image_of(choice).shape == (32, 48, 3)


def test_without_modalities_the_answer_is_text_and_no_other_stage_runs(showing: AsyncOmniLLM) -> None:
    def num_image_requests() -> int:
        return showing.stats()[1].num_enqueued

    before = num_image_requests()
    (choice,) = chat(showing).json()["choices"]
    assert choice["message"]["content"] and "images" not in choice["message"]
    assert num_image_requests() == before
    chat(showing, modalities=["image"])
    assert num_image_requests() == before + 1


def test_a_flag_sets_the_default_modalities(showing: AsyncOmniLLM) -> None:
    (choice,) = chat(showing, flags=["--default-modalities", *BOTH]).json()["choices"]
    assert choice["message"]["content"] and image_of(choice).shape == (32, 48, 3)
    with pytest.raises(StageConfigError, match="audio: this model cannot output it; it outputs text, image"):
        chat(showing, flags=["--default-modalities", "audio"])


def test_diffusion_settings_are_in_extra_body_or_in_sampling_params_list(showing: AsyncOmniLLM) -> None:
    plain = image_of(chat(showing, modalities=["image"]).json()["choices"][0])
    other = image_of(chat(showing, modalities=["image"], extra_body={"seed": 4}).json()["choices"][0])
    entry = image_of(chat(showing, modalities=["image"], sampling_params_list=[None, {"seed": 4}]).json()["choices"][0])
    assert not np.array_equal(plain, other)
    np.testing.assert_array_equal(other, entry)


def test_a_stream_ends_with_the_image(showing: AsyncOmniLLM) -> None:
    whole = image_of(chat(showing, modalities=BOTH).json()["choices"][0])
    lines = chat(showing, stream=True, modalities=BOTH).text.split("\n\n")
    chunks = [httpx.Response(200, text=line[6:]).json() for line in lines if line.startswith("data: {")]
    *texts, last, end = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content") or "" for choice in texts)
    np.testing.assert_array_equal(image_of(last, "delta"), whole)
    assert (end["delta"], end["finish_reason"]) == ({}, "length")
    assert lines[-2] == "data: [DONE]"


def respond(llm: AsyncOmniLLM, *tools: dict[str, Any], **body: Any) -> httpx.Response:
    tools = tuple({"type": "image_generation", **tool} for tool in tools)
    return chat(llm, "/v1/responses", messages=None, **{"input": "a hen", "tools": tools, **body})


def painted(item: dict[str, Any]) -> np.ndarray:
    assert (item["type"], item["status"]) == ("image_generation_call", "completed") and item["id"].startswith("ig_")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(item["result"]))))


def test_a_response_has_the_picture_of_a_chat(showing: AsyncOmniLLM) -> None:
    """Where OpenAI's tool asks for it, in its size and format."""
    expected = chat(showing, modalities=BOTH).json()["choices"][0]
    text, call = respond(showing, {}).json()["output"]
    assert text["content"][0]["text"] == expected["message"]["content"]
    np.testing.assert_array_equal(painted(call), image_of(expected))
    _, small = respond(showing, {"size": "32x16", "output_format": "webp", "quality": "low"}).json()["output"]
    assert painted(small).shape == (16, 32, 3) and base64.b64decode(small["result"])[8:12] == b"WEBP"
    for body in ({"tools": []}, {"tool_choice": "none"}):
        (only,) = respond(showing, {}, **body).json()["output"]
        assert only["type"] == "message"
    again = [{"role": "user", "content": "a hen"}, text, call, {"role": "user", "content": "and a fox"}]
    _, call = respond(showing, {}, input=again).json()["output"]
    assert painted(call).shape == (32, 48, 3)


def test_a_streamed_response_ends_with_the_picture(showing: AsyncOmniLLM) -> None:
    _, whole = respond(showing, {}).json()["output"]
    lines = respond(showing, {}, stream=True).text.split("\n\n")
    events = [json.loads(line.partition("data: ")[2]) for line in lines if line]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added, *states, done, end = events[-6:]
    assert (added["type"], done["type"]) == ("response.output_item.added", "response.output_item.done")
    assert (added["item"]["status"], added["item"]["result"]) == ("in_progress", None)
    names = [f"response.image_generation_call.{state}" for state in ("in_progress", "generating", "completed")]
    assert [state["type"] for state in states] == names and {state["output_index"] for state in states} == {1}
    assert end["type"] in ("response.completed", "response.incomplete"), "vLLM 0.32 does not say that it was cut"
    assert end["response"]["output"][1] == done["item"]
    np.testing.assert_array_equal(painted(done["item"]), painted(whole))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"size": "large"}, "tools[0].size"),
        ({"background": "transparent"}, "tools[0].background"),
        ({"output_format": "svg"}, "tools[0].output_format"),
        ({"input_image_mask": {"file_id": "a"}}, "tools[0].input_image_mask"),
    ],
)
def test_a_wrong_tool_for_pictures(showing: AsyncOmniLLM, tool: dict[str, Any], field: str, stream: bool) -> None:
    refused = respond(showing, tool, stream=stream)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text


def test_a_streamed_answer_is_not_kept(showing: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    events = record_events(showing, monkeypatch)
    num_tokens = []
    for stream in (True, False):
        assert chat(showing, stream=stream).status_code == 200
        assert isinstance(events[-1], CompletedEvent)
        num_tokens.append(len(events[-1].outputs[0].outputs[0].token_ids))
    assert num_tokens[0] < num_tokens[1] == 6, "only the last output was kept"


def test_an_answer_has_the_times_of_its_request(showing: AsyncOmniLLM) -> None:
    flag = "--enable-per-request-metrics"
    assert chat(showing).json().get("metrics") is None
    whole = chat(showing, flags=[flag]).json()["metrics"]
    assert whole["queue_time_ms"] >= 0 and whole["tokens_per_second"] > 0
    options = {"include_usage": True}
    lines = chat(showing, flags=[flag], stream=True, stream_options=options).text.split("\n\n")
    *_, end = [httpx.Response(200, text=line[6:]).json() for line in lines if line.startswith("data: {")]
    streamed = end["metrics"]
    assert 0 < streamed["mean_itl_ms"] < streamed["generation_time_ms"]
    assert streamed["time_to_first_token_ms"] > 0
    completion = chat(showing, "/v1/completions", [flag], messages=None, prompt="a hen").json()
    assert completion["metrics"]["tokens_per_second"] > 0


def test_a_pipeline_without_final_text_answers_with_the_image(silent: AsyncOmniLLM, showing: AsyncOmniLLM) -> None:
    (choice,) = chat(silent).json()["choices"]
    assert choice["message"]["content"] is None
    np.testing.assert_array_equal(image_of(choice), image_of(chat(showing, modalities=["image"]).json()["choices"][0]))


def test_text_of_a_pipeline_without_final_text_is_refused(silent: AsyncOmniLLM) -> None:
    refused = chat(silent, modalities=["text"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "modalities")
    assert "it outputs image" in refused.json()["error"]["message"]
    assert chat(silent, "/v1/completions", prompt="a").status_code == 400


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", {}), ("/v1/completions", {"prompt": ["a", "b"]})])
def test_an_error_before_a_stream_has_its_status(
    showing: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    async def fail(prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncGenerator[ErrorEvent, None]:
        error = RequestTimeoutError("too late", request_id=request_id)
        yield ErrorEvent(request_id=request_id, sequence=0, ts=0.0, error=error)

    streamed = chat(showing, path, stream=True, **body)
    assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")
    monkeypatch.setattr(showing, "generate", fail)
    answer = chat(showing, path, stream=True, **body)
    assert answer.status_code == 504 and "too late" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("tools", "message"), [([{}], "the field 'function' is missing"), ([1], "has a wrong type")])
def test_malformed_tools_are_refused(tools: list[Any], message: str) -> None:
    choice = {"type": "function", "function": {"name": "look"}}
    fields = {"messages": [{"role": "user", "content": "Hello"}], "tools": tools, "tool_choice": choice}
    with pytest.raises(ValidationError, match=message):
        OmniChatCompletionRequest.model_validate(fields)


def test_vllm_s_handlers_read_the_settings_of_its_renderer() -> None:
    client = SimpleNamespace(renderer=SimpleNamespace(mm_processor=None), default_sampling_params={})
    renderer = SimpleNamespace(reasoning_effort_map={"medium": "low"})
    handler: Any = SimpleNamespace(online_renderer=renderer, engine_client=client)
    ours: Any = OmniServingChat.from_vllm(handler)
    assert ours.online_renderer.reasoning_effort_map == {"medium": "low"}
