# SPDX-License-Identifier: Apache-2.0
"""Speech models of transformers: what their files tell, and that their sounds are those of transformers alone."""

import base64
import functools
import inspect
import itertools
import json
import pkgutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.utils import is_torchaudio_available
from vllm.multimodal.audio import resample_audio_pyav

from tests.entrypoints.openai.fake_server import FakeServer
from tests.entrypoints.openai.small_apps import send
from tests.entrypoints.wav_files import as_uri, float_wav
from tests.model_executor.tiny_speech import (
    CHROMA,
    SOUNDS,
    TEXTS,
    WRITERS,
    dia_sound,
    load,
    moshi_sound,
    music_sound,
    write_moshi,
    write_music,
    write_vits,
)
from tests.model_executor.tiny_transcription import make_sound
from vllm_omni import AsyncOmniLLM, OmniLLM
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.config.stage import OmniStageConfig
from vllm_omni.config.utils import find_checkpoint
from vllm_omni.entrypoints.resolve import read_pipeline
from vllm_omni.errors import InvalidRequestError, StageConfigError
from vllm_omni.inputs import StageRequest
from vllm_omni.kinds.transformers import Transformers
from vllm_omni.model_executor.registry import SPEECH_ADAPTERS, TRANSCRIPTION_ADAPTERS
from vllm_omni.model_executor.speech_model import SpeechModel
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.engines.transformers import SpeechFunction

SEED = 5


@pytest.fixture(scope="session")
def tiny_speech(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the checkpoint of a family once."""

    def write(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        WRITERS[family](folder)
        return folder

    return functools.cache(write)


def open_model(path: Path) -> tuple[Transformers, SpeechModel]:
    stage = read_pipeline(OmniArgs(model=str(path))).with_checkpoints.stage_args[-1]
    assert isinstance(stage.kind, Transformers)
    return stage.kind, stage.kind.open_model(str(path))


def function_of(path: Path) -> SpeechFunction:
    kind, speech = open_model(path)
    function = SpeechFunction(kind.stage, speech)
    function.start()
    return function


def speak(function: SpeechFunction, *texts: str, **parameters: Any) -> list[torch.Tensor]:
    """The sounds of texts that wait at the same time."""
    requests = [StageRequest(request_id=str(i), parameters={"seed": SEED} | parameters) for i in range(len(texts))]
    sources = [
        {-1: StageOutput(request_id=str(i), stage_id=-1, completions=[Completion(text=text)])}
        for i, text in enumerate(texts)
    ]
    results = function.windows(requests, sources)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [result["audio"] for result in results]


def test_a_checkpoint_is_a_stage_without_a_file(tiny_speech: Callable[[str], Path]) -> None:
    read = read_pipeline(OmniArgs(model=str(tiny_speech("vits"))))
    (stage,) = read.with_checkpoints.stage_args
    assert read.source is None
    assert (stage.kind.name, stage.final_output_type, stage.sample_rate) == ("transformers", "audio", 16000)
    parameters = stage.kind.load_parameters()
    assert parameters.names == ("seed", "speed") and parameters.voices == ()
    with pytest.raises(StageConfigError, match="no stage of this pipeline has an engine argument 'dtipe'"):
        read_pipeline(OmniArgs(model=str(tiny_speech("vits")), engine_args={"dtipe": "float32"}))
    with pytest.raises(StageConfigError, match=r"engine_args\.dtype: Invalid enum value 'int3'"):
        read_pipeline(OmniArgs(model=str(tiny_speech("vits")), engine_args={"dtype": "int3"}))


def test_it_is_the_voice_of_talk_in_one_line(tiny_speech: Callable[[str], Path]) -> None:
    pytest.importorskip("hibari")
    model, folder = find_checkpoint("talk"), str(tiny_speech("vits"))
    overrides = {"tts": {"engine_args": {"model": folder}}}
    config = read_pipeline(OmniArgs(model=model, stage_overrides=overrides)).with_checkpoints
    stage = config.stages[2]
    assert (stage.kind.name, stage.name, stage.function, stage.sample_rate) == ("transformers", "tts", None, 16000)
    assert (stage.accepts, stage.engine_input_source, stage.engine_args["model"]) == ("text", [1], folder)
    own = read_pipeline(OmniArgs(model=model)).with_checkpoints.stages[2]
    assert own.kind.name == "function" and own.sample_rate == 24000


def test_speakers_are_voices(tmp_path: Path) -> None:
    write_vits(tmp_path, num_speakers=3, speaker_embedding_size=8)
    (stage,) = read_pipeline(OmniArgs(model=str(tmp_path))).with_checkpoints.stage_args
    assert stage.kind.load_parameters().voices == ("0", "1", "2")
    function = function_of(tmp_path)
    first, second = (speak(function, TEXTS[0], voice=voice)[0] for voice in "02")
    expected = SOUNDS["vits"](tmp_path, TEXTS[0], SEED, speaker_id=2)  # type: ignore[call-arg]
    torch.testing.assert_close(second, expected, rtol=0, atol=1e-4)
    assert first.shape != second.shape or not torch.allclose(first, second)


def test_speed_and_seed_are_the_models(tiny_speech: Callable[[str], Path]) -> None:
    path = tiny_speech("vits")
    function = function_of(path)
    (sound,) = speak(function, TEXTS[1], speed=0.5)
    expected = SOUNDS["vits"](path, TEXTS[1], SEED, speaking_rate=0.5)  # type: ignore[call-arg]
    torch.testing.assert_close(sound, expected, rtol=0, atol=1e-4)
    (other,) = speak(function, TEXTS[1], speed=0.5, seed=SEED + 1)
    assert sound.shape != other.shape or not torch.allclose(sound, other)


def test_a_language_has_its_short_code_too(tiny_speech: Callable[[str], Path]) -> None:
    path = tiny_speech("seamless_m4t_v2")
    kind, _ = open_model(path)
    with pytest.raises(ValueError, match=r"language: .*'fr'; there are eng, deu, de, en "):
        kind.load_parameters().read({"language": "fr"}, {})
    function = function_of(path)
    (short,), (long,), (other,) = (speak(function, TEXTS[0], language=code) for code in ("de", "deu", "en"))
    assert short.equal(long)
    assert other.shape != long.shape or not other.equal(long)


def test_a_text_is_cut_for_clients_that_stream(tiny_speech: Callable[[str], Path]) -> None:
    function = function_of(tiny_speech("vits"))
    text = "It is late. The sea is quiet!\n*** The wind is cold."
    assert function.cut_text(text, "r", streams=False) == [text]
    parts = function.cut_text(text, "r", streams=True)
    assert len(parts) == 3 and "".join(parts) == text
    with pytest.raises(InvalidRequestError, match="nothing that this model reads"):
        function.cut_text("☃", "r", streams=True)


def test_a_long_text_is_cut_or_refused(tiny_speech: Callable[[str], Path]) -> None:
    function = function_of(tiny_speech("vits"))
    function.opened.max_text_tokens = 40  # Each letter has a blank beside it.
    assert function.cut_text("It is late. We are here.", "r", streams=False) == ["It is late. ", "We are here."]
    with pytest.raises(InvalidRequestError, match="has 51 tokens, and this model reads at most 40"):
        function.cut_text("It is late. A" + 24 * "a", "r", streams=False)
    with pytest.raises(InvalidRequestError, match="reads at most 40"):
        speak(function, 25 * "a")


def test_an_abort_of_all_requests_ends_a_call(tiny_speech: Callable[[str], Path]) -> None:
    function = function_of(tiny_speech("vits"))
    aborted = threading.Event()
    calls = itertools.count()

    class Aborted(Exception):
        pass

    def gate() -> None:
        next(calls)
        if aborted.is_set():
            raise Aborted

    function.opened.gate = gate
    speak(function, TEXTS[0])
    layers = next(calls)
    aborted.set()
    with pytest.raises(Aborted):
        function.opened.compute([TEXTS[0]], function.parameters())
    assert layers > 5 and next(calls) == layers + 2, "the call has ended at its first layer"


@pytest.mark.slow
@pytest.mark.parametrize("family", WRITERS)
def test_texts_alone_and_together(family: str, tiny_speech: Callable[[str], Path]) -> None:
    path = tiny_speech(family)
    function = function_of(path)
    alone = [speak(function, text)[0] for text in TEXTS]
    for text, sound in zip(TEXTS, alone, strict=True):
        assert sound.numel() > 10 and sound.abs().max() > 0
        torch.testing.assert_close(sound, SOUNDS[family](path, text, SEED).float(), rtol=0, atol=1e-4)
    for _ in range(2):  # The first call finds out whether texts are joined.
        together = speak(function, *TEXTS)
        for one, other in zip(alone, together, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    assert function._joins is JOINS[family]


@pytest.mark.parametrize("name", sorted({*SPEECH_ADAPTERS.values(), *TRANSCRIPTION_ADAPTERS.values()}))
def test_an_adapter_is_a_few_lines(name: str) -> None:
    lines = inspect.getsource(pkgutil.resolve_name(name)).splitlines()
    assert len(list(filter(str.strip, lines))) <= 25


class TestRecordings:
    """Beside a prompt for music: what it continues, or its melody; beside a text: a voice."""

    SOUND = np.sin(np.arange(4800) / 20).astype(np.float32)

    def write(self, path: Path, kind: str) -> int:
        """The rate of its recordings."""
        write_music(path, kind, length=40)
        files = {"Musicgen": {"feature_extractor_type": "EncodecFeatureExtractor", "sampling_rate": 24_000}}
        extractor = files.get(kind, CHROMA)
        (path / "preprocessor_config.json").write_text(json.dumps(extractor))
        return int(extractor["sampling_rate"])

    def expected(self, path: Path, kind: str, features: Any = None) -> torch.Tensor:
        if features is None:
            rate = load("AutoFeatureExtractor", path).sampling_rate
            features = load("AutoFeatureExtractor", path)(self.SOUND, sampling_rate=rate, return_tensors="pt")
        return music_sound(path, TEXTS[0], SEED, kind, **features).float()

    def run(self, function: SpeechFunction, *texts: str) -> list[torch.Tensor]:
        """The music of texts of which the first has a recording."""
        sources = [StageOutput(request_id=text, stage_id=-1, completions=[Completion(text=text)]) for text in texts]
        sources[0].tensors = {"audio": torch.from_numpy(self.SOUND)}
        requests = [StageRequest(request_id=text, parameters={"seed": SEED}) for text in texts]
        parts = []
        for request, source in zip(requests, sources, strict=True):
            parts += function.cut(request, {-1: source}, streams=source is sources[0])
        return [result["audio"] for result in function.windows(requests, [{-1: part} for part in parts])]

    def test_one_beside_others(self, tmp_path: Path) -> None:
        self.write(tmp_path, "Musicgen")
        continued, *others = self.run(function_of(tmp_path), *TEXTS)
        torch.testing.assert_close(continued, self.expected(tmp_path, "Musicgen"), rtol=0, atol=1e-4)
        for text, other in zip(TEXTS[1:], others, strict=True):
            torch.testing.assert_close(other, music_sound(tmp_path, text, SEED), rtol=0, atol=1e-4)
        assert len(continued) > len(music_sound(tmp_path, TEXTS[0], SEED)), "it has the recording, too"

    def test_a_melody(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its features themselves need torchaudio."""
        self.write(tmp_path, "MusicgenMelody")
        function = function_of(tmp_path)
        features = {"input_features": torch.nn.functional.one_hot(torch.arange(30) % 12, 12)[None].float()}
        monkeypatch.setattr(function.opened, "encode_sound", lambda sound: features)
        (sound,) = self.run(function, TEXTS[0])
        torch.testing.assert_close(sound, self.expected(tmp_path, "MusicgenMelody", features), rtol=0, atol=1e-4)
        without = music_sound(tmp_path, TEXTS[0], SEED, "MusicgenMelody")
        assert not torch.allclose(sound, without, atol=1e-3)

    def test_a_voice(self, tiny_speech: Callable[[str], Path]) -> None:
        """For the whole text, also of a client that streams."""
        path, text = tiny_speech("dia"), "a quiet sea. the wind is in the trees."
        (sound,) = self.run(function_of(path), text)
        expected = dia_sound(path, text, SEED, audio=[self.SOUND], sampling_rate=44_100)
        torch.testing.assert_close(sound, expected, rtol=0, atol=1e-4)
        without = dia_sound(path, text, SEED)
        assert sound.shape != without.shape or not torch.allclose(sound, without, atol=1e-3)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["Musicgen", "MusicgenMelody"])
    def test_users_give_one(self, kind: str, tmp_path: Path) -> None:
        rate = self.write(tmp_path, kind)
        uri = as_uri(float_wav((self.SOUND, rate)))
        body = {"input": TEXTS[0], "ref_audio": uri, "seed": SEED, "response_format": "pcm", "stream": False}
        with AsyncOmniLLM(str(tmp_path)) as llm:
            app = FakeServer(llm).app
            answer = send(app, "POST", "/v1/audio/speech", json=body)
            if kind == "MusicgenMelody" and not is_torchaudio_available():
                assert answer.status_code == 400 and "pip install torchaudio" in answer.text, answer.text
                return
            assert answer.status_code == 200, answer.text
        samples = torch.from_numpy(np.frombuffer(answer.content, "<i2") / 32768).float()
        with OmniLLM(str(tmp_path)) as llm:
            prompt: Any = {"prompt": TEXTS[0], "multi_modal_data": {"audio": (self.SOUND, rate)}}
            (output,) = llm.generate(prompt, {"seed": SEED}, use_tqdm=False)
        expected = self.expected(tmp_path, kind)
        torch.testing.assert_close(output.multimodal_output["audio"], expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(samples, expected.clamp(-1, 1), rtol=0, atol=1e-3)


@pytest.mark.slow
def test_moshi_answers_what_it_hears(tmp_path: Path) -> None:
    """Over a chat, with a sound of another rate."""
    write_moshi(tmp_path)
    (stage,) = read_pipeline(OmniArgs(model=str(tmp_path))).with_checkpoints.stage_args
    assert (stage.accepts, stage.final_output_type, stage.sample_rate) == ("audio", "audio", 24_000)
    sound = make_sound(0.5, seed=1)
    heard = resample_audio_pyav(sound, orig_sr=16_000, target_sr=24_000)
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(float_wav((sound, 16_000))).decode()}}
    params = {"seed": SEED, "max_new_tokens": 12}
    body = {"messages": [{"role": "user", "content": [part]}], "sampling_params_list": [params]}
    with AsyncOmniLLM(str(tmp_path)) as llm:
        app = FakeServer(llm).app
        answer = send(app, "POST", "/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        data = base64.b64decode(answer.json()["choices"][0]["message"]["audio"]["data"])
        assert send(app, "POST", "/v1/audio/speech", json={"input": TEXTS[0]}).status_code == 400
    samples = torch.from_numpy(np.frombuffer(data[44:], "<i2") / 32768).float()
    expected = moshi_sound(tmp_path, heard, num_frames=12, seed=SEED)
    assert len(expected) > 5000 and expected.abs().max() > 0.01
    torch.testing.assert_close(samples, expected.clamp(-1, 1), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("config", "architecture", "problem"),
    [
        (transformers.MoshiConfig, "MoshiForConditionalGeneration", "makes sound of a sound; .* needs accepts: audio"),
        (transformers.Pop2PianoConfig, "Pop2PianoForConditionalGeneration", "makes no sound of a text"),  # but notes
        (transformers.Emu3Config, "Emu3ForConditionalGeneration", "makes no sound of a text"),  # but images
    ],
)
def test_a_class_that_is_no_voice_is_refused(tmp_path: Path, config: Any, architecture: str, problem: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config().to_dict() | {"architectures": [architecture]}))
    stage = OmniStageConfig(stage_id=0, engine_type="transformers", final_output=True, final_output_type="audio")
    with pytest.raises(StageConfigError, match=f"{architecture} {problem}"):
        stage.kind.check_arguments(str(tmp_path))


JOINS = {
    **dict.fromkeys(("vits", "dia", "musicgen"), True),
    **dict.fromkeys(("fastspeech2", "speecht5", "seamless_m4t_v2", "musicgen_melody"), False),
    **dict.fromkeys(("bark", "seamless_m4t"), None),  # Their sounds have equal lengths, which shows nothing.
}


@pytest.mark.slow
def test_a_pipeline_speaks(tiny_speech: Callable[[str], Path]) -> None:
    path = tiny_speech("vits")
    with OmniLLM(str(path)) as llm:
        outputs = llm.generate(list(TEXTS), {"seed": SEED}, use_tqdm=False)
        for text, output in zip(TEXTS, outputs, strict=True):
            expected = SOUNDS["vits"](path, text, SEED)
            torch.testing.assert_close(output.multimodal_output["audio"], expected, rtol=0, atol=1e-4)
            assert output.sample_rate == 16000
        for prompt, problem in (("☃", "nothing that this model reads"), ({"prompt": ""}, "")):
            with pytest.raises(InvalidRequestError, match=problem):
                llm.generate([prompt], use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="multi_modal_data: no stage of this pipeline reads any"):
            llm.generate({"prompt": TEXTS[0], "multi_modal_data": {"audio": (np.zeros(8), 16_000)}}, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="unknown parameter 'sped'"):
            llm.generate([TEXTS[0]], {"sped": 2}, use_tqdm=False)
        assert llm.generate([TEXTS[2]], use_tqdm=False)


@pytest.mark.slow
def test_a_server_speaks(tiny_speech: Callable[[str], Path]) -> None:
    path = tiny_speech("vits")

    def speak_over_http(**fields: Any) -> Any:
        return send(app, "POST", "/v1/audio/speech", json={"input": TEXTS[1], "response_format": "pcm", **fields})

    with AsyncOmniLLM(str(path)) as llm:
        app = FakeServer(llm).app
        whole = speak_over_http(stream=False, seed=SEED)
        assert whole.status_code == 200, whole.text
        expected = SOUNDS["vits"](path, TEXTS[1], SEED).clamp(-1, 1)
        samples = torch.from_numpy(np.frombuffer(whole.content, "<i2") / 32768).float()
        torch.testing.assert_close(samples, expected, rtol=0, atol=1e-3)
        assert whole.headers["X-Sample-Rate"] == "16000"
        slow = speak_over_http(stream=False, seed=SEED, speed=0.5)
        expected = SOUNDS["vits"](path, TEXTS[1], SEED, speaking_rate=0.5)  # type: ignore[call-arg]
        assert len(slow.content) == 2 * len(expected), "the model speaks slowly, not the encoder"
        assert speak_over_http(stream=True, seed=SEED).content, "clauses, one after the other"
        for name in ("mp3", "opus", "aac", "flac", "wav"):
            assert speak_over_http(response_format=name).status_code == 200, name
        for fields, words in (
            ({"input": "\u2603"}, "nothing that this model reads"),
            ({"speed": 4.5}, "speed"),
            ({"pitch": 2}, "reads no 'pitch'"),
            ({"seed": -1}, "seed"),
        ):
            refused = speak_over_http(**fields)
            assert refused.status_code in (400, 422) and words in refused.text, refused.text
        voices = send(app, "GET", "/v1/audio/voices").json()
        assert voices["voices"] == []
        assert speak_over_http(stream=False, seed=SEED).content == whole.content
