# SPDX-License-Identifier: Apache-2.0
"""A pipeline that sees, hears and speaks, and one that paints, on any machine in a minute.

1. writes a tiny Qwen3-Omni checkpoint (the real architecture, random weights)
2. makes a picture and a spoken-like clip
3. asks the pipeline about both
4. shows the answer's text as it is written, writes its speech, and says what each stage did, and when speech began
5. writes a tiny Z-Image checkpoint (random weights, too), a diffusers pipeline
6. lets it paint a picture, and shows how far it has come at every step

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

# Keeps the screen to what the demo says. Before the imports: these are read when a library is loaded.
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
    image.save(output_dir / "picture.png")
    write_wav(output_dir / "voice.wav", make_audio(seed=7), SAMPLE_RATE)
    voice = base64.b64encode((output_dir / "voice.wav").read_bytes()).decode()
    content = [
        {"type": "image_pil", "image_pil": image},
        {"type": "input_audio", "input_audio": {"data": voice, "format": "wav"}},
        {"type": "text", "text": "What do you see, and what do you hear?"},
    ]
    return [{"role": "user", "content": content}]


def ask(llm: OmniLLM, messages: list[dict]) -> "tuple[list[OmniRequestOutput], float]":
    """Shows the text while it is written.

    Returns:
        What the pipeline made, text and speech, and after how many seconds the first of the speech was there.
    """
    from vllm_omni import ARSegmentEvent, ErrorEvent  # here, because it takes long, and the pipeline starts meanwhile

    sampling = [{"temperature": 0.0, "max_tokens": 32}, {"max_tokens": 64}, None]
    asked, heard = time.perf_counter(), 0.0
    print("\n  text:   ", end="")
    for event in llm.chat(messages, sampling, stream=True):
        if isinstance(event, ErrorEvent):
            raise event.error
        if isinstance(event, ARSegmentEvent) and event.final_output_type == "text":
            print(repr(event.text)[1:-1], end="", flush=True)
        elif isinstance(event, ARSegmentEvent):
            heard = heard or time.perf_counter() - asked
    print()
    return event.outputs, heard  # The last event is the CompletedEvent.


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
    begin = time.perf_counter()
    print("[1/6] writing a tiny Qwen3-Omni checkpoint: the real architecture with RANDOM weights")
    model = write_tiny_checkpoint("qwen3_omni_moe", folder / "qwen3_omni_moe")
    print(f"[2/6] making a picture and a spoken clip: {output_dir}/picture.png, {output_dir}/voice.wav")
    messages = make_question(output_dir)
    print("[3/6] starting the pipeline: thinker, talker and code2wav, each a vLLM engine in its own process")
    with OmniLLM(str(model), dtype="float32", max_model_len=1024, use_tqdm_on_load=False) as llm:
        print(f"[4/6] asking about both (ready after {time.perf_counter() - begin:.0f} s)")
        (text, speech), heard = ask(llm, messages)
    audio = speech.multimodal_output["audio"].numpy()
    write_wav(output_dir / "answer.wav", audio, SPEECH_RATE)
    (output_dir / "answer.txt").write_text(text.outputs[0].text, encoding="utf-8")
    seconds = len(audio) / SPEECH_RATE
    print(f"  speech: {output_dir}/answer.wav, {seconds:.2f} s, 24 kHz mono; begun after {heard:.2f} s")
    print_stages(speech, seconds)


def paint(folder: Path, output_dir: Path) -> None:
    """Steps 5 and 6."""
    from vllm_omni import ErrorEvent, ImageProgressEvent

    print("\n[5/6] writing a tiny Z-Image checkpoint, RANDOM weights again, and starting it: a diffusers pipeline")
    model = write_tiny_checkpoint("z_image", folder / "z_image")
    with OmniLLM(str(model), dtype="float32") as llm:
        print("[6/6] painting a lighthouse, as far as random weights can\n\n  step:   ", end="", flush=True)
        params = {"height": 256, "width": 256, "num_inference_steps": 12, "seed": 7}
        asked = time.perf_counter()
        for event in llm.generate("A lighthouse in a storm.", [params], stream=True):
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, ImageProgressEvent):
                print(event.step + 1, end=" ", flush=True)
        seconds = time.perf_counter() - asked
    event.outputs[0].images[0].save(output_dir / "painting.png")
    print(f"of {params['num_inference_steps']}")
    print(f"  painting: {output_dir}/painting.png, {params['width']}x{params['height']}, after {seconds:.2f} s")


def main() -> None:
    output_dir = Path(sys.argv[1] if len(sys.argv) > 1 else "demo_output")
    output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        speak(Path(folder), output_dir)
        paint(Path(folder), output_dir)
    print("\nThe weights are random: answer and painting mean nothing; the pipelines that made them are the real ones.")


if __name__ == "__main__":
    main()
