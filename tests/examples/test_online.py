# SPDX-License-Identifier: Apache-2.0
"""Runs each example for a server, and decodes the files that it writes."""

import base64
import io
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.entrypoints.int16_sound import assert_sounds_like
from tests.examples.running import EXAMPLES, decode_sound, decode_video, read_wav, run_example
from tests.servers import RunningServer
from vllm_omni.entrypoints.openai.audio_formats import encode_audio
from vllm_omni.media import encode_mp4
from vllm_omni.testing.media import make_audio, make_image, make_video

GROUP = "server"
pytestmark = pytest.mark.slow

GREEDY = json.dumps([{"temperature": 0, "max_tokens": 24}, {"temperature": 0, "max_tokens": 32}, None])

FRAME = 1920  # samples of speech


def server_of(server: RunningServer) -> str:
    return f"--base-url={server.url}/v1"


def test_streamed_speech_equals_the_whole_file(omni_server, tmp_path, capsys):
    whole, streamed = tmp_path / "whole.wav", tmp_path / "streamed.wav"
    arguments = ("Why?", server_of(omni_server), f"--sampling-params-list={GREEDY}")
    run_example("online/chat_speech.py", *arguments, f"--output={whole}")
    lines = capsys.readouterr().out.splitlines()
    run_example("online/stream_speech.py", *arguments, f"--output={streamed}")
    streamed_text, speech_line = capsys.readouterr().out.rsplit("\n", 2)[:2]

    samples = read_wav(streamed)
    assert_sounds_like(samples, read_wav(whole))
    assert lines[0] == f"text:   {streamed_text}" and streamed_text.strip()
    assert lines[-1].endswith("of speech 32")
    assert f"{len(samples) / 24_000:.2f} s, time to first audio 0.00" not in speech_line


def make_clip() -> torch.Tensor:
    """float32 `[frames, height, width, 3]` in [0, 1]."""
    return torch.from_numpy(make_video(1, frames=4)).float() / 255


def test_media_of_all_kinds(omni_server, tmp_path, capsys):
    image, clip, video = tmp_path / "image.png", tmp_path / "clip.mp3", tmp_path / "video.mp4"
    make_image(1).save(image)
    clip.write_bytes(encode_audio(make_audio(1, 0.5), "mp3", 16_000))
    video.write_bytes(encode_mp4(make_clip(), 2.0))
    media = (f"--image={image}", f"--audio={clip}", f"--video={video}")
    run_example("online/chat_media_input.py", "What?", *media, "--max-tokens=8", server_of(omni_server))
    assert capsys.readouterr().out.strip()


def test_the_speech_endpoint(omni_server, tmp_path, capsys):
    greedy = f"--sampling-params-list={json.dumps([None, *json.loads(GREEDY)[1:]])}"
    for name in ("speech.flac", "speech.mp3"):
        run_example("online/speech.py", "Hello.", greedy, f"--output={tmp_path / name}", server_of(omni_server))
    exact, rate = decode_sound(tmp_path / "speech.flac")
    assert rate == 24_000 and 0 < len(exact) <= 32 * 1920
    similar, _ = decode_sound(tmp_path / "speech.mp3")
    assert len(similar) == pytest.approx(len(exact), abs=4000)
    run_example("online/speech.py", "--list-voices", server_of(omni_server))
    assert capsys.readouterr().out.splitlines()[-3:] == ["ethan", "aiden", "chelsie"]


def test_a_reference_voice(voice_server, tmp_path, capsys):
    recording, speech = tmp_path / "me.wav", tmp_path / "speech.wav"
    recording.write_bytes(encode_audio(make_audio(1, 0.5), "wav", 16_000))
    about = (f"--recording={recording}", "--transcript=good day", "--consent=I agree.")
    run_example("online/voice.py", "two cats", *about, f"--output={speech}", server_of(voice_server))
    assert f"speech: {speech}" in capsys.readouterr().out
    samples, rate = decode_sound(speech)
    assert rate == 24_000 and 20 * FRAME <= len(samples) <= 40 * FRAME and len(samples) % FRAME == 0
    assert voice_server.openai().get("/audio/voices", cast_to=dict)["uploaded_voices"] == []


def test_images(image_server, tmp_path):
    made = tmp_path / "made.png"
    settings = ("--seed=7", "--steps=2", server_of(image_server))
    run_example("online/image.py", "A hen.", "--size=64x32", "--n=2", f"--output={made}", *settings)
    first, second = np.asarray(Image.open(made)), np.asarray(Image.open(tmp_path / "made-1.png"))
    assert first.shape == second.shape == (32, 64, 3)
    assert not np.array_equal(first, second)

    edited = tmp_path / "edited.png"
    run_example("online/image_edit.py", made, "At night.", "--strength=0.5", f"--output={edited}", *settings)
    assert Image.open(edited).size == (64, 32)
    assert not np.array_equal(np.asarray(Image.open(edited)), first)


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")  # OpenAI ends its own endpoint.
def test_a_video(video_server, tmp_path, capsys):
    video = tmp_path / "video.mp4"
    arguments = ("A boat.", "--steps=2", "--size=64x32", "--seed=7", "--interval=0.1", f"--output={video}")
    run_example("online/video.py", *arguments, "--seconds=0.5", server_of(video_server))
    frames = decode_video(video)
    assert frames.shape[1:] == (32, 64, 3)
    assert 4 < len(frames) < 16
    assert f"{video}, 64x32, " in capsys.readouterr().out
    assert "A boat." not in [video.prompt for video in video_server.openai().videos.list()]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
class TestCurl:
    """The same with curl."""

    def run(self, server: RunningServer, folder: Path, *arguments: object, **environment: str) -> str:
        command = [str(EXAMPLES / "online/curl.sh"), *map(str, arguments)]
        env = {**os.environ, "URL": server.url, "OUT": str(folder), **environment}
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    def test_a_speech_model(self, omni_server, tmp_path):
        def run_command(*arguments: object) -> str:
            return self.run(omni_server, tmp_path, *arguments)

        image = tmp_path / "image.png"
        make_image(1, 64, 64).save(image)
        for command in (["chat"], ["chat-image", image]):
            assert json.loads(run_command(*command))["choices"][0]["message"]["content"]
        *chunks, end = (line.removeprefix("data: ") for line in run_command("chat-stream").splitlines() if line)
        kinds = {kind for chunk in chunks for kind in json.loads(chunk)["choices"][0]["delta"]}
        assert {"content", "audio"} <= kinds and end == "[DONE]"
        run_command("chat-speech")
        assert len(read_wav(tmp_path / "answer.wav"))
        run_command("speech")
        assert len(decode_sound(tmp_path / "speech.mp3")[0])
        assert {"id": "ethan", "name": "ethan"} in json.loads(run_command("voices"))["voices"]
        sound = tmp_path / "long.flac"  # It leaves room for a short text in the model's context.
        sound.write_bytes(encode_audio(make_audio(1, 145), "flac", 16_000))
        assert run_command("transcribe", sound).strip()
        assert json.loads(run_command("models"))["data"][0]["id"] == omni_server.model
        assert json.loads(run_command("health"))["status"] == "ok"
        assert "vllm_omni:requests_total" in run_command("metrics")

    def test_a_reference_voice(self, voice_server, tmp_path):
        recording = tmp_path / "me.wav"
        recording.write_bytes(encode_audio(make_audio(1, 0.5), "wav", 16_000))
        assert '"deleted":true' in self.run(voice_server, tmp_path, "voice", recording, "good day")
        assert 20 * FRAME <= len(decode_sound(tmp_path / "voice.mp3")[0]) <= 42 * FRAME

    def test_an_image_model(self, image_server, tmp_path):
        def run_command(*arguments: object) -> str:
            return self.run(image_server, tmp_path, *arguments, SIZE="64x32", STEPS="2")

        run_command("image")
        run_command("image-edit", tmp_path / "image.png")
        for name in ("image.png", "edited.png"):
            assert Image.open(tmp_path / name).size == (64, 32)
        answer = image_server.openai().images.generate(
            prompt="A lighthouse.", size="64x32", extra_body={"seed": 7, "num_inference_steps": 2}
        )
        (image,) = answer.data
        assert image.b64_json is not None
        assert images_equal(tmp_path / "image.png", image.b64_json)
        assert "image_generation.completed" in run_command("image-stream")
        run_command("chat-diffusion")
        assert np.array_equal(*(np.asarray(Image.open(tmp_path / f"{name}.png")) for name in ("diffusion", "image")))

    def test_a_video_model(self, video_server, tmp_path):
        assert '"deleted":true' in self.run(video_server, tmp_path, "video", SIZE="64x32", STEPS="2", INTERVAL="0.1")
        assert len(decode_video(tmp_path / "video.mp4")) > 1

    def test_the_help_lists_the_commands(self, omni_server, tmp_path):
        assert "image-edit FILE" in self.run(omni_server, tmp_path)


def images_equal(path: Path, b64_json: str) -> bool:
    other = Image.open(io.BytesIO(base64.b64decode(b64_json)))
    return np.array_equal(np.asarray(Image.open(path)), np.asarray(other))


def test_a_realtime_turn(omni_server, tmp_path, capsys):
    question, answer = tmp_path / "question.wav", tmp_path / "answer.wav"
    question.write_bytes(encode_audio(make_audio(1, 0.5), "wav", 24_000))
    run_example("online/realtime.py", str(question), server_of(omni_server), f"--output={answer}")
    *_, status, speech = capsys.readouterr().out.splitlines()
    assert status in ("status: completed", "status: incomplete")
    assert f"speech: {len(read_wav(answer)) / 24_000:.2f} s" in speech and len(read_wav(answer)) > 0
