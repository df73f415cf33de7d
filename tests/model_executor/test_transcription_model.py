# SPDX-License-Identifier: Apache-2.0
"""Models of transformers that transcribe: their texts are those of transformers alone."""

import base64
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
import yaml

from tests.entrypoints.openai.fake_server import FakeServer
from tests.entrypoints.openai.small_apps import send
from tests.entrypoints.wav_files import float_wav
from tests.model_executor.tiny_speech import TEXTS as SPOKEN
from tests.model_executor.tiny_speech import seamless_sound, write_seamless, write_vits
from tests.model_executor.tiny_transcription import RATE, TEXTS, WRITERS, make_sound, seamless_text, write_ctc
from vllm_omni import AsyncOmniLLM, OmniLLM
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.config.stage import OmniStageConfig
from vllm_omni.config.utils import find_checkpoint
from vllm_omni.entrypoints.resolve import read_pipeline
from vllm_omni.errors import InvalidRequestError, StageConfigError
from vllm_omni.function_stage import CALLER
from vllm_omni.inputs import StageRequest
from vllm_omni.kinds.transformers import TranscribingTransformers
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines.transformers import TranscriptionFunction

TEXT = SPOKEN[0]
SECONDS = (1.0, 2.3, 1.7)
SOUNDS = [make_sound(seconds, seed) for seed, seconds in enumerate(SECONDS)]
NEEDS = {name: "librosa" for name in WRITERS if name.startswith("parakeet")}
JOINS = {"wav2vec2": True, "hubert": True, "parakeet_ctc": True}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the checkpoint of a family once."""

    def write(family: str) -> Path:
        if family in NEEDS:
            pytest.importorskip(NEEDS[family])
        folder = tmp_path_factory.mktemp(family)
        WRITERS[family](folder)
        return folder

    return functools.cache(write)


def function_of(path: Path, **engine_args: Any) -> TranscriptionFunction:
    (stage,) = read_pipeline(OmniArgs(model=str(path), engine_args=engine_args)).with_checkpoints.stage_args
    assert isinstance(stage.kind, TranscribingTransformers)
    opened: Any = stage.kind.open_model(str(path))
    function = TranscriptionFunction(stage, opened)
    function.start()
    return function


def run(function: TranscriptionFunction, *sounds: np.ndarray, **parameters: Any) -> list[dict[str, Any]]:
    """The results for sounds that wait at the same time."""
    requests = [StageRequest(request_id=str(i), parameters=parameters) for i in range(len(sounds))]
    given = [
        {CALLER: StageOutput(request_id=str(i), stage_id=CALLER, tensors={"audio": torch.from_numpy(sound)})}
        for i, sound in enumerate(sounds)
    ]
    parts = [function.cut(request, sources, streams=False) for request, sources in zip(requests, given, strict=True)]
    results: list[dict[str, Any]] = [{"text": "", "word_times": torch.empty(0, 2)} for _ in sounds]
    for number in range(max(map(len, parts))):
        live = [index for index, each in enumerate(parts) if number < len(each)]
        found = function.windows([requests[i] for i in live], [{CALLER: parts[i][number]} for i in live])
        for index, result in zip(live, found, strict=True):
            if isinstance(result, Exception):
                raise result
            results[index]["text"] += result["text"]
            if "word_times" in result:
                results[index]["word_times"] = torch.cat([results[index]["word_times"], result["word_times"]])
    for request in requests:
        function.end(request)
    return results


def test_a_checkpoint_is_a_stage_without_a_file(tiny: Callable[[str], Path]) -> None:
    read = read_pipeline(OmniArgs(model=str(tiny("wav2vec2"))))
    (stage,) = read.with_checkpoints.stage_args
    assert read.source is None
    assert (stage.kind.name, stage.accepts, stage.final_output_type) == ("transformers", "audio", "text")
    assert stage.kind.load_parameters().names == ("timestamps",)
    with pytest.raises(StageConfigError, match="max_audio_clip_s"):
        read_pipeline(OmniArgs(model=str(tiny("wav2vec2")), engine_args={"max_audio_clip_s": 0.1}))


def test_it_hears_for_talk_in_one_line(tiny: Callable[[str], Path]) -> None:
    pytest.importorskip("hibari")
    model, folder = find_checkpoint("talk"), str(tiny("wav2vec2"))
    config = read_pipeline(OmniArgs(model=model, stage_overrides={"asr": {"model": folder}})).with_checkpoints
    stage = config.stages[0]
    assert (stage.kind.name, stage.name, stage.accepts) == ("transformers", "asr", "audio")
    assert set(stage.engine_args) == {"model_stage", "model"}, "what is for vLLM's engine is dropped"
    own = read_pipeline(OmniArgs(model=model, stage_overrides={"asr": {"dtype": "float32"}})).with_checkpoints
    assert own.stages[0].kind.name == "AR"


class TestTimes:
    """Of words: within one frame what the pipeline of transformers finds."""

    def test_they_are_those_of_the_pipeline(self, tiny: Callable[[str], Path]) -> None:
        path = tiny("sew")
        pipeline = hf.pipeline("automatic-speech-recognition", str(path), device="cpu")
        expected: Any = pipeline(SOUNDS[1], return_timestamps="word")
        (found,) = run(function_of(path), SOUNDS[1], timestamps=True)
        assert found["text"] == expected["text"] and len(expected["chunks"]) > 5
        assert found["text"].split() == [chunk["text"] for chunk in expected["chunks"]]
        times = torch.tensor([chunk["timestamp"] for chunk in expected["chunks"]], dtype=torch.float32)
        torch.testing.assert_close(found["word_times"], times, rtol=0, atol=0.05)

    def test_they_go_on_in_later_clips(self, tiny: Callable[[str], Path]) -> None:
        function = function_of(tiny("sew"), max_audio_clip_s=1)
        (found,) = run(function, SOUNDS[1], timestamps=True)
        starts, ends = found["word_times"].unbind(1)
        assert len(starts) == len(found["text"].split()) > 5
        assert (ends >= starts).all() and (starts[1:] >= starts[:-1]).all() and 1.5 < ends[-1] <= SECONDS[1] + 0.05
        assert "word_times" in found and not run(function, SOUNDS[1])[0]["word_times"].numel()


def test_a_long_sound_is_cut(tiny: Callable[[str], Path]) -> None:
    path = tiny("wav2vec2")
    function = function_of(path, max_audio_clip_s=1)
    source = {CALLER: StageOutput(request_id="r", stage_id=CALLER, tensors={"audio": torch.from_numpy(SOUNDS[1])})}
    parts = function.cut(StageRequest(request_id="r"), source, streams=False)
    clips = [part.tensors["audio"].numpy() for part in parts]
    assert len(clips) > 2 and all(len(clip) <= RATE for clip in clips)
    np.testing.assert_array_equal(np.concatenate(clips), SOUNDS[1])
    texts = [TEXTS["wav2vec2"](path, clip) for clip in clips if len(clip) >= RATE / 10]
    assert run(function, SOUNDS[1])[0]["text"] == " ".join(filter(None, texts))
    silence = np.zeros(5, np.float32)
    assert run(function, silence)[0]["text"] == "", "there are no words in it"


@pytest.mark.slow
@pytest.mark.parametrize("family", WRITERS)
def test_sounds_alone_and_together(family: str, tiny: Callable[[str], Path]) -> None:
    path = tiny(family)
    function = function_of(path)
    alone = [run(function, sound)[0]["text"] for sound in SOUNDS]
    assert alone == [TEXTS[family](path, resampled(function, sound)) for sound in SOUNDS]
    assert len(set(alone)) > 1 and sum(map(bool, alone)) > 1
    for _ in range(2):  # The first call finds out whether sounds are joined.
        assert [found["text"] for found in run(function, *SOUNDS)] == alone
    assert function._joins is JOINS.get(family, False)
    if not function.opened.has_times:
        assert "timestamps" not in function.parameters.__struct_fields__
        return
    (found,) = run(function, SOUNDS[1], timestamps=True)
    starts, ends = found["word_times"].unbind(1)
    assert len(starts) == len(found["text"].split())
    assert (ends > starts).all() and (starts[1:] >= starts[:-1]).all() and ends[-1] <= SECONDS[1] + 0.2


def resampled(function: TranscriptionFunction, sound: np.ndarray) -> np.ndarray:
    """A sound as a stage reads it."""
    source = StageOutput(request_id="r", stage_id=CALLER, tensors={"audio": torch.from_numpy(sound)})
    (part,) = function.cut(StageRequest(request_id="r"), {CALLER: source}, streams=False)
    return part.tensors["audio"].numpy()


@pytest.mark.slow
def test_a_pipeline_transcribes(tiny: Callable[[str], Path]) -> None:
    path = tiny("wav2vec2")
    with OmniLLM(str(path)) as llm:
        prompts: Any = [{"multi_modal_data": {"audio": (sound, RATE)}} for sound in SOUNDS]
        outputs = llm.generate(prompts, use_tqdm=False)
        for sound, output in zip(SOUNDS, outputs, strict=True):
            assert output.outputs[0].text == TEXTS["wav2vec2"](path, sound)
        with pytest.raises(InvalidRequestError, match="there is no sound"):
            llm.generate(["a text"], use_tqdm=False)


@pytest.mark.slow
def test_a_server_transcribes(tmp_path: Path) -> None:
    write_ctc(tmp_path, "SEW", squeeze_factor=2, masks=False, word_end="e")
    expected = TEXTS["sew"](tmp_path, SOUNDS[1])

    def post(path: str = "/v1/audio/transcriptions", **fields: Any) -> Any:
        return send(app, "POST", path, files={"file": ("a.wav", float_wav((SOUNDS[1], RATE)))}, data=fields)

    with AsyncOmniLLM(str(tmp_path)) as llm:
        app = FakeServer(llm).app
        assert post().json()["text"] == expected
        assert post(response_format="text").text == expected
        wanted = {"timestamp_granularities[]": ["word", "segment"]}
        verbose = post(response_format="verbose_json", **wanted).json()
        assert verbose.get("text") == expected, verbose
        assert verbose["duration"] == pytest.approx(SECONDS[1], abs=0.01)
        assert [word["word"] for word in verbose["words"]] == expected.split()
        assert " ".join(segment["text"] for segment in verbose["segments"]).split() == expected.split()
        assert "words" not in post(response_format="verbose_json").json()
        assert post(response_format="vtt").text.startswith("WEBVTT\n\n00:00:00.")
        assert post(response_format="srt").text.startswith("1\n00:00:00,")
        assert expected in post(stream="true").text
        refused = post("/v1/audio/translations")
        assert refused.status_code == 400 and "does not translate" in refused.text
        assert post(response_format="srt", stream="true").status_code == 400


@pytest.mark.slow
def test_a_model_without_times_refuses_subtitles(tiny: Callable[[str], Path]) -> None:
    path = tiny("moonshine")
    with AsyncOmniLLM(str(path)) as llm:
        app = FakeServer(llm).app
        for wanted, status in (("json", 200), ("srt", 400), ("vtt", 400)):
            files = {"file": ("a.wav", float_wav((SOUNDS[1], RATE)))}
            answer = send(app, "POST", "/v1/audio/transcriptions", files=files, data={"response_format": wanted})
            assert answer.status_code == status, answer.text
            if status == 400:
                assert "not when" in answer.text
            else:
                assert answer.json()["text"] == TEXTS["moonshine"](path, SOUNDS[1])


@pytest.mark.slow
@pytest.mark.parametrize("version", ["", "v2"])
def test_seamless_transcribes_translates_and_speaks(version: str, tmp_path: Path) -> None:
    write_seamless(tmp_path, version)
    generation = tmp_path / "generation_config.json"  # Random weights write marks, too.
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"suppress_tokens": [0, 1, 2, 3, 4, 33, 34]}))
    stages = read_pipeline(OmniArgs(model=str(tmp_path))).with_checkpoints.stage_args
    assert [(stage.name, stage.accepts) for stage in stages] == [("asr", "audio"), ("speech", "text")]
    german, english = (seamless_text(tmp_path, SOUNDS[0], version, language) for language in ("deu", "eng"))
    assert german and english and german != english

    def post(task: str, **fields: Any) -> Any:
        files = {"file": ("a.wav", float_wav((SOUNDS[0], RATE)))}
        return send(app, "POST", f"/v1/audio/{task}", files=files, data=fields)

    with AsyncOmniLLM(str(tmp_path)) as llm:
        app = FakeServer(llm).app
        assert post("transcriptions", language="de").json()["text"] == german
        assert post("translations").json()["text"] == english
        for fields, problem in (({}, "has to be told"), ({"language": "fr"}, "does not write 'fr'")):
            refused = post("transcriptions", **fields)
            assert refused.status_code == 400 and problem in refused.text, refused.text
        body = {"input": TEXT, "response_format": "pcm", "stream": False, "language": "eng", "source_language": "eng"}
        spoken = send(app, "POST", "/v1/audio/speech", json=body)
        assert spoken.status_code == 200, spoken.text
        expected = seamless_sound(tmp_path, TEXT, version=version).clamp(-1, 1)
        samples = torch.from_numpy(np.frombuffer(spoken.content, "<i2") / 32768).float()
        torch.testing.assert_close(samples, expected, rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["", "v2"])
def test_seamless_speaks_what_a_sound_says(version: str, tmp_path: Path) -> None:
    """In one stage, in another language; over a chat, too."""
    write_seamless(tmp_path, version)
    stage = {
        "stage_id": 0,
        "engine_type": "transformers",
        "engine_args": {"model_stage": "translator"},
        "accepts": "audio",
        "final_output": True,
        "final_output_type": "audio",
    }
    configuration = tmp_path / "stages.yaml"
    configuration.write_text(yaml.safe_dump({"stage_args": [stage]}))
    model = getattr(hf, f"SeamlessM4T{version}Model").from_pretrained(tmp_path).eval()
    inputs = hf.AutoProcessor.from_pretrained(tmp_path)(audio=SOUNDS[0], sampling_rate=RATE, return_tensors="pt")
    speaker = "speaker_id" if version else "spkr_id"
    expected = {}
    for language in ("deu", "eng"):
        torch.manual_seed(0)
        with torch.inference_mode():
            waveform, lengths = model.generate(**inputs, tgt_lang=language, **{speaker: 1})
        expected[language] = waveform[0, : int(lengths)]
    assert expected["deu"].shape != expected["eng"].shape or (expected["deu"] - expected["eng"]).abs().max() > 1e-3

    with AsyncOmniLLM(str(tmp_path), str(configuration)) as llm:
        app = FakeServer(llm).app
        part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(float_wav((SOUNDS[0], RATE))).decode()}}
        for language, sound in expected.items():
            body = {
                "messages": [{"role": "user", "content": [part]}],
                "sampling_params_list": [{"language": language, "voice": "1"}],
            }
            answer = send(app, "POST", "/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            data = base64.b64decode(answer.json()["choices"][0]["message"]["audio"]["data"])
            samples = torch.from_numpy(np.frombuffer(data[44:], "<i2") / 32768).float()
            torch.testing.assert_close(samples, sound.clamp(-1, 1), rtol=0, atol=1e-3)
        text = send(app, "POST", "/v1/audio/speech", json={"input": TEXT})
        assert text.status_code == 400, text.text


def test_a_model_that_only_reads_texts_hears_nothing(tmp_path: Path) -> None:
    write_vits(tmp_path)
    stage = OmniStageConfig(
        stage_id=0, engine_type="transformers", accepts="audio", final_output=True, final_output_type="audio"
    )
    with pytest.raises(StageConfigError, match="VitsModel makes sound of a text"):
        stage.kind.check_arguments(str(tmp_path))
