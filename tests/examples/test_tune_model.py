# SPDX-License-Identifier: Apache-2.0
"""The example of a model in a package of its own: installed, found, and run as users run it."""

import importlib
import os
import shutil
import subprocess
import sys
import wave
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.examples.running import EXAMPLES
from tests.forked_programs import ForkedProgram
from tests.servers import RunningServer
from vllm_omni import plugin
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.entrypoints.resolve import read_pipeline
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.prompt_processor import load_prompt_processor
from vllm_omni.model_packages import find_models
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

EXAMPLE = EXAMPLES / "tune_model"
VLLM_OMNI = Path(sys.executable).with_name("vllm-omni")
SEED = 1
TEXT = "Good morning"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package."""
    folder = tmp_path_factory.mktemp("tune")
    source = shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    command += ["--no-build-isolation", "--target", str(folder / "site"), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def package(site: Path) -> Iterator[None]:
    """It is installed in this process."""
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    find_models.cache_clear()
    plugin.register()
    yield
    sys.path.remove(str(site))
    find_models.cache_clear()


@pytest.fixture(scope="module")
def checkpoint(package: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint("tune", tmp_path_factory.mktemp("checkpoint"), seed=SEED)


@pytest.fixture(scope="module")
def environment(site: Path) -> dict[str, str]:
    """Of a process in which it is installed."""
    return {"PYTHONPATH": os.pathsep.join([str(site), str(EXAMPLES.parent)]), "VLLM_LOGGING_LEVEL": "WARNING"}


def reference(checkpoint: Path, instrument: str, tempo: float) -> np.ndarray:
    """float32 `[samples]`: the composer in transformers, and a sum of sines of the whole tune."""
    from tune_model.config import TuneConfig

    config: Any = TuneConfig.from_pretrained(checkpoint)
    weights = load_file(checkpoint / "model.safetensors")
    composer = LlamaForCausalLM(config)
    composer.load_state_dict(
        {name.removeprefix("composer."): w for name, w in weights.items() if name.startswith("composer.")}
    )
    prompt = torch.tensor([AutoTokenizer.from_pretrained(checkpoint).encode(TEXT)])
    suppressed = list(range(config.end_id))
    tokens = composer.eval().generate(
        prompt, max_new_tokens=48, do_sample=False, suppress_tokens=suppressed, eos_token_id=config.end_id
    )[0, prompt.shape[1] :]
    notes = [config.notes[token - config.first_note_id] for token in tokens.tolist() if token != config.end_id]
    assert len(set(map(tuple, notes))) > 4 and len(notes) < 48, "a tune varies, and ends"
    index = list(config.instruments).index(instrument)
    partials, decay = weights["synthesizer.partials"][index], weights["synthesizer.decays"][index].item()
    return add_notes(notes, partials.double().numpy(), decay, tempo, config.sample_rate)


def add_notes(notes: list[Any], partials: np.ndarray, decay: float, tempo: float, rate: int) -> np.ndarray:
    ringing = rate // 2
    lengths = [round(60 / tempo * beats * rate) for _, beats in notes]
    audio = np.zeros(sum(lengths) + ringing)
    for i, ((pitch, _), length) in enumerate(zip(notes, lengths, strict=True)):
        t = np.arange(length + ringing) / rate
        tones = np.sin(2 * np.pi * 440 * 2 ** ((pitch - 69) / 12) * np.outer(np.arange(1, len(partials) + 1), t))
        fade = np.minimum((t.size - np.arange(t.size)) / ringing, 1)
        start = sum(lengths[:i])
        audio[start : start + t.size] += partials @ tones * np.minimum(t / 0.01, 1) * fade * np.exp(-decay * t)
    return audio.astype(np.float32)


def read_wav(file: str | BytesIO) -> np.ndarray:
    with wave.open(file) as opened:
        assert (opened.getnchannels(), opened.getsampwidth(), opened.getframerate()) == (1, 2, 24_000)
        return np.frombuffer(opened.readframes(opened.getnframes()), "<i2") / 32767


def test_an_installed_package_is_found(checkpoint: Path, site: Path) -> None:
    read = read_pipeline(OmniArgs(model=str(checkpoint)))
    assert read.source == site / "tune_model" / "stage_configs" / "tune.yaml"
    assert "tune-model 0.1 (tune)" in find_models().packages


def test_its_prompt_is_checked(checkpoint: Path) -> None:
    stage = read_pipeline(OmniArgs(model=str(checkpoint))).loaded.stages[0]
    processor = load_prompt_processor(stage, str(checkpoint))
    assert processor is not None and processor.voices == ("flute", "organ", "harp")
    assert len(processor({"prompt": TEXT}).prompt_token_ids) == len(TEXT)
    with pytest.raises(ValueError, match="unknown speaker 'harpp'; did you mean 'harp'"):
        processor({"prompt": TEXT, "additional_information": {"speaker": "harpp"}})
    with pytest.raises(ValueError, match="tempo 3 is no number"):
        processor({"prompt": TEXT, "additional_information": {"tempo": 3}})


def test_its_windows_are_the_whole(checkpoint: Path) -> None:
    from tune_model.config import TuneConfig
    from tune_model.synthesizer import TuneSynthesizer

    model_config = SimpleNamespace(hf_config=TuneConfig.from_pretrained(checkpoint))
    synthesizer = TuneSynthesizer(vllm_config=SimpleNamespace(model_config=model_config))
    synthesizer.load_weights(load_file(checkpoint / "model.safetensors").items())
    notes = torch.tensor([[60, 1], [64, 2], [67, 1], [72, 2], [60, 1]])

    def play(*windows: torch.Tensor) -> torch.Tensor:
        state: dict[str, torch.Tensor] = {}
        waves = []
        for number, window in enumerate(windows, 1):
            information = {"notes": window, "instrument": 2, "tempo": 400.0}
            given = information | {"state": state, "is_last": number == len(windows)}
            waves += synthesizer(None, None, runtime_additional_information=[given])
        return torch.cat([wave["audio"] for wave in waves])

    whole = play(notes)
    assert whole.abs().max() > 0.1
    assert torch.equal(play(*notes.split(1)), whole)
    assert torch.equal(play(*notes.split([2, 3, 0])), whole)
    samples = add_notes(
        notes.tolist(), synthesizer.synthesizer.partials[2].double().numpy(), 5.0, tempo=400.0, rate=24_000
    )
    torch.testing.assert_close(whole, torch.from_numpy(samples), rtol=0, atol=2e-6)


def test_the_last_notes_ring_after_an_end_token(checkpoint: Path) -> None:
    from tune_model.config import TuneConfig
    from tune_model.synthesizer import ComposerToSynthesizer

    processor = ComposerToSynthesizer(TuneConfig.from_pretrained(checkpoint))
    request = StageRequest(request_id="r", options={"speaker": "harp", "tempo": 240.0})

    def process(token_ids: list[int], start: int, is_last: bool) -> StageInput | None:
        completion = Completion(token_ids=token_ids, finish_reason="stop" if is_last else None)
        window = StageOutput(request_id="r", stage_id=0, completions=[completion], start=start, is_last=is_last)
        return processor.process(request, {0: window})

    assert process([256], start=0, is_last=True) is None, "a tune without a note"
    first, last = process([257, 260], start=0, is_last=False), process([256], start=2, is_last=True)
    assert first is not None and first.additional_information["notes"].tolist() == [[57, 1], [60, 2]]
    assert last is not None and last.prompt_token_ids == [0] and last.additional_information["notes"].shape == (0, 2)


@pytest.mark.slow
def test_commands_find_it_where_it_is_installed(
    checkpoint: Path, site: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    def run(*arguments: str, **variables: str) -> tuple[int, str]:
        output = tmp_path / "output.txt"
        code = ForkedProgram(VLLM_OMNI, [*arguments, checkpoint], output, variables).wait()
        return code, output.read_text()

    shown = run("config", "show", **environment)
    assert shown[0] == 0, shown[1]
    assert f"# stages: {site / 'tune_model' / 'stage_configs' / 'tune.yaml'}" in shown[1]
    _, found = run("doctor", **environment)
    assert "OK    models          tune-model 0.1 (tune): tune, TuneComposer, TuneSynthesizer" in found
    assert "composer" in found and "synthesizer" in found
    refused = run("config", "show", PYTHONPATH=str(EXAMPLES.parent))
    assert refused[0] == 1
    assert "model type `tune`" in refused[1] and "installed packages with models: " in refused[1]
    assert "tune-model" not in refused[1]


@pytest.mark.slow
def test_it_sings_offline_and_streams(checkpoint: Path, environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "tune.wav"
    script = shutil.copy(EXAMPLE / "sing.py", tmp_path)  # away from the package's source
    arguments = [checkpoint, TEXT, "--instrument", "harp", "--tempo", "300", "--output", file]
    output = tmp_path / "output.txt"
    code = ForkedProgram(Path(script), arguments, output, environment).wait()
    assert code == 0, output.read_text()
    assert len([line for line in output.read_text().splitlines() if line.endswith(" s")]) > 2, "it comes in windows"
    np.testing.assert_allclose(read_wav(str(file)), reference(checkpoint, "harp", 300), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_it_sings_over_http(checkpoint: Path, environment: dict[str, str], tmp_path: Path) -> None:
    server = RunningServer(checkpoint, "--enforce-eager", log=tmp_path / "log.txt", env=environment)
    try:
        client = server.openai()
        voices = client.get("/audio/voices", cast_to=dict)["voices"]
        assert [voice["id"] for voice in voices] == ["flute", "organ", "harp"]
        expected = reference(checkpoint, "organ", 240)
        for stream in (True, False):
            answer = client.audio.speech.create(
                model=server.model, input=TEXT, voice="organ", response_format="wav", extra_body={"stream": stream}
            )
            np.testing.assert_allclose(read_wav(BytesIO(answer.content)), expected, rtol=0, atol=1e-4)
    finally:
        server.stop()
