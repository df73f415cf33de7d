# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS, from prompts to sound: voices by name and cloned ones, streamed, and over HTTP."""

import asyncio
import io
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import soundfile
import torch
from fastapi import FastAPI

from tests.entrypoints.conftest import as_async, start
from tests.entrypoints.openai.fake_server import over_http
from tests.entrypoints.openai.media_apps import app_of, send
from tests.entrypoints.openai.speech_sessions import opened, sound_of
from tests.model_executor.models.qwen3_tts.helpers import AUDIO_STEP, GREEDY, read_cases
from tests.model_executor.models.speech import SpeechCase
from vllm_omni import AsyncOmniLLM, OmniLLM
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.errors import InvalidRequestError
from vllm_omni.events import ErrorEvent
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.slow
CUSTOM, BASE = "qwen3_tts", "qwen3_tts_base"


class Running(NamedTuple):
    llm: OmniLLM
    async_llm: AsyncOmniLLM
    checkpoint: Path
    cases: dict[str, SpeechCase]


def run(kind: str, folder: Path) -> Iterator[Running]:
    checkpoint = write_tiny_checkpoint(kind, folder)
    overrides = {"talker": {"default_sampling_params": GREEDY}}
    with start(checkpoint, max_model_len=512, stage_overrides=overrides) as llm:
        yield Running(llm, as_async(llm), checkpoint, read_cases(kind, "default"))


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from run(CUSTOM, tmp_path_factory.mktemp(CUSTOM))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from run(BASE, tmp_path_factory.mktemp(BASE))


def check(audio: torch.Tensor, case: SpeechCase) -> None:
    assert len(audio) == 1920 * len(case.codes)
    torch.testing.assert_close(audio[::AUDIO_STEP], case.audio, rtol=0, atol=1e-4)


def check_all(running: Running) -> None:
    cases = list(running.cases.values())
    outputs = running.llm.generate([case.prompt for case in cases], use_tqdm=False)
    for output, case in zip(outputs, cases, strict=True):
        check(output.multimodal_output["audio"], case)
        assert output.sample_rate == 24000


def check_streams(running: Running) -> None:
    for case in running.cases.values():
        parts = [
            event.multimodal_output["audio"]
            for event in running.llm.generate(case.prompt, stream=True, use_tqdm=False)
            if "audio" in getattr(event, "multimodal_output", {})
        ]
        check(torch.cat(parts), case)
        assert len(case.codes) < 10 or len(parts) > 1, "sound comes in windows"
        assert len(parts[0]) <= 4 * 1920, "a reference does not delay the first sound"


def test_named_voices_at_once_and_streamed(custom: Running) -> None:
    check_all(custom)
    check_streams(custom)


def test_cloned_voices_at_once_and_streamed(base: Running) -> None:
    check_all(base)
    check_streams(base)


def test_a_wrong_field_is_refused_by_name(custom: Running) -> None:
    with pytest.raises(InvalidRequestError, match="custom_voice, 1b7, reads no 'ref_text'"):
        custom.llm.generate({"prompt": "hello", "additional_information": {"ref_text": "hello"}})


@pytest.fixture(scope="module")
def app(custom: Running) -> FastAPI:
    return app_of(OmniEngineClient(custom.async_llm), custom.checkpoint)


def test_speech_over_http(app: FastAPI, custom: Running) -> None:
    case = custom.cases["no language"]
    request = {"input": case.prompt["prompt"], "voice": "vivian", "response_format": "wav"}
    answer = send(app, "POST", "/v1/audio/speech", json=request)
    assert answer.status_code == 200, answer.text
    samples, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
    assert rate == 24000
    torch.testing.assert_close(torch.from_numpy(samples)[::AUDIO_STEP], case.audio.clamp(-1, 1), rtol=0, atol=2e-4)
    voices = send(app, "GET", "/v1/audio/voices").json()["voices"]
    assert voices == [{"id": name, "name": name} for name in ("eric", "ryan", "vivian")]
    refused = send(app, "POST", "/v1/audio/speech", json=request | {"voice": "ethan"})
    assert refused.status_code == 400 and "unknown voice 'ethan'" in refused.text
    for field in ("language", "lang_code"):
        spoken, refused = (send(app, "POST", "/v1/audio/speech", json=request | {field: name}) for name in ("en", "cy"))
        assert spoken.status_code == 200 and spoken.content != answer.content and "warning" not in spoken.headers
        assert refused.status_code == 400 and "unknown language 'cy'" in refused.text and "english" in refused.text


TEXT = "hello quiet river and a bright house by the sea"
STREAMING = {"speaker": "ryan", "non_streaming_mode": False}
LONG = [{"min_tokens": 30}, None]


async def collect(
    running: Running, text: str | AsyncIterable[str], fields: dict[str, Any], on_sound: Callable[[], None] | None = None
) -> torch.Tensor:
    """The sound of a prompt, as it comes."""
    parts = []
    prompt: Any = {"prompt": text, "additional_information": fields}
    async for event in running.async_llm.generate(prompt, LONG):
        if isinstance(event, ErrorEvent):
            raise event.error
        parts.append(getattr(event, "multimodal_output", {}).get("audio", torch.empty(0)))
        if len(parts[-1]) and on_sound is not None:
            on_sound()
    return torch.cat(parts)


def test_speech_begins_before_its_text_is_complete(custom: Running) -> None:
    async def main() -> tuple[torch.Tensor, torch.Tensor]:
        heard = asyncio.Event()

        async def pieces() -> AsyncIterator[str]:
            yield "hel"
            yield "lo quiet river and a b"
            await heard.wait()
            for piece in ("right", " house by ", "", "the s", "ea"):
                yield piece

        return await collect(custom, TEXT, STREAMING), await collect(custom, pieces(), {"speaker": "ryan"}, heard.set)

    whole, in_pieces = asyncio.run(main())
    torch.testing.assert_close(in_pieces, whole, rtol=0, atol=1e-5)


def test_many_texts_in_pieces_at_once(base: Running) -> None:
    """Some are aborted while they wait for text."""
    cases = [base.cases[name] for name in ("vector", "short text", "long text")]

    async def letters(text: str, until: int | None = None) -> AsyncIterator[str]:
        for letter in text[:until]:
            yield letter
            await asyncio.sleep(0)
        if until is not None:
            await asyncio.Event().wait()

    async def aborted(prompt: dict[str, Any]) -> None:
        await asyncio.wait_for(collect(base, letters(TEXT, until=12), prompt["additional_information"]), 1)

    async def main() -> list[Any]:
        prompts = [case.prompt for case in cases for _ in range(2)]
        work = [collect(base, letters(p["prompt"]), p["additional_information"]) for p in prompts]
        whole = [collect(base, p["prompt"], p["additional_information"]) for p in prompts]
        return await asyncio.gather(*work, *whole, *map(aborted, prompts), return_exceptions=True)

    made = asyncio.run(main())
    for in_pieces, whole in zip(made[:6], made[6:12], strict=True):
        torch.testing.assert_close(in_pieces, whole, rtol=0, atol=1e-4)
    assert all(isinstance(result, TimeoutError) for result in made[12:])
    check_all(base)


def test_text_in_pieces_that_cannot_be_spoken(custom: Running) -> None:
    async def broken() -> AsyncIterator[Any]:
        yield "hello there "
        yield "you"
        raise LookupError("no more")

    async def of(*pieces: Any) -> AsyncIterator[Any]:
        for piece in pieces:
            yield piece

    for text, fields, error, message in (
        (broken(), {}, LookupError, "no more"),
        (of(" ", "\n"), {}, InvalidRequestError, "prompt is empty"),
        (of("good ", "day ", 3), {}, InvalidRequestError, "prompt must consist of strings, not of a int"),
        (of("good"), {"non_streaming_mode": True}, InvalidRequestError, "puts the whole text into the prompt"),
        (of("good"), {"speaker": "ethan"}, InvalidRequestError, "unknown speaker"),
    ):
        with pytest.raises(error, match=message):
            asyncio.run(collect(custom, text, fields))
    with pytest.raises(InvalidRequestError, match="prompt must be a string"):
        custom.llm.generate({"prompt": of("good")})  # type: ignore[typeddict-item]
    check_all(custom)


def test_a_text_in_pieces_over_a_web_socket(custom: Running) -> None:
    """The model reads each piece as it comes, in one request."""
    app = app_of(OmniEngineClient(custom.async_llm), custom.checkpoint)

    async def main(url: str) -> tuple[list[Any], bytes]:
        async with opened(url) as session:
            await session.configure(voice="ryan")
            await session.append(TEXT[:3], TEXT[3:25])
            await session.until("speech.audio.delta")
            await session.append(TEXT[25:])
            await session.send("input_text_buffer.commit")
            while not {"input_text_buffer.committed", "speech.audio.done"} <= {each["type"] for each in session.events}:
                await session.next()
            await session.append("x" * 5000)
            assert (await session.error())["code"] == "text_limit_exceeded"
            return session.events, await session.speak(TEXT, voice="ryan", non_streaming_mode=False)

    with over_http(app) as url:
        events, whole = asyncio.run(main(url))
    assert np.abs(np.frombuffer(sound_of(events), "<i2") - np.frombuffer(whole, "<i2").astype(int)).max() <= 1
    (times,) = [event["sentence_timestamps"] for event in events if event["type"] == "timestamps"]
    assert times["start"] == [0.0] and times["end"] == [pytest.approx(len(whole) / 48_000)]
    assert TEXT.startswith(times["sentences"][0]), "random weights may end before their text"
