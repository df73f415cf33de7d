# SPDX-License-Identifier: Apache-2.0
"""The page without a browser: what it offers, what it sends, and what it says of errors."""

import asyncio
import json
from dataclasses import replace

import httpx2
import openai
import pytest

gr = pytest.importorskip("gradio", reason="needs Gradio (extra `test`)")

from vllm_omni.entrypoints.playground.chat_tab import ChatTab, Conversation  # noqa: E402
from vllm_omni.entrypoints.playground.client import Description, Server, Stage  # noqa: E402
from vllm_omni.entrypoints.playground.live_sound import LiveSounds  # noqa: E402
from vllm_omni.entrypoints.playground.page import make_page, read_auth  # noqa: E402
from vllm_omni.entrypoints.playground.realtime_relay import RealtimeRelay  # noqa: E402
from vllm_omni.entrypoints.playground.sampling import SamplingFields  # noqa: E402
from vllm_omni.entrypoints.playground.stages_tab import HEADERS, Snapshot, read_stages, table_row, timeline_of  # noqa: E402
from vllm_omni.errors import UsageError  # noqa: E402

THINKER = Stage("thinker", "AR", "text", {"temperature": 0.5, "max_tokens": 128})
TALKER = Stage("talker", "AR", None, {})
VOCODER = Stage("vocoder", "generation", "audio", {})
PAINTER = Stage("painter", "DiT", "image", {"num_inference_steps": 20, "height": None})
OMNI = Description(
    model="omni",
    inputs=["text", "image", "audio"],
    outputs=["text", "audio"],
    endpoints=["/v1/chat/completions", "/v1/audio/speech", "/v1/realtime"],
    speech_fields=[],
    voices=["ada", "ben"],
    stages=[THINKER, TALKER, VOCODER],
)
IMAGES = Description(
    model="images",
    inputs=["text"],
    outputs=["image"],
    endpoints=["/v1/chat/completions", "/v1/images/generations"],
    speech_fields=[],
    voices=[],
    stages=[PAINTER],
)
SERVER = Server("http://localhost:1/v1/", "secret")


def components(description: Description) -> list[dict]:
    return make_page(SERVER, description, LiveSounds(), RealtimeRelay(SERVER)).config["components"]


@pytest.mark.parametrize(
    ("description", "tabs"),
    [
        (OMNI, ["Chat", "Realtime", "Speech", "Stages"]),
        (replace(OMNI, inputs=["text", "image"]), ["Chat", "Speech", "Stages"]),
        (IMAGES, ["Images", "Stages"]),
    ],
)
def test_has_a_tab_for_each_thing_that_the_model_does(description: Description, tabs: list[str]) -> None:
    assert [part["props"]["label"] for part in components(description) if part["type"] == "tabitem"] == tabs


def test_takes_the_files_that_the_model_reads() -> None:
    (box,) = [part["props"] for part in components(OMNI) if part["type"] == "multimodaltextbox"]
    assert box["file_types"] == ["image", "audio"] and box["sources"] == ["upload", "microphone"]


def test_nothing_of_the_key_is_in_the_page() -> None:
    assert "secret" not in json.dumps(components(OMNI), default=str)
    assert SERVER.url == "http://localhost:1"


def test_sends_only_the_sampling_that_was_changed() -> None:
    with gr.Blocks():
        fields = SamplingFields(OMNI)
    labels = [component.label for component in fields.components]
    values = [component.value for component in fields.components]
    assert labels[:2] == ["temperature", "top_p"] and len(labels) == 12 and values[0] == "0.5"
    assert fields.as_list(values) is None
    values[0], values[labels.index("seed", 6)] = "0.25", "7"
    assert fields.as_list(values) == [{"temperature": 0.25}, {"seed": 7}, None]
    values[labels.index("max_tokens")] = "many"
    with pytest.raises(gr.Error, match="max_tokens must be a whole number, not 'many'"):
        fields.as_list(values)


def test_a_chat_asks_for_the_outputs_and_the_voice_that_were_chosen() -> None:
    with gr.Blocks():
        tab = ChatTab(SERVER, OMNI, LiveSounds())
    conversation = Conversation()
    conversation.ask("Why?", [])
    spoken = tab._request(conversation, ["text", "audio"], "ben", "Be kind.", False, None)
    assert spoken["modalities"] == ["text", "audio"] and spoken["audio"] == {"format": "mp3", "voice": "ben"}
    assert [message["role"] for message in spoken["messages"]] == ["system", "user"]
    written = tab._request(conversation, ["text"], "ben", "", False, [{"seed": 7}, None, None])
    assert "audio" not in written and written["extra_body"] == {"sampling_params_list": [{"seed": 7}, None, None]}


def test_a_diffusion_stage_has_the_settings_of_its_pipeline() -> None:
    with gr.Blocks():
        fields = SamplingFields(IMAGES)
    assert [component.label for component in fields.components] == ["num_inference_steps", "height", "seed"]


def failure(status: int, body: object) -> openai.APIStatusError:
    response = httpx2.Response(status, json=body, request=httpx2.Request("POST", "http://server"))
    return openai.APIStatusError("raw", response=response, body=body)  # type: ignore[arg-type]


def test_errors_are_what_the_server_said() -> None:
    body = {"error": {"message": "n must be at least 1", "code": 400}}
    assert SERVER.explain(failure(400, body)) == "The server answered 400: n must be at least 1"
    assert SERVER.explain(failure(400, body["error"])) == "The server answered 400: n must be at least 1"
    assert "does not answer" in SERVER.explain(httpx2.ConnectError("refused"))
    assert "does not answer" in SERVER.explain(httpx2.RemoteProtocolError("incomplete"))
    assert "too long" in SERVER.explain(httpx2.ReadTimeout("late"))


def test_an_address_without_a_server_is_an_error_of_the_command_line() -> None:
    with pytest.raises(UsageError, match="no vllm-omni server answers at http://localhost:1"):
        SERVER.describe()


@pytest.mark.parametrize("text", ["name", ":password", "name:"])
def test_a_login_needs_a_name_and_a_password(text: str) -> None:
    assert read_auth(None) is None and read_auth("ann:a:b") == ("ann", "a:b")
    with pytest.raises(UsageError, match="NAME:PASSWORD"):
        read_auth(text)


def test_a_sound_is_read_while_it_grows_and_again_from_the_start() -> None:
    async def main() -> None:
        sounds = LiveSounds()
        sound = sounds.start()
        sound.add(b"one")
        reading = sound.read()
        assert await anext(reading) == b"one"
        waiting = asyncio.ensure_future(anext(reading))
        await asyncio.sleep(0)
        assert not waiting.done()
        sound.add(b"two")
        assert await waiting == b"two"
        sound.finish()
        assert [piece async for piece in reading] == []
        assert [piece async for piece in sound.read()] == [b"onetwo"] and sound.data == b"onetwo"

    asyncio.run(main())


METRICS = """
# TYPE vllm_omni:num_requests_waiting gauge
vllm_omni:num_requests_waiting{pipeline="0",replica="0",stage="talker"} 2.0
# TYPE vllm_omni:stage_steps_total counter
vllm_omni:stage_steps_total{pipeline="0",replica="0",stage="talker"} 10.0
vllm_omni:stage_steps_total{pipeline="0",replica="0",stage="vocoder"} 1.0
vllm_omni:stage_steps_total{pipeline="0",replica="1",stage="vocoder"} 3.0
# TYPE vllm_omni:edge_bytes_total counter
vllm_omni:edge_bytes_total{pipeline="0",replica="0",source="thinker",stage="talker"} 5.0
"""


def test_reads_the_metrics_of_stages_and_replicas() -> None:
    assert read_stages(METRICS) == {
        "talker": {"num_requests_waiting": 2.0, "stage_steps_total": 10.0},
        "vocoder.0": {"stage_steps_total": 1.0},
        "vocoder.1": {"stage_steps_total": 3.0},
    }


def test_rates_are_those_since_the_last_look() -> None:
    names = (
        "num_requests_waiting", "num_requests_running", "stage_completed_total", "stage_steps_total",
        "stage_step_seconds_total", "stage_scheduled_total", "kv_blocks_used", "kv_blocks",
    )  # fmt: skip
    before = Snapshot(10.0, {"talker": dict.fromkeys(names, 0.0) | {"stage_steps_total": 100.0}})
    values = dict(zip(names, (1.0, 2.0, 4.0, 140.0, 0.2, 80.0, 3.0, 16.0), strict=True))
    row = table_row("talker", "ready", Snapshot(12.0, {"talker": values}), before)
    assert dict(zip(HEADERS, row, strict=True)) == {
        "stage": "talker", "state": "ready", "waiting": 1, "running": 2, "requests/s": 2.0, "steps/s": 20.0,
        "ms/step": 5.0, "batch": 2.0, "KV blocks": "3 of 16",
    }  # fmt: skip
    restarted = table_row("talker", "ready", Snapshot(13.0, before.stages), Snapshot(12.0, {"talker": values}))
    assert restarted[HEADERS.index("steps/s")] == 0


def test_a_timeline_has_a_bar_for_each_stage() -> None:
    stage = {"name": "<a>", "arrival": 0.0, "started": 0.5, "first_output": None, "finished": 2.0}
    picture = timeline_of([stage, {**stage, "name": "b", "first_output": 1.0}])
    assert picture.count("<rect") == 6 and "&lt;a&gt;" in picture and "working: 1.000 s" in picture
