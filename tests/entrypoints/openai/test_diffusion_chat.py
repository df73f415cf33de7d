# SPDX-License-Identifier: Apache-2.0
"""Chat with image and audio models without a vLLM stage that reads prompts."""

import asyncio
import base64
import io
import json
import wave
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from fastapi import FastAPI
from PIL import Image
from starlette.datastructures import State
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.exceptions import VLLMValidationError

from tests.diffusion.indexes import write_index
from tests.entrypoints.openai.media_apps import MODEL, png, send, server_args, use
from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.entrypoints.openai.api_server import DiffusionModels
from vllm_omni.entrypoints.openai.chat import OmniChatCompletionRequest
from vllm_omni.entrypoints.openai.last_message_chat import LastMessageChat, make_chat
from vllm_omni.entrypoints.openai.voices import Voices
from vllm_omni.events import CompletedEvent, OmniEvent
from vllm_omni.media import encode_outputs
from vllm_omni.outputs import OmniRequestOutput, StageOutput
from vllm_omni.sampling_params import DiffusionSamplingParams

GROUP = "llm"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SMALL: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 2, "seed": 1}
URI = "data:image/png;base64," + base64.b64encode(png()).decode()


@pytest.fixture
def app(image_app: FastAPI) -> FastAPI:
    return image_app


def chat(app: FastAPI, content: Any = "a hen", **fields: Any) -> Any:
    """The response to JSON with a field named `extra_body`."""
    body = {"messages": [{"role": "user", "content": content}], "extra_body": SMALL, **fields}
    return send(app, "POST", "/v1/chat/completions", json=body)


def pixels(part: dict[str, Any]) -> np.ndarray:
    assert part["type"] == "image_url"
    prefix, _, data = part["image_url"]["url"].partition(",")
    assert prefix == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).astype(float)


def test_an_answer_is_a_list_of_images(app: FastAPI) -> None:
    answer = chat(app, extra_body={**SMALL, "num_outputs_per_prompt": 2}).json()

    (choice,) = answer["choices"]
    assert (answer["object"], answer["model"], choice["finish_reason"]) == ("chat.completion", MODEL, "stop")
    message = choice["message"]
    assert (message["role"], message["content"], message["audio"]) == ("assistant", None, None)
    first, second = map(pixels, message["images"])
    assert first.shape == (32, 32, 3) and np.abs(first - second).max() > 0
    assert answer["usage"]["total_tokens"] == 0


def test_n_is_the_number_of_choices_and_settings_may_be_at_the_top_level(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> Any:
        messages: Any = [{"role": "user", "content": "a hen"}]
        return await client.chat.completions.create(model=MODEL, messages=messages, n=2, extra_body=SMALL)

    answer = use(app, main)
    both = chat(app, extra_body={**SMALL, "num_outputs_per_prompt": 2}).json()["choices"][0]["message"]["images"]

    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice, part in zip(answer.choices, both, strict=True):
        np.testing.assert_array_equal(pixels(choice.message.images[0]), pixels(part))


def test_only_the_last_message_is_read(app: FastAPI) -> None:
    parts = [{"type": "text", "text": "a hen"}, {"type": "image_url", "image_url": {"url": URI}}]
    earlier = [{"role": "user", "content": "a boat"}, {"role": "assistant", "content": "..."}]

    alone = chat(app, parts).json()["choices"][0]["message"]["images"]
    later = chat(app, messages=[*earlier, {"role": "user", "content": parts}])
    without_image = chat(app).json()["choices"][0]["message"]["images"]

    np.testing.assert_array_equal(pixels(alone[0]), pixels(later.json()["choices"][0]["message"]["images"][0]))
    assert np.abs(pixels(alone[0]) - pixels(without_image[0])).max() > 0


def test_what_chat_clients_always_send_has_no_effect(app: FastAPI) -> None:
    user = {"role": "user", "content": [{"type": "text", "text": "a hen"}]}
    fields: dict[str, Any] = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."}, user],
        "modalities": ["image", "text"],
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "temperature": 0.7,
        "logprobs": False,
        "stop": None,
        "audio": None,
    }

    answer = chat(app, **fields)

    assert answer.status_code == 200, answer.text
    plain = chat(app).json()["choices"][0]["message"]["images"]
    np.testing.assert_array_equal(pixels(answer.json()["choices"][0]["message"]["images"][0]), pixels(plain[0]))


def test_an_image_may_have_a_detail(app: FastAPI) -> None:
    for detail in (None, "high"):
        parts = [{"type": "text", "text": "a hen"}, {"type": "image_url", "image_url": {"url": URI, "detail": detail}}]
        assert chat(app, parts).status_code == 200


def test_a_part_with_a_name_is_that_medium_of_the_pipeline(app: FastAPI) -> None:
    mask = {"type": "image_url", "image_url": {"url": URI}, "name": "mask_image"}
    parts = [{"type": "text", "text": "at night"}, {"type": "image_url", "image_url": {"url": URI}}]
    whole, masked = (chat(app, [*parts, *more], strength=1.0).json() for more in ([], [mask]))
    images = [pixels(answer["choices"][0]["message"]["images"][0]) for answer in (whole, masked)]
    assert np.abs(images[0] - images[1]).max() > 1
    video = {"type": "video_url", "video_url": {"url": URI}}
    refused = chat(app, [*parts, video])
    assert refused.status_code == 400 and "ZImagePipeline takes no 'video'" in refused.text, refused.text


def test_sampling_params_list_names_the_same_settings(app: FastAPI) -> None:
    one = chat(app, extra_body=None, sampling_params_list=[SMALL]).json()["choices"][0]["message"]["images"]
    other = chat(app).json()["choices"][0]["message"]["images"]
    np.testing.assert_array_equal(pixels(one[0]), pixels(other[0]))


def test_a_stream_has_comments_for_steps_and_ends_with_the_image(app: FastAPI) -> None:
    answer = chat(app, stream=True, stream_options={"include_usage": True})

    lines = [line for line in answer.text.split("\n\n") if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert lines[:2] == [": output 0, step 1 of 2", ": output 0, step 2 of 2"]
    assert lines[-1] == "data: [DONE]"
    image, end, usage = (json.loads(line.removeprefix("data: ")) for line in lines[2:-1])
    whole = chat(app).json()["choices"][0]["message"]["images"]
    assert image["choices"][0]["delta"]["role"] == "assistant"
    np.testing.assert_array_equal(pixels(image["choices"][0]["delta"]["images"][0]), pixels(whole[0]))
    assert end["choices"][0]["finish_reason"] == "stop" and usage["choices"] == [] and usage["usage"]


def test_the_client_reads_the_stream(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> list[Any]:
        messages: Any = [{"role": "user", "content": "a hen"}]
        stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True, extra_body=SMALL)
        return [chunk async for chunk in stream]

    chunks = use(app, main)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"]
    assert pixels(chunks[0].choices[0].delta.images[0]).shape == (32, 32, 3)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"modalities": ["audio"]}, "modalities", "cannot output 'audio'; it outputs image"),
        ({"modalities": []}, "modalities", "image"),
        ({"audio": {"format": "wav"}}, "audio", "makes no sound"),
        ({"messages": []}, "messages", "last message must be the user's"),
        ({"messages": [{"role": "system", "content": "Be brief."}]}, "messages", "the user's"),
        ({"modalities": ["text"]}, "modalities", "cannot output 'text'"),
        ({"modalities": ["image", "audio"]}, "modalities", "cannot output 'audio'"),
        ({"tools": [TOOL]}, "tools", "models that write"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "the user's"),
        ({"content": [{"type": "video_url", "video_url": {"url": URI}}]}, "messages", "takes no 'video' (it takes"),
        ({"content": [{"type": "input_audio", "input_audio": {"data": "AAAA"}}]}, "messages", "takes no 'audio'"),
        ({"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}, None, "image"),
        ({"content": " "}, None, "prompt is empty"),
        ({"content": [{"type": "text"}]}, None, "text"),
        ({"content": [{"type": "image_url"}]}, None, "image_url"),
        ({"content": [{"type": "image_url", "image_url": {"url": 5}}]}, None, "url"),
        ({"content": [7]}, None, ""),
        ({"content": None}, None, ""),
        ({"n": 0}, "n", "at least 1"),
        ({"n": 17}, None, "max_outputs"),
        ({"extra_body": {"heigth": 32}}, "extra_body.heigth", "did you mean 'height'"),
        ({"extra_body": {"height": 33}}, None, "height 33"),
        ({"sampling_params_list": []}, "sampling_params_list", "one entry for each"),
        ({"sampling_params_list": [{"seeed": 1}]}, "sampling_params_list[0].seeed", "did you mean 'seed'"),
        ({"logprobs": True}, "logprobs", "models that write"),
        ({"response_format": {"type": "json_object"}}, "response_format", "models that write"),
    ],
)
def test_unsupported_fields_are_refused(app: FastAPI, fields: dict[str, Any], param: str | None, words: str) -> None:
    for stream in (False, True):
        answer = chat(app, stream=stream, **fields)
        error = answer.json()["error"]
        assert answer.status_code == 400 and words in error["message"], error
        assert param is None or error["param"] == param


def test_another_model_is_not_found(app: FastAPI) -> None:
    assert chat(app, model="gpt-4o").status_code == 404


class FakeAudioClient:
    """An engine client whose pipeline returns two clips of stereo audio at once."""

    def __init__(self, model: str) -> None:
        stage = {"stage_id": 0, "engine_type": "DiT", "final_output": True, "final_output_type": "audio"}
        self.config = parse_pipeline_config({"stage_args": [stage]}, model)
        self.voices = Voices([], {})

    def check_admission(self) -> None:
        pass

    async def run(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncGenerator[OmniEvent, None]:
        self.media = prompt.pop("multi_modal_data", {})
        assert prompt == {"prompt": "rain", "modalities": ["audio"]}
        assert params == [{"num_outputs_per_prompt": 2, "seed": 1}]
        clips = [torch.tensor([level, -level])[:, None].repeat(1, 4800) for level in (0.25, 0.5)]
        tensors, data = encode_outputs("audio", clips, DiffusionSamplingParams(), 48000)
        output = StageOutput(request_id="r", stage_id=0, tensors=tensors, data=data)
        outputs = [OmniRequestOutput("r", output, "audio", [])]
        yield CompletedEvent(request_id=request_id, sequence=0, ts=0.0, outputs=outputs)


@pytest.fixture
def audio_chat(tmp_path: Path) -> LastMessageChat:
    model = write_index(tmp_path, "AceStepPipeline")
    client: Any = FakeAudioClient(model)
    state = State({"openai_serving_models": DiffusionModels(client, [BaseModelPath(MODEL, model)])})
    return make_chat(client, state, server_args(tmp_path))


def audio_request(*parts: dict[str, Any], **fields: Any) -> OmniChatCompletionRequest:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "rain"}, *parts]}]
    return OmniChatCompletionRequest(messages=messages, n=2, extra_body={"seed": 1}, **fields)


def test_audio_is_a_file_for_each_choice(audio_chat: LastMessageChat) -> None:
    answer: Any = asyncio.run(audio_chat.create_chat_completion(audio_request(modalities=["audio"])))

    for choice, level in zip(answer.choices, (0.25, 0.5), strict=True):
        assert choice.message.content is None and choice.message.audio.transcript == ""
        with wave.open(io.BytesIO(base64.b64decode(choice.message.audio.data))) as file:
            assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (48000, 2, 4800)
            frames = np.frombuffer(file.readframes(4800), "<i2").reshape(-1, 2) / 32768
            np.testing.assert_allclose(frames, [[level, -level]] * 4800, atol=1e-4)


def test_a_sound_is_an_input_by_its_name(audio_chat: LastMessageChat) -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 8000, 0, "NONE", ""))
        writer.writeframes(np.full(4000, 1 << 14, "<i2").tobytes())
    data = base64.b64encode(file.getvalue()).decode()
    audio = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    address = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}}
    client: Any = audio_chat.client
    for part in (audio, address):
        asyncio.run(audio_chat.create_chat_completion(audio_request({**part, "name": "src_audio"})))
        samples, rate = client.media["src_audio"]
        assert rate == 8000 and samples.tolist() == [0.5] * 4000
    with pytest.raises(VLLMValidationError, match=r"takes no 'audio'.*src_audio, reference_audio"):
        asyncio.run(audio_chat.create_chat_completion(audio_request(audio)))
    two = [{**address, "name": "src_audio"}] * 2
    with pytest.raises(VLLMValidationError, match="src_audio is one sound"):
        asyncio.run(audio_chat.create_chat_completion(audio_request(*two)))


def test_audio_is_streamed_in_the_requested_format(audio_chat: LastMessageChat) -> None:
    async def main() -> list[bytes]:
        stream: Any = await audio_chat.create_chat_completion(audio_request(stream=True, audio={"format": "flac"}))
        return [line async for line in stream]

    chunks = [json.loads(line.removeprefix(b"data: ")) for line in asyncio.run(main())[:-1]]
    sounds = [chunk["choices"][0]["delta"]["audio"] for chunk in chunks[::2]]
    assert [base64.b64decode(sound["data"])[:4] for sound in sounds] == [b"fLaC"] * 2
    assert sounds[0]["id"] != sounds[1]["id"]


def test_a_model_without_voices_accepts_openais(audio_chat: LastMessageChat) -> None:
    """OpenAI's client requires a voice."""
    for voice in ("alloy", {"id": "coral"}):
        asyncio.run(audio_chat.create_chat_completion(audio_request(audio={"format": "wav", "voice": voice})))
    with pytest.raises(VLLMValidationError, match="unknown voice 'ethan'; there are default, alloy"):
        asyncio.run(audio_chat.create_chat_completion(audio_request(audio={"voice": "ethan"})))
