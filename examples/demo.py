# SPDX-License-Identifier: Apache-2.0
"""An omni pipeline and an image pipeline, on any machine in a minute.

1. writes a tiny Qwen3-Omni checkpoint (the real architecture, random weights)
2. makes an image and a clip that resembles speech
3. sends both to the pipeline with a question
4. prints the answer's text as it is generated, writes its speech, and prints each stage's metrics
5. writes a tiny Z-Image checkpoint (random weights, too), a diffusers pipeline
6. generates an image, and prints every step

    python examples/demo.py [OUTPUT_DIR]
"""

import base64
import os
import sys
import tempfile
import time
import wave
from pathlib import Path
from typing import TYPE_CHECKING

# Only the demo's own output. Before the imports, because libraries read these when they are loaded.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

import numpy as np

from vllm_omni import OmniLLM
from vllm_omni.testing.media import SAMPLE_RATE, make_audio, make_image
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

if TYPE_CHECKING:
    from vllm_omni import OmniRequestOutput

SPEECH_RATE = 24_000  # Hz; what Qwen3-Omni's vocoder makes


def write_wav(path: Path, samples: np.ndarray, rate: int) -> None:
    """Writes float samples in [-1, 1] as 16-bit mono."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())


def make_question(output_dir: Path) -> list[dict]:
    image = make_image(seed=7)
    image.save(output_dir / "question.png")
    write_wav(output_dir / "question.wav", make_audio(seed=7), SAMPLE_RATE)
    voice = base64.b64encode((output_dir / "question.wav").read_bytes()).decode()
    content = [
        {"type": "image_pil", "image_pil": image},
        {"type": "input_audio", "input_audio": {"data": voice, "format": "wav"}},
        {"type": "text", "text": "What do you see, and what do you hear?"},
    ]
    return [{"role": "user", "content": content}]


def chat(llm: OmniLLM, messages: list[dict]) -> "tuple[list[OmniRequestOutput], float]":
    """Prints the text while it is generated.

    Returns:
        Text and speech, and the seconds until the first audio.
    """
    from vllm_omni import (  # here, because the import is slow, and the pipeline starts meanwhile
        ARSegmentEvent,
        ErrorEvent,
    )

    sampling = [{"temperature": 0.0, "max_tokens": 32}, {"max_tokens": 64}, None]
    started, first_audio = time.perf_counter(), 0.0
    print("\n  text:   ", end="")
    for event in llm.chat(messages, sampling, stream=True):
        if isinstance(event, ErrorEvent):
            raise event.error
        if isinstance(event, ARSegmentEvent) and event.final_output_type == "text":
            print(repr(event.text)[1:-1], end="", flush=True)
        elif isinstance(event, ARSegmentEvent):
            first_audio = first_audio or time.perf_counter() - started
    print()
    return event.outputs, first_audio  # the last event is the CompletedEvent


def print_stages(speech: "OmniRequestOutput", seconds_of_speech: float) -> None:
    print(f"\n  {'stage':<10} {'in':>6} {'out':>6} {'seconds':>9} {'real-time factor':>18}")
    units = {"thinker": "tokens", "talker": "frames", "code2wav": "frames"}
    for stage in speech.stage_metrics:
        written = stage.num_output_tokens or f"{speech.multimodal_output['audio'].numel()}"
        factor = f"{stage.seconds / seconds_of_speech:.3f}" if seconds_of_speech else "-"
        unit = units.get(stage.name, "") if stage.num_output_tokens else "samples"
        print(f"  {stage.name:<10} {stage.num_input_tokens:>6} {written:>6} {stage.seconds:>9.3f} {factor:>18}  {unit}")


def speak(folder: Path, output_dir: Path) -> None:
    """Steps 1 to 4."""
    started = time.perf_counter()
    print("[1/6] writing a tiny Qwen3-Omni checkpoint: the real architecture with RANDOM weights")
    model = write_tiny_checkpoint("qwen3_omni_moe", folder / "qwen3_omni_moe")
    print(f"[2/6] making an image and a spoken clip: {output_dir}/question.png, {output_dir}/question.wav")
    messages = make_question(output_dir)
    print("[3/6] starting the pipeline: thinker, talker and code2wav, each a vLLM engine in its own process")
    with OmniLLM(str(model), dtype="float32", max_model_len=1024, use_tqdm_on_load=False) as llm:
        print(f"[4/6] sending both with a question (ready after {time.perf_counter() - started:.0f} s)")
        (text, speech), first_audio = chat(llm, messages)
    audio = speech.multimodal_output["audio"].numpy()
    write_wav(output_dir / "answer.wav", audio, SPEECH_RATE)
    (output_dir / "answer.txt").write_text(text.outputs[0].text, encoding="utf-8")
    seconds = len(audio) / SPEECH_RATE
    print(f"  speech: {output_dir}/answer.wav, {seconds:.2f} s, 24 kHz mono; started after {first_audio:.2f} s")
    print_stages(speech, seconds)


def generate_image(folder: Path, output_dir: Path) -> None:
    """Steps 5 and 6."""
    from vllm_omni import ErrorEvent, ImageProgressEvent

    print("\n[5/6] writing a tiny Z-Image checkpoint, RANDOM weights again, and starting it: a diffusers pipeline")
    model = write_tiny_checkpoint("z_image", folder / "z_image")
    with OmniLLM(str(model), dtype="float32") as llm:
        print("[6/6] generating an image\n\n  step:   ", end="", flush=True)
        params = {"height": 256, "width": 256, "num_inference_steps": 12, "seed": 7}
        started = time.perf_counter()
        for event in llm.generate("A lighthouse in a storm.", [params], stream=True):
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, ImageProgressEvent):
                print(event.step + 1, end=" ", flush=True)
        seconds = time.perf_counter() - started
    event.outputs[0].images[0].save(output_dir / "image.png")
    print(f"of {params['num_inference_steps']}")
    print(f"  image:  {output_dir}/image.png, {params['width']}x{params['height']}, after {seconds:.2f} s")


def main() -> None:
    output_dir = Path(sys.argv[1] if len(sys.argv) > 1 else "demo_output")
    output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        speak(Path(folder), output_dir)
        generate_image(Path(folder), output_dir)
    print("\nThe weights are random: answer and image have no meaning; the pipelines are the real ones.")


if __name__ == "__main__":
    main()
