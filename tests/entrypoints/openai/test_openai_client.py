# SPDX-License-Identifier: Apache-2.0
"""The official OpenAI client, unmodified, with a server started as in the README: chat and completions.

Sampling is greedy unless a test sets it, so that requests can be compared. Images, speech and videos with the same
client: `tests/examples`.
"""

import asyncio
import base64
import functools
import http.server
import io
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import av
import numpy as np
import openai
import pytest
import torch

from tests.entrypoints.int16_sound import assert_sounds_like
from tests.servers import RunningServer
from vllm_omni.entrypoints.openai.audio_formats import encode_audio
from vllm_omni.media import encode_mp4
from vllm_omni.testing.media import SAMPLE_RATE, make_audio, make_image, make_video

GROUP = "server"
NUM_TOKENS, NUM_FRAMES = 12, 16
GREEDY = [
    {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True},
    {"temperature": 0.0, "max_tokens": NUM_FRAMES},
    None,
]
QUESTION = "Why is the sea blue?"


class Answer:
    """A chat answer, whole or from its chunks: `texts` and `audio` (bytes of a file) by the index of their choice.

    Nothing follows the finish reason of a choice.
    """

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.audio: dict[int, bytes] = {}
        self.transcript = ""
        self.audio_id = ""
        self.finish_reasons: dict[int, str | None] = {}
        self.usage: Any = None

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def speech(self) -> bytes:
        (speech,) = self.audio.values()
        return speech

    def add(self, index: int, message: Any, finish_reason: str | None) -> None:
        assert index not in self.finish_reasons
        if message.content:
            self.texts[index] = self.texts.get(index, "") + message.content
        if audio := message.audio:
            self.audio[index] = self.audio.get(index, b"") + base64.b64decode(audio.data or "")
            self.transcript += audio.transcript or ""
            self.audio_id += audio.id or ""
        if finish_reason:
            self.finish_reasons[index] = finish_reason


def chat(server: RunningServer, content: Any = QUESTION, *, stream: bool = False, **fields: Any) -> Answer:
    """One request for text and speech; `extra` are fields that the client does not have."""
    return read(server.openai().chat.completions.create(**_request(server, content, stream, fields)))


def _request(server: RunningServer, content: Any, stream: bool, fields: dict[str, Any]) -> dict[str, Any]:
    extra = {"sampling_params_list": GREEDY, **fields.pop("extra", {})}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return {
        "model": name_of(server.url),
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text", "audio"],
        "extra_body": extra,
        **fields,
    }


@functools.cache
def name_of(url: str) -> str:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none").models.list().data[0].id


def read(answer: Any) -> Answer:
    found = Answer()
    if isinstance(answer, openai.Stream):
        for chunk in answer:
            for choice in chunk.choices:
                found.add(choice.index, choice.delta, choice.finish_reason)
            found.usage = chunk.usage or found.usage
    else:
        for choice in answer.choices:
            found.add(choice.index, choice.message, choice.finish_reason)
        found.usage = answer.usage
    return found


def samples_of(data: bytes) -> np.ndarray:
    """int16 `[samples]` of any audio file."""
    with av.open(io.BytesIO(data)) as container:
        resampler = av.AudioResampler("s16", "mono", 24_000)
        frames = [frame for packet in container.decode(audio=0) for frame in resampler.resample(packet)]
        frames += resampler.resample(None)
    return np.concatenate([frame.to_ndarray()[0] for frame in frames])


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_uri(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64_of(data)}"


def png() -> bytes:
    file = io.BytesIO()
    make_image(3).save(file, "PNG")
    return file.getvalue()


def audio_file(audio_format: str) -> bytes:
    return encode_audio(make_audio(3, 0.5), audio_format, SAMPLE_RATE)


def video_file() -> bytes:
    return encode_mp4(torch.from_numpy(make_video(3, frames=4)).float() / 255, 2.0)


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a web server with `image.png`."""
    folder = tmp_path_factory.mktemp("web")
    (folder / "image.png").write_bytes(png())

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def url_part(kind: str, url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def input_audio(audio_format: str) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64_of(audio_file(audio_format)), "format": audio_format}}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "image": lambda: url_part("image", data_uri("image/png", png())),
    "input_audio wav": lambda: input_audio("wav"),
    "input_audio mp3": lambda: input_audio("mp3"),
    "audio_url": lambda: url_part("audio", data_uri("audio/flac", audio_file("flac"))),
    "video_url": lambda: url_part("video", data_uri("video/mp4", video_file())),
}
TEXT = {"type": "text", "text": QUESTION}


@pytest.mark.parametrize("kind", ["text", *PARTS])
def test_a_stream_equals_the_whole_answer_for_every_kind_of_input(omni_server: RunningServer, kind: str) -> None:
    content = [TEXT] if kind == "text" else [PARTS[kind](), TEXT]
    whole = chat(omni_server, content)
    streamed = chat(omni_server, content, stream=True)
    assert streamed.texts == whole.texts == {0: whole.transcript} and streamed.transcript == whole.transcript
    assert_sounds_like(streamed.speech, samples_of(whole.speech))
    assert streamed.finish_reasons == whole.finish_reasons == {0: "length"}
    assert streamed.usage.model_dump(exclude_none=True) == whole.usage.model_dump(exclude_none=True)

    usage = whole.usage
    assert usage.completion_tokens_details.audio_tokens == NUM_FRAMES
    assert usage.completion_tokens == NUM_TOKENS + NUM_FRAMES
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    audio_tokens = usage.prompt_tokens_details and usage.prompt_tokens_details.audio_tokens
    assert bool(audio_tokens) == ("audio" in kind)


def test_the_model_reads_images_and_audio(omni_server: RunningServer, web: str) -> None:
    """The same media gives the same answer in every lossless form, other media another one."""
    ways = {
        "png": PARTS["image"](),
        "http": url_part("image", f"{web}/image.png"),
        "wav": PARTS["input_audio wav"](),
        "flac": PARTS["audio_url"](),
    }
    answers = {name: chat(omni_server, [part, TEXT], modalities=["text"]).text for name, part in ways.items()}
    assert answers["png"] == answers["http"]
    assert answers["wav"] == answers["flac"]
    assert len({answers["png"], answers["wav"], chat(omni_server, modalities=["text"]).text}) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_without_modalities_the_answer_is_text(omni_server: RunningServer, stream: bool) -> None:
    answer = chat(omni_server, stream=stream, modalities=openai.omit)
    assert (list(answer.texts), answer.audio, answer.transcript) == ([0], {}, "")
    assert answer.usage.completion_tokens == NUM_TOKENS


def test_finish_reasons(omni_server: RunningServer) -> None:
    """The finish reason of cut speech is length, even if its text is complete."""
    text = {"temperature": 0.0, "stop": chat(omni_server, modalities=["text"]).text[-1], "max_tokens": NUM_TOKENS}
    for stream in (False, True):
        cut = chat(omni_server, stream=stream, extra={"sampling_params_list": [text, {"max_tokens": 3}, None]})
        assert cut.finish_reasons == {0: "length"}
        written = chat(
            omni_server, stream=stream, modalities=["text"], extra={"sampling_params_list": [text, None, None]}
        )
        assert written.finish_reasons == {0: "stop"}


@pytest.mark.parametrize("stream", [False, True])
def test_modalities_choose_the_outputs(omni_server: RunningServer, stream: bool) -> None:
    both = chat(omni_server, stream=stream, modalities=["text", "audio"])
    assert (list(both.texts), list(both.audio)) == ([0], [0])
    written = chat(omni_server, stream=stream, modalities=["text"])
    assert (written.texts, written.audio) == (both.texts, {})
    assert written.usage.completion_tokens == NUM_TOKENS
    spoken = chat(omni_server, stream=stream, modalities=["audio"])
    assert (spoken.texts, list(spoken.audio)) == ({}, [0])
    assert spoken.transcript == both.text
    assert_sounds_like(spoken.speech, both.speech)


@pytest.fixture(scope="module")
def exact(omni_server: RunningServer) -> np.ndarray:
    """The speech in no format."""
    return np.frombuffer(chat(omni_server, stream=True, modalities=["audio"]).speech, "<i2")


@pytest.mark.parametrize("audio_format", ["wav", "mp3", "flac", "opus", "aac", "pcm16"])
def test_every_format_of_speech(omni_server: RunningServer, exact: np.ndarray, audio_format: str) -> None:
    for stream in (False, True):
        answer = chat(omni_server, stream=stream, modalities=["audio"], audio={"format": audio_format})
        is_raw = audio_format == "pcm16"
        decoded = np.frombuffer(answer.speech, "<i2") if is_raw else samples_of(answer.speech)
        if audio_format in ("wav", "flac", "pcm16"):
            assert_sounds_like(decoded, exact)
        else:
            assert abs(len(decoded) - len(exact)) < 0.2 * 24_000
            rms = [np.sqrt((wave.astype(float) ** 2).mean()) for wave in (decoded, exact)]
            assert rms[0] == pytest.approx(rms[1], rel=0.3)


def test_voices(omni_server: RunningServer) -> None:
    names = [voice["id"] for voice in omni_server.openai().get("/audio/voices", cast_to=dict)["voices"]]
    answers = {
        name: chat(omni_server, modalities=["audio"], audio={"format": "pcm16", "voice": name}) for name in names
    }
    assert len({answer.speech for answer in answers.values()}) == len(names) == 3
    assert len({answer.transcript for answer in answers.values()}) == 1
    default = chat(omni_server, modalities=["audio"], audio={"format": "pcm16"})
    assert_sounds_like(default.speech, answers[names[0]].speech)
    by_id = chat(omni_server, modalities=["audio"], audio={"format": "pcm16", "voice": {"id": names[1].title()}})
    assert_sounds_like(by_id.speech, answers[names[1]].speech)
    of_openai = chat(omni_server, modalities=["audio"], audio={"format": "pcm16", "voice": "ash"})
    assert_sounds_like(of_openai.speech, answers[names[1]].speech)


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_are_choices(omni_server: RunningServer, stream: bool) -> None:
    sampling = [{"max_tokens": NUM_TOKENS, "ignore_eos": True}, *GREEDY[1:]]
    fields: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 1.0, "extra": {"sampling_params_list": sampling}}
    answer = chat(omni_server, stream=stream, **fields)
    assert sorted(answer.texts) == [0, 1, 2]
    assert list(answer.audio) == [0] and answer.transcript == answer.texts[0]
    assert len(set(answer.texts.values())) == 3
    assert answer.finish_reasons == dict.fromkeys(range(3), "length")
    assert answer.texts == chat(omni_server, stream=not stream, **fields).texts


# Random weights write much white space between the words of JSON.
LOOSE = {"temperature": 1.0, "seed": 1, "max_tokens": 400, "modalities": ["text"]}


def test_structured_output(omni_server: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["calm", "wild"]}},
        "required": ["mood"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "sea", "schema": schema}}
    extra = {"sampling_params_list": None}
    answers = [
        chat(omni_server, stream=stream, response_format=wanted, extra=extra, **LOOSE) for stream in (False, True)
    ]
    assert answers[0].texts == answers[1].texts
    assert json.loads(answers[0].text)["mood"] in ("calm", "wild")


def test_a_tool_is_called(omni_server: RunningServer) -> None:
    parameters = {
        "type": "object",
        "properties": {"is_deep": {"type": "boolean"}},
        "required": ["is_deep"],
        "additionalProperties": False,
    }
    answer = omni_server.openai().chat.completions.create(
        model=name_of(omni_server.url),
        messages=[{"role": "user", "content": QUESTION}],
        tools=[{"type": "function", "function": {"name": "dive", "parameters": parameters, "strict": True}}],
        tool_choice={"type": "function", "function": {"name": "dive"}},
        **LOOSE,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "dive"
    assert set(json.loads(call.function.arguments)) == {"is_deep"}


def test_sampling_params_list_sets_each_stage(omni_server: RunningServer) -> None:
    def send(*stages: dict | None, **fields: Any) -> Any:
        return chat(omni_server, extra={"sampling_params_list": list(stages)}, **fields).usage

    long = {"max_tokens": 7, "ignore_eos": True, "temperature": 0.0}
    assert send(long, {"max_tokens": 3}, None).completion_tokens_details.audio_tokens == 3
    assert send(long, {"max_tokens": 3}, None).completion_tokens == 10
    # The client's own fields are those of the stage that writes the text, and win.
    assert send(long, {"max_tokens": 3}, None, max_completion_tokens=5).completion_tokens == 8
    # Default: the stage configuration's.
    assert send(long, None, None).completion_tokens_details.audio_tokens <= 64


def test_completions_and_models(omni_server: RunningServer) -> None:
    client, name = omni_server.openai(), name_of(omni_server.url)
    fields: Any = {"model": name, "max_tokens": 6, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(prompt=["The sea", "A hill"], **fields)
    assert whole.usage and whole.usage.completion_tokens == 12
    pieces: dict[int, str] = {0: "", 1: ""}
    for chunk in client.completions.create(prompt=["The sea", "A hill"], stream=True, **fields):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == {choice.index: choice.text for choice in whole.choices}
    with pytest.raises(openai.NotFoundError, match="`another` does not exist"):
        client.completions.create(model="another", prompt="The sea")
    with pytest.raises(openai.NotFoundError, match="`another` does not exist"):
        chat(omni_server, model="another")


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"modalities": ["image"]}, "modalities", "it outputs text, audio"),
    ({"modalities": []}, "modalities", "name some of text, audio"),
    ({"audio": {"format": "wav", "voice": "nobody"}}, "audio.voice", "ethan"),
    ({"audio": {"format": "midi"}}, "audio.format", "mp3"),
    ({"modalities": ["text"], "audio": {"format": "wav"}}, "audio", "add 'audio' to modalities"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "top_logprobs"),
    ({"extra": {"sampling_params_list": [{}]}}, "sampling_params_list", "thinker, talker, code2wav"),
    ({"extra": {"sampling_params_list": [{"temprature": 1}, None, None]}}, "sampling_params_list[0].temprature",
     "temperature"),
    ({"extra": {"extra_body": {"height": 64}}}, "extra_body", "diffusion"),
    ({"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}, "image_url", "image"),
    ({"max_tokens": 10**6}, "max_tokens", "max_model_len"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "words"), WRONG, ids=[param for _, param, _ in WRONG])
def test_errors_name_the_field(
    omni_server: RunningServer, fields: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(omni_server, stream=stream, **fields)
    assert (refused.value.param or "") == param
    assert words in refused.value.message


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_errors_of_unsupported_endpoints_list_the_outputs(omni_server: RunningServer) -> None:
    client = omni_server.openai()
    with pytest.raises(openai.BadRequestError, match="text, audio"):
        client.images.generate(prompt="A hen.")
    with pytest.raises(openai.BadRequestError, match="text, audio"):
        client.images.edit(prompt="A hen.", image=png())
    with pytest.raises(openai.BadRequestError, match="text, audio"):
        client.videos.create(prompt="A hen.")


def test_sixteen_concurrent_requests_get_their_own_answers(omni_server: RunningServer) -> None:
    questions = [f"{QUESTION} ({i})" for i in range(16)]

    async def send(client: openai.AsyncOpenAI, question: str, stream: bool) -> Answer:
        request = _request(omni_server, question, stream, {"audio": {"format": "pcm16"}})
        answer = await client.chat.completions.create(**request)
        if not stream:
            return read(answer)
        found = Answer()
        async for chunk in answer:
            for choice in chunk.choices:
                found.add(choice.index, choice.delta, choice.finish_reason)
        return found

    async def ask_all() -> list[Answer]:
        async with omni_server.async_openai() as client:
            return await asyncio.gather(*(send(client, q, i % 2 == 0) for i, q in enumerate(questions)))

    together = asyncio.run(ask_all())
    assert len({answer.speech for answer in together}) == 16
    for i in (0, 5, 10, 15):
        alone = chat(omni_server, questions[i], audio={"format": "pcm16"})
        assert together[i].texts == alone.texts
        both = [np.frombuffer(answer.speech, "<i2").astype(int) for answer in (together[i], alone)]
        assert len(both[0]) == len(both[1])
        assert np.abs(both[0] - both[1]).max() <= 2  # A batch changes the rounding of sums.


@pytest.mark.parametrize("stream", [False, True])
def test_a_later_turn_refers_to_earlier_speech_by_id(omni_server: RunningServer, stream: bool) -> None:
    def follow(message: dict[str, Any]) -> str:
        turns = [{"role": "user", "content": QUESTION}, message, {"role": "user", "content": "Why do you say so?"}]
        return chat(omni_server, messages=turns, modalities=["text"]).text

    spoken = chat(omni_server, stream=stream)
    named = follow({"role": "assistant", "audio": {"id": spoken.audio_id}})
    assert named == follow({"role": "assistant", "content": spoken.transcript})
    assert named != follow({"role": "assistant", "content": "No."})
    with pytest.raises(openai.BadRequestError, match=r"no audio 'audio-1'.*transcript or as content") as refused:
        follow({"role": "assistant", "audio": {"id": "audio-1"}})
    assert refused.value.param == "messages[1].audio.id"
