# SPDX-License-Identifier: Apache-2.0
"""Models of speech and models that make the tokens of an image first, beside their references, for `offline.py`.

Both make the same sounds, or the same images: GLM-Image's of 256 x 256 pixels in 10 steps, Janus's of the one size that
it has. The reference runs on one thread, as each stage of ours does. Of speech the first sound is timed, too, of a
streamed prompt with 10 seconds of speech. Qwen3-TTS's reference cannot be installed beside this package, and runs in
another environment; without that only ours is measured.

`SPEECH_CLASSES` are models that transformers itself runs, in a stage of the kind `transformers`, with the same seed for
each text: tiny ones, and two of about the sizes of published ones.
"""

import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from report import Report, mean, progress

from vllm_omni import OmniLLM
from vllm_omni.inputs import OmniPrompt
from vllm_omni.testing.oracles.csm import CsmReference
from vllm_omni.testing.oracles.glm_image import GlmImageReference
from vllm_omni.testing.oracles.higgs_audio_v2 import HiggsAudioReference
from vllm_omni.testing.oracles.janus import JanusReference
from vllm_omni.testing.oracles.vibevoice import VibeVoiceReference

sys.path.insert(0, str(Path(__file__).parents[1]))  # The tiny checkpoints of classes of transformers are the tests'.

from tests.model_executor.tiny_speech import SOUNDS, WRITERS, write_music, write_vits

ATOL = 1e-4
MAX_FRAMES = 60
LONG_SECONDS = 10
"""Of the speech whose first sound is timed."""
TEXTS = (
    "sound and light", "the red river", "hello there", "look at the white dog",
    "two cats", "one long day", "water and wind", "my old home",
)  # fmt: skip
SUBJECTS = (
    "a harbour", "a desert at noon", "snow on a roof", "a kitchen table",
    "two ships at night", "a red cat by the sea", "a sign", "an old railway station in the rain",
)  # fmt: skip
GLM_IMAGE_CALL: dict[str, Any] = {"height": 256, "width": 256, "num_inference_steps": 10, "seed": 0}
GREEDY = {"temperature": 0.0, "max_tokens": MAX_FRAMES + 1, "seed": 0}

Reference = Callable[[OmniPrompt], np.ndarray]
"""From a prompt to what it makes with the likeliest tokens: samples, or `[height, width, 3]` in [0, 1]."""


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        load: Loads a checkpoint's reference; None: there is no environment for it.
        engine_args: Of the pipeline, besides `max_num_seqs`.
        params: Of our stages; None: as `engine_args` has them.
        num_sequences: Of a vLLM engine, for each request; 0: there is none.
        stage, frame_rate: Of speech: the stage that makes frames, and how many for a second.
        warm_ups: Calls with all prompts before anything is measured.
    """

    load: Callable[[Path], AbstractContextManager[Reference]] | None
    prompts: Sequence[OmniPrompt]
    engine_args: dict[str, Any] = field(default_factory=dict)
    params: list[Any] | None = None
    num_sequences: int = 1
    stage: str = ""
    frame_rate: float = 12.5
    warm_ups: int = 1


def _images(load: Callable[[Path], Reference], params: list[Any], num_sequences: int = 1) -> Family:
    prompts: list[OmniPrompt] = [{"prompt": subject} for subject in SUBJECTS]
    return Family(lambda model: nullcontext(load(model)), prompts, params=params, num_sequences=num_sequences)


def _glm_image(model: Path) -> Reference:
    reference = GlmImageReference(model)
    return lambda prompt: reference.generate(str(prompt["prompt"]), **GLM_IMAGE_CALL).numpy()


def _janus(model: Path) -> Reference:
    reference = JanusReference(model)
    return lambda prompt: reference.paint(reference.image_tokens(str(prompt["prompt"]))).numpy()


def _speech(
    reference: Callable[[Path], Any], stage: str = "backbone", frame_rate: float = 12.5, num_sequences: int = 1
) -> Family:
    def load(model: Path) -> AbstractContextManager[Reference]:
        loaded = reference(model)
        return nullcontext(lambda prompt: loaded.speak(prompt, MAX_FRAMES).audio.numpy())

    return _of_texts(load, stage, frame_rate, num_sequences, {})


def _qwen3_tts(python: Path | None) -> Family:
    load = None if python is None else partial(_qwen_tts_reference, python)
    return _of_texts(load, "talker", 12.5, 1, {"speaker": "ryan"})


def _of_texts(load: Any, stage: str, frame_rate: float, num_sequences: int, information: dict[str, Any]) -> Family:
    prompts: list[OmniPrompt] = [{"prompt": text, "additional_information": information} for text in TEXTS]
    engine_args = {"max_model_len": 512, "stage_overrides": {stage: {"default_sampling_params": GREEDY}}}
    return Family(load, prompts, engine_args, None, num_sequences, stage, frame_rate)


@contextmanager
def _qwen_tts_reference(python: Path, model: Path) -> Iterator[Reference]:
    """`qwen_tts_reference.py` in a process with another Python."""
    command = [str(python), str(Path(__file__).with_name("qwen_tts_reference.py")), str(model)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:

        def speak(prompt: OmniPrompt) -> np.ndarray:
            assert process.stdin is not None and process.stdout is not None
            speaker = prompt["additional_information"]["speaker"]
            request = {"text": prompt["prompt"], "speaker": speaker, "max_frames": MAX_FRAMES}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the reference has ended; see what it says: {' '.join(command)}")
            return np.frombuffer(base64.b64decode(answer), np.float32)

        yield speak
        process.communicate()


_FAMILIES: dict[str, Callable[[], Family]] = {
    "csm": lambda: _speech(CsmReference),
    "higgs_audio_v2": lambda: _speech(HiggsAudioReference, frame_rate=25.0),
    "vibevoice": lambda: _speech(VibeVoiceReference, "language_model", frame_rate=7.5, num_sequences=2),
    "glm_image": lambda: _images(_glm_image, [{"temperature": 0.0}, {**GLM_IMAGE_CALL, "output_format": "np"}]),
    "janus": lambda: _images(_janus, [{"temperature": 0.0}, None], num_sequences=2),
}
CHECKPOINTS = (*_FAMILIES, "qwen3_tts")
"""Names of tiny checkpoints."""

_MMS: dict[str, Any] = {
    "hidden_size": 192, "num_hidden_layers": 6, "ffn_dim": 768, "flow_size": 192, "spectrogram_bins": 513,
    "upsample_initial_channel": 512, "upsample_rates": [8, 8, 2, 2], "upsample_kernel_sizes": [16, 16, 4, 4],
    "resblock_kernel_sizes": [3, 7, 11], "resblock_dilation_sizes": [[1, 3, 5]] * 3,
    "duration_predictor_filter_channels": 256, "prior_encoder_num_flows": 4, "duration_predictor_num_flows": 4,
    "prior_encoder_num_wavenet_layers": 4,
}  # fmt: skip
"""The sizes of MMS's checkpoints."""
_LAYERS: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 12, "ffn_dim": 2048, "num_attention_heads": 8}
_TINY = ("vits", "fastspeech2", "speecht5", "bark", "dia", "musicgen", "musicgen_melody")
SPEECH_CLASSES: dict[str, tuple[Callable[[Path], None], Callable[[Path, str, int], Any]]] = {
    **{name: (WRITERS[name], SOUNDS[name]) for name in _TINY},
    "vits, as large as MMS": (partial(write_vits, **_MMS), SOUNDS["vits"]),
    "musicgen, 12 layers": (partial(write_music, kind="Musicgen", length=50, **_LAYERS), SOUNDS["musicgen"]),
}
"""By class of transformers: what writes a checkpoint, and the sound of a text by transformers alone. Without Seamless,
whose random weights write units that its vocoder does not have."""


def measure_speech_classes(concurrencies: list[int], rounds: int, report: Report) -> None:
    """Adds the rows and ratios of `SPEECH_CLASSES`. Raises as `measure`."""
    for name, (write, speak) in SPEECH_CLASSES.items():
        with TemporaryDirectory() as folder:
            write(Path(folder))
            measure(_speech_class(speak), name, Path(folder), concurrencies, rounds, report)


def _speech_class(speak: Callable[[Path, str, int], Any]) -> Family:
    """A stage compares up to four calls before it knows whether texts are joined."""

    def load(model: Path) -> AbstractContextManager[Reference]:
        return nullcontext(lambda prompt: speak(model, str(prompt["prompt"]), 0).float().numpy())

    return Family(load, [{"prompt": text} for text in TEXTS], num_sequences=0, warm_ups=5)


def make_family(checkpoint: str, reference_python: Path | None) -> Family:
    """`reference_python`: Of an environment with Qwen3-TTS's reference."""
    return _FAMILIES[checkpoint]() if checkpoint in _FAMILIES else _qwen3_tts(reference_python)


def measure(family: Family, size: str, model: Path, concurrencies: list[int], rounds: int, report: Report) -> None:
    """Adds the rows and ratios of one checkpoint.

    Raises:
        AssertionError: Ours makes something else.
    """
    at_once = max(concurrencies)
    sequences = {"max_num_seqs": family.num_sequences * at_once} if family.num_sequences else {}
    args = {"dtype": "float32", **sequences, **family.engine_args}
    seconds: dict[int, list[float]] = {concurrency: [] for concurrency in (0, *concurrencies)}
    with ExitStack() as stack:
        llm = stack.enter_context(OmniLLM(str(model), **args))
        reference = None if family.load is None else stack.enter_context(family.load(model))
        expected = [] if reference is None else [reference(prompt) for prompt in family.prompts]
        for _ in range(family.warm_ups):
            make_all(llm, family, at_once)
        for number in range(rounds):
            progress(f"{size}: round {number + 1} of {rounds}")
            if reference is not None:
                start = time.perf_counter()
                for prompt in family.prompts:
                    reference(prompt)
                seconds[0].append(time.perf_counter() - start)
            for concurrency in concurrencies:
                start = time.perf_counter()
                made = make_all(llm, family, concurrency)
                seconds[concurrency].append(time.perf_counter() - start)
                for ours, wanted in zip(made, expected, strict=reference is not None):
                    np.testing.assert_allclose(ours, wanted, rtol=0, atol=ATOL)
        sounds = [time_to_first_sound(llm, family) for _ in range(rounds)] if family.stage else []
    if reference is None:
        del seconds[0]
    for concurrency, values in seconds.items():
        backend = "reference" if concurrency == 0 else "OmniLLM"
        rate = len(family.prompts) / mean(values)
        report.rows.append({"size": size, "backend": backend, "concurrency": max(1, concurrency), "requests/s": rate})
        if concurrency and reference is not None:
            report.ratios[f"{size}_requests_per_second_c{concurrency}"] = mean(seconds[0]) / mean(values)
    if sounds:
        first, whole = map(mean, zip(*sounds, strict=True))
        report.ratios[f"{size}_first_sound_to_whole"] = first / whole
        report.notes = ["ratios are to the reference; first sound to whole: of 10 s of speech, streamed"]
    else:
        report.notes = ["ratios are to the reference"]


def make_all(llm: OmniLLM, family: Family, concurrency: int) -> list[np.ndarray]:
    """What is made of all prompts, in their order."""
    outputs: list[Any] = []
    for start in range(0, len(family.prompts), concurrency):
        prompts = family.prompts[start : start + concurrency]
        outputs += llm.generate(prompts, family.params, use_tqdm=False)
    sounds = [output.multimodal_output.get("audio") for output in outputs]
    return [output.images[0] if sound is None else sound.numpy() for output, sound in zip(outputs, sounds, strict=True)]


def time_to_first_sound(llm: OmniLLM, family: Family) -> tuple[float, float]:
    """Seconds to the first sound and to the end of `LONG_SECONDS` of speech, streamed."""
    num_tokens = round(LONG_SECONDS * family.frame_rate) + 1
    long = {"temperature": 0.0, "max_tokens": num_tokens, "min_tokens": num_tokens}
    params = [long if stage.name == family.stage else None for stage in llm.config.stage_args]
    start, first = time.perf_counter(), 0.0
    for event in llm.generate(family.prompts[0], params, stream=True, use_tqdm=False):
        if not first and len(getattr(event, "multimodal_output", {}).get("audio", ())):
            first = time.perf_counter() - start
    return first, time.perf_counter() - start
