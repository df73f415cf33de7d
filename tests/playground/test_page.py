# SPDX-License-Identifier: Apache-2.0
"""The page without a browser: what it offers, what it sends, and what it says of errors."""

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import httpx2
import openai
import pytest
from fastapi import FastAPI

gr = pytest.importorskip("gradio", reason="needs Gradio (extra `test`)")

from vllm_omni.errors import UsageError  # noqa: E402
from vllm_omni_playground.chat_tab import (  # noqa: E402
    STOPPED,
    ChatAnswer,
    ChatState,
    ChatTab,
    _show_heard,
    _stop,
)
from vllm_omni_playground.client import Description, Server, Stage  # noqa: E402
from vllm_omni_playground.command import make_app  # noqa: E402
from vllm_omni_playground.examples import questions  # noqa: E402
from vllm_omni_playground.last_request import LastRequest  # noqa: E402
from vllm_omni_playground.live_sound import MEDIA_TYPES, LiveSounds  # noqa: E402
from vllm_omni_playground.page import add_page, heading, make_page, read_auth  # noqa: E402
from vllm_omni_playground.realtime_relay import RealtimeRelay  # noqa: E402
from vllm_omni_playground.sampling import SamplingFields  # noqa: E402
from vllm_omni_playground.stages_tab import (  # noqa: E402
    Snapshot,
    cards_of,
    duration,
    figures,
    load,
    read_stages,
    timeline_of,
    times_so_far,
)

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


@pytest.mark.parametrize("url", ["localhost:8000", "http://localhost:8000/", "http://localhost:8000/v1"])
def test_an_address_needs_no_scheme(url: str) -> None:
    assert Server(url).url == "http://localhost:8000"


def test_a_server_may_describe_more_than_the_page_knows() -> None:
    answer = asdict(OMNI)
    answer["stages"] = [{**stage, "later": 1} for stage in answer["stages"]]
    assert Description.read({**answer, "later": 1}) == OMNI


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


@pytest.mark.parametrize("root_path", ["", "/omni"])
def test_addresses_are_below_the_path_of_a_proxy_that_names_its_host(root_path: str) -> None:
    app = add_page(FastAPI(root_path=root_path), SERVER, IMAGES, "/playground/", root_path=root_path)

    async def main() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://server") as client:
            return await client.get(f"{root_path}/playground/logout", headers={"x-forwarded-host": "proxy"})

    assert asyncio.run(main()).headers["location"] == f"http://proxy{root_path}/playground"


@pytest.mark.parametrize("path", ["/omni/logout", "/logout"])
def test_a_proxy_of_the_page_alone_may_remove_its_path_or_leave_it(path: str) -> None:
    app = make_app(SERVER, IMAGES, None, "/omni")

    async def main() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://server") as client:
            return await client.get(path, headers={"x-forwarded-host": "proxy"})

    assert asyncio.run(main()).headers["location"] == "http://proxy/omni"


def test_the_heading_says_what_the_model_does() -> None:
    text = heading(replace(OMNI, model="a<b>"))
    assert "<h1>a&lt;b&gt;</h1>" in text and "Reads text, images, audio. Makes text, audio." in text
    assert "Stages: thinker (AR) · talker (AR) · vocoder (generation)" in text
    assert "Stage: painter (DiT)" in heading(IMAGES)


@pytest.mark.parametrize(
    ("inputs", "outputs", "num_pictures", "last"),
    [
        (["text", "image", "audio"], ["text", "audio"], 2, "Say: a red circle."),
        (["text", "image"], ["text", "image"], 2, "Draw a red circle left of a blue square."),
        (["text", "audio"], ["text", "audio"], 0, "Count from one to ten."),
        (["text"], ["text"], 0, "Tell me a very short story."),
    ],
)
def test_a_chat_has_three_examples_of_what_the_model_can(
    inputs: list[str], outputs: list[str], num_pictures: int, last: str, tmp_path: Path
) -> None:
    examples = questions(replace(OMNI, inputs=inputs, outputs=outputs), str(tmp_path))
    assert len(examples) == 3 and examples[-1]["text"] == last
    assert sum(len(example["files"]) for example in examples) == num_pictures


def test_stop_is_disabled_where_nothing_runs() -> None:
    for description, number in ((OMNI, 3), (IMAGES, 1)):
        stops = [part["props"] for part in components(description) if part["props"].get("value") in ("Stop", "Hang up")]
        assert [stop["interactive"] for stop in stops] == [False] * number


def delta(text: str | None = None, sound: str | None = None) -> SimpleNamespace:
    audio = SimpleNamespace(data=sound, transcript=None) if sound else None
    return SimpleNamespace(content=text, audio=audio)


def test_a_stopped_answer_is_marked_and_the_model_does_not_read_the_mark(tmp_path: Path) -> None:
    conversation = ChatState()
    conversation.ask("Why?", [])
    answer = conversation.answer = ChatAnswer(conversation, LiveSounds(), str(tmp_path))
    was_answering = conversation.is_answering
    answer.add(delta("Because", "AAAA"))
    heard = _stop(conversation)
    assert (was_answering, conversation.is_answering) == (True, False) and heard == (conversation.shown, "")
    assert conversation.messages[-1] == {"role": "assistant", "content": "Because"}
    _, text, mark, sound = (entry["content"] for entry in conversation.shown)
    assert (text, mark) == ("Because", STOPPED) and Path(sound["path"]).read_bytes() == bytes(3)
    answer.stop()
    _stop(conversation)
    assert len(conversation.shown) == 4
    conversation.ask("And then?", [])
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "user"]


def test_a_complete_answer_is_not_marked_and_its_sound_has_one_place(tmp_path: Path) -> None:
    conversation = ChatState()
    conversation.ask("Why?", [])
    answer = conversation.answer = ChatAnswer(conversation, LiveSounds(), str(tmp_path))
    answer.add(delta("Because.", "AAAA"))
    assert _show_heard(conversation)[0] is not conversation.shown  # It still arrives.
    answer.finish()
    assert [entry["content"] for entry in conversation.shown] == ["Why?", "Because."]  # The player has the sound.
    for _ in range(2):
        assert _show_heard(conversation) == (conversation.shown, "")
        assert len(conversation.shown) == 3


def test_a_file_that_the_model_does_not_read_is_refused_with_its_message(tmp_path: Path) -> None:
    (box,) = [part["props"] for part in components(OMNI) if part["type"] == "multimodaltextbox"]
    assert "file_types" not in box and box["sources"] == ["upload", "microphone"]
    with gr.Blocks():
        tab = ChatTab(SERVER, OMNI, LiveSounds(), gr.State(LastRequest()))
    conversation = ChatState()

    async def send(file: str) -> None:
        message = {"text": "What is it?", "files": [str(tmp_path / file)]}
        async for _ in tab._respond(message, conversation, LastRequest(), ["text"], "ada", "", False, *[""] * 12):
            pass

    with pytest.raises(gr.Error, match=r"does not read files of this kind: notes\.pdf"):
        asyncio.run(send("notes.pdf"))
    assert not conversation.messages and not conversation.shown and not conversation.is_answering


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
        tab = ChatTab(SERVER, OMNI, LiveSounds(), gr.State(LastRequest()))
    conversation = ChatState()
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
        assert {sounds.start(name).format for name in MEDIA_TYPES} == set(MEDIA_TYPES)

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


NAMES = (
    "num_requests_waiting", "num_requests_running", "stage_completed_total", "stage_steps_total",
    "stage_step_seconds_total", "stage_scheduled_total", "kv_blocks_used", "kv_blocks",
)  # fmt: skip


def snapshot(time: float, *values: float, stage: str = "talker") -> Snapshot:
    return Snapshot(time, {stage: dict(zip(NAMES, values, strict=True))})


def test_rates_are_those_since_a_snapshot_before() -> None:
    before = snapshot(10.0, 0, 0, 0, 100, 0, 0, 0, 0)
    now = snapshot(12.0, 1, 2, 4, 140, 0.2, 80, 3, 16)
    assert figures("talker", now, before) == {
        "running": "2", "waiting": "1", "requests/s": "2.0", "steps/s": "20.0", "step": "5.0 ms", "batch": "2.0",
        "KV blocks": "3 of 16",
    }  # fmt: skip
    restarted = figures("talker", replace(before, time=13.0), now)
    assert (restarted["steps/s"], restarted["step"]) == ("0.0", "-") and "KV blocks" not in restarted
    assert figures("thinker", now, before) == {}


def test_a_duration_has_the_unit_that_fits() -> None:
    assert [duration(seconds) for seconds in (0.0042, 0.31, 1.6169)] == ["4.2 ms", "310 ms", "1.62 s"]


def test_the_load_is_the_time_in_steps_and_a_long_step_counts() -> None:
    idle, running = snapshot(0.0, *[0] * 8), snapshot(2.0, 0, 1, 0, 0, 0, 0, 0, 0)
    stepped = snapshot(4.0, 0, 0, 0, 4, 1.0, 0, 0, 0)
    assert load("talker", running, idle) == 1 and load("talker", idle, idle) == 0
    assert load("talker", stepped, running) == 0.5 and load("thinker", stepped, running) == 0
    cards = cards_of({"talker": "ready", "<a>": "starting"}, [idle, running, stepped])
    assert cards.count('class="card"') == 2 and "&lt;a&gt;" in cards and 'data-status="starting"' in cards
    assert 'points="26.00,1 26.00,0.00 28.00,0.00 28.00,0.50 30.00,0.50 30,1"' in cards


def test_a_timeline_has_bars_durations_and_an_axis() -> None:
    stage = {"name": "<a>", "arrival": 0.0, "started": 0.5, "first_output": None, "finished": 2.0}
    picture = timeline_of([stage, {**stage, "name": "b", "arrival": 0.25, "first_output": 1.0}])
    assert picture.count('<i style="left') == 6 and "&lt;a&gt;" in picture and "working: 1.00 s" in picture
    assert "<span>2.00 s</span>" in picture and "<span>1.75 s</span>" in picture
    assert [f'left: {25 * index}.0%">{index / 2:g} s<' in picture for index in range(5)] == [True] * 5


def test_a_running_request_is_seen_in_the_stages_that_work() -> None:
    history = [snapshot(time, 0, busy, *[0] * 6) for time, busy in ((8, 1), (10, 0), (11, 1), (12, 1), (13, 0))]
    (seen,) = times_so_far(history, since=9.0)
    assert seen == {"name": "talker", "arrival": 2, "started": 2, "first_output": 2, "finished": 3}
    assert timeline_of(times_so_far(history, since=9.0)).count("working: 1.00 s") == 1
    assert "started" in timeline_of(times_so_far(history, since=14.0))


def test_the_last_request_runs_until_it_has_ended_or_another_one_begins() -> None:
    last = LastRequest()
    with last.running("speech-1"):
        assert (last.id, last.is_running) == ("speech-1", True)
    assert not last.is_running
    first, second = last.running("chatcmpl-1"), last.running("chatcmpl-2")
    with first:
        second.__enter__()
    assert (last.id, last.is_running) == ("chatcmpl-2", True)
    second.__exit__(None, None, None)
    assert (last.id, last.is_running) == ("chatcmpl-2", False)
