# SPDX-License-Identifier: Apache-2.0
"""Answers, speech and paintings of the shipped models, judged by recognizers that know nothing of them.

    python benchmarks/quality.py [--number N] [--output FILE.json] [--quick]

Questions, scenes and sentences are held out by content: training saw none of them. Spoken questions come from flite
(`apt-get install flite`), half of them by a voice that training never heard (of a speaker that it heard in recordings
of another quality), with other speeds and pitches, and noise.
Speech is recognized by PocketSphinx with the vocabulary of the shapes' language and a trigram model of it (descriptions
of paintings: with a grammar of descriptions); what flite itself says of the same sentences is recognized beside it.
Paintings are judged by their pixels. The models run through `OmniLLM`, and through `vllm serve`.
"""

import base64
import io
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import soundfile
import torch
from PIL import Image
from report import Report, make_parser, mean, progress
from servers import start_server

from coloured_shapes.checker import agrees, find_shapes
from coloured_shapes.language import (
    Turn,
    describe,
    random_dialogue,
    random_painting,
    random_scene,
    random_sentence,
    split_words,
)
from coloured_shapes.pictures import draw
from coloured_shapes.recognizer import Recognizer
from coloured_shapes.speech import HEARD_VOICES, INPUT_RATE, SAMPLE_RATE, SPEAKERS, add_noise, speak
from vllm_omni import OmniLLM
from vllm_omni.config.utils import find_checkpoint
from vllm_omni.inputs import OmniPrompt
from vllm_omni.testing.diffusers_oracle import DiffusersOracle
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni_talk.speech_recognition import count_understood

OMNI, PAINTER = "shapes", "shapes-painter"
NEW_VOICE = "kal16"
VOICE = "Ada"
STEPS, GUIDANCE = 20, 3.0
"""As in the painter's stage configuration."""


@dataclass(frozen=True)
class Question:
    """A conversation whose last answer is judged; `voice`: of flite, if it is spoken."""

    messages: list[Any]
    answer: str
    voice: str | None


def make_question(rng: random.Random, is_spoken: bool) -> Question:
    """About a picture, half of them noisy; every other has two turns."""
    scene = random_scene(rng, held_out=True)
    picture = draw(rng, scene, noise=rng.choice((0.0, rng.uniform(5, 30))))
    voice = None if not is_spoken else NEW_VOICE if rng.random() < 0.5 else rng.choice(HEARD_VOICES)
    messages: list[dict[str, Any]] = []
    turns = random_dialogue(rng, scene)
    for index, turn in enumerate(turns):
        content = [{"type": "text", "text": turn.question} if voice is None else _spoken(rng, turn, voice)]
        if index == 0:
            content.insert(0, {"type": "image_url", "image_url": {"url": _data_url("image/png", _png(picture))}})
        messages.append({"role": "user", "content": content})
        if turn is not turns[-1]:
            messages.append({"role": "assistant", "content": turn.answer})
    return Question(messages, turns[-1].answer, voice)


def _spoken(rng: random.Random, turn: Turn, voice: str) -> dict[str, Any]:
    wave = speak(turn.question, voice, INPUT_RATE, speed=rng.uniform(0.85, 1.2), pitch=rng.uniform(0.9, 1.15))
    return _audio_part(add_noise(rng, wave), INPUT_RATE)


def _audio_part(wave: np.ndarray, rate: int) -> dict[str, Any]:
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format="WAV")
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}}


def _png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _data_url(mime: str, content: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


class Judge:
    """Words of a sentence that are understood, for speech as float32 `[samples]` at 24 kHz."""

    def __init__(self) -> None:
        self._recognizer, self._recognizer_of_descriptions = Recognizer(), Recognizer(only_descriptions=True)

    def share(self, sentences: Sequence[str], waves: Sequence[np.ndarray]) -> float:
        """Of all words."""
        understood = [self.count(text, wave) for text, wave in zip(sentences, waves, strict=True)]
        return sum(understood) / sum(len(split_words(text)) for text in sentences)

    def count(self, text: str, wave: np.ndarray) -> int:
        return count_understood(split_words(text), self._recognizer.words(wave, SAMPLE_RATE))

    def understands_description(self, text: str, wave: np.ndarray) -> bool:
        return self._recognizer_of_descriptions.words(wave, SAMPLE_RATE) == split_words(text)


class Measurement:
    """One run of all parts; their figures go to the report."""

    def __init__(self, report: Report, number: int) -> None:
        self._report, self._number = report, number
        self._judge = Judge()
        rng = random.Random("quality")
        progress("preparing questions, sentences and what flite says")
        self._typed = [make_question(rng, is_spoken=False) for _ in range(number)]
        self._spoken = [make_question(rng, is_spoken=True) for _ in range(number)]
        self._sentences = [random_sentence(rng, held_out=True) for _ in range(number // 2)]
        self._prompts = [random_painting(rng, held_out=True)[1] for _ in range(number // 2)]
        self._descriptions = [describe(random_scene(rng, held_out=True)) for _ in range(number // 4)]
        self._originals = {
            name: self._judge.share(self._sentences, [speak(text, voice) for text in self._sentences])
            for name, voice in SPEAKERS.items()
        }
        for name, share in self._originals.items():
            self._add(f"words of flite ({name}'s voice)", "", share)

    def offline(self, omni: OmniLLM, painter: OmniLLM) -> None:
        for name, questions in (("typed", self._typed), ("spoken", self._spoken)):
            progress(f"OmniLLM: {name} questions")
            outputs = omni.chat([q.messages for q in questions], use_tqdm=False, modalities=["text"])
            right = [out.outputs[0].text == q.answer for out, q in zip(outputs, questions, strict=True)]
            self._add(f"{name} answers right", "OmniLLM", mean(right), name)
            for voice in sorted({q.voice for q in questions if q.voice}):
                of_voice = [is_right for is_right, q in zip(right, questions, strict=True) if q.voice == voice]
                self._add(f"{name} answers right, voice {voice}", "OmniLLM", mean(of_voice))
        for size in (1, 8):
            progress(f"OmniLLM: paintings, {size} at once")
            paintings: list[Image.Image] = []
            for begin in range(0, len(self._prompts), size):
                texts = self._prompts[begin : begin + size]
                outputs = painter.generate(texts, [{"seed": begin}], use_tqdm=False)
                paintings += [output.images[0] for output in outputs]
            self._add_paintings(f"OmniLLM, {size} at once", paintings, "paintings" if size == 1 else None)
        self._circle(omni, painter)

    def _circle(self, omni: OmniLLM, painter: OmniLLM) -> None:
        progress("OmniLLM: sentence, painting, seen, spoken, recognized")
        outputs = painter.generate(self._descriptions, [{"seed": 5}], use_tqdm=False)
        question = {"type": "text", "text": "What is in the picture?"}
        messages: list[list[Any]] = [
            [{"role": "user", "content": [{"type": "image_pil", "image_pil": output.images[0]}, question]}]
            for output in outputs
        ]
        outputs = omni.chat(messages, use_tqdm=False)
        waves = [output.multimodal_output["audio"].numpy() for output in outputs[1::2]]
        right = list(map(self._judge.understands_description, self._descriptions, waves))
        self._add("circle: sentence painted, seen, spoken, recognized", "OmniLLM", mean(right), "circle")

    def online(self, client: openai.OpenAI, painter: openai.OpenAI) -> None:
        for name, questions in (("typed", self._typed), ("spoken", self._spoken)):
            progress(f"HTTP: {name} questions")
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda q: _ask(client, q), questions))
            right = [answer == q.answer for answer, q in zip(answers, questions, strict=True)]
            self._add(f"{name} answers right", "HTTP", mean(right))
        parts: tuple[tuple[str, Callable[..., np.ndarray], int], ...] = (
            ("words_whole", _speech, 1), ("words_streamed", _streamed_speech, 1), ("words_c16", _streamed_speech, 16),
        )  # fmt: skip
        for ratio, say, concurrency in parts:
            shares = []
            for voice in SPEAKERS:
                progress(f"HTTP: {ratio}, {voice}")
                with ThreadPoolExecutor(concurrency) as pool:
                    waves = list(pool.map(lambda text: say(client, text, voice), self._sentences))  # noqa: B023
                share = self._judge.share(self._sentences, waves)
                shares.append(share / self._originals[voice])
                self._add(f"{ratio.replace('_', ' ')}, {voice}", "HTTP", share)
            self._report.ratios[ratio] = min(shares)
        progress("HTTP: paintings")
        with ThreadPoolExecutor(8) as pool:
            seeds = range(len(self._prompts))
            paintings = list(pool.map(lambda text, seed: _painting(painter, text, seed), self._prompts, seeds))
        self._add_paintings("HTTP, 8 at once", paintings)

    def reference(self, omni: OmniLLM, painter: OmniLLM) -> None:
        """The same by HF transformers and by bare diffusers."""
        progress("HF transformers and bare diffusers")
        number = max(4, self._number // 10)
        oracle = HFOracle(find_checkpoint(OMNI), num_threads=1)
        same = []
        for question in self._typed[:number] + self._spoken[:number]:
            prompt = omni_prompt(oracle, question)
            theirs = oracle.generate(
                prompt, thinker_max_tokens=64, talker_max_tokens=256, repetition_penalty=1.0, speaker=VOICE
            )
            prompt["additional_information"] = {"speaker": VOICE}
            (text, speech) = omni.generate([prompt], use_tqdm=False)
            ours = text.outputs[0].token_ids
            wave = speech.multimodal_output["audio"]
            close = len(wave) == len(theirs.audio) and torch.allclose(wave, theirs.audio, atol=1e-3)
            same.append(list(ours) == theirs.thinker_token_ids and close)
        self._add("the same text and speech as HF transformers", "OmniLLM", mean(same))
        diffusers = DiffusersOracle(find_checkpoint(PAINTER))
        same_paintings = []
        for seed, description in enumerate(self._prompts[:number]):
            theirs_painted = diffusers.generate(
                description, seed=seed, height=96, width=96, num_inference_steps=STEPS, guidance_scale=GUIDANCE
            )
            (output,) = painter.generate(description, [{"seed": seed, "output_format": "np"}], use_tqdm=False)
            same_paintings.append(bool(np.abs(output.images[0] - theirs_painted.numpy()).max() < 1e-2))
        self._add("the same painting as diffusers", "OmniLLM", mean(same_paintings))
        self._report.ratios["agrees_with_reference"] = mean([*same, *same_paintings])

    def _add_paintings(self, how: str, paintings: Sequence[Image.Image], ratio: str | None = None) -> None:
        right = [agrees(find_shapes(p), text) for p, text in zip(paintings, self._prompts, strict=True)]
        self._add("paintings right", how, mean(right), ratio)

    def _add(self, what: str, how: str, share: float, ratio: str | None = None) -> None:
        self._report.rows.append({"what": what, "through": how, "share": share})
        if ratio is not None:
            self._report.ratios[ratio] = share


def omni_prompt(oracle: HFOracle, question: Question) -> OmniPrompt:
    """In vLLM's format, with media of all turns."""
    media: dict[str, list[Any]] = {}
    messages = []
    for message in question.messages:
        parts = []
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] == "image_url":
                content = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                media.setdefault("image", []).append(Image.open(io.BytesIO(content)))
                parts.append({"type": "image"})
            elif part["type"] == "input_audio":
                wave, rate = soundfile.read(io.BytesIO(base64.b64decode(part["input_audio"]["data"])), dtype="float32")
                media.setdefault("audio", []).append((wave, rate))
                parts.append({"type": "audio"})
            else:
                parts.append(part)
        messages.append({"role": message["role"], "content": parts or message["content"]})
    text = oracle.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return {"prompt": text, "multi_modal_data": media}


def _ask(client: openai.OpenAI, question: Question) -> str:
    answer = client.chat.completions.create(model=OMNI, messages=question.messages, modalities=["text"])
    return answer.choices[0].message.content or ""


def _speech(client: openai.OpenAI, text: str, voice: str) -> np.ndarray:
    answer = client.audio.speech.create(
        model=OMNI, input=text, voice=voice.lower(), response_format="wav", extra_body={"stream": False}
    )
    return soundfile.read(io.BytesIO(answer.content), dtype="float32")[0]


def _streamed_speech(client: openai.OpenAI, text: str, voice: str) -> np.ndarray:
    create = client.audio.speech.with_streaming_response.create
    with create(model=OMNI, input=text, voice=voice.lower(), response_format="pcm") as answer:
        content = b"".join(answer.iter_bytes())
    return np.frombuffer(content, "<i2").astype(np.float32) / 32768


def _painting(client: openai.OpenAI, text: str, seed: int) -> Image.Image:
    answer = client.images.generate(model=PAINTER, prompt=text, extra_body={"seed": seed})
    assert answer.data
    return Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or "")))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--number", type=int, metavar="N", help="questions of each kind (default: 200, quick: 40)")
    args = parser.parse_args()
    if shutil.which("flite") is None:
        sys.exit("flite speaks the questions: apt-get install flite")
    number = args.number or (40 if args.quick else 200)
    report = Report("quality", {"questions": number, "sentences": number // 2, "circles": number // 4})
    measurement = Measurement(report, number)
    with OmniLLM(OMNI) as omni, OmniLLM(PAINTER) as painter:
        measurement.offline(omni, painter)
        measurement.reference(omni, painter)
    with tempfile.TemporaryDirectory() as folder:
        serve = [str(Path(sys.executable).with_name("vllm")), "serve"]
        with (
            start_server([*serve, OMNI, "--omni"], Path(folder)) as omni_url,
            start_server([*serve, PAINTER, "--omni"], Path(folder)) as painter_url,
        ):
            clients = [openai.OpenAI(base_url=f"{url}/v1", api_key="none") for url in (omni_url, painter_url)]
            measurement.online(*clients)
    report.notes = [
        "words_...: the worse voice's share of words understood, divided by that of flite's originals",
        "circle: all words are as in the sentence that was painted; recognized with a grammar of descriptions",
    ]
    report.finish(args.output)


if __name__ == "__main__":
    main()
