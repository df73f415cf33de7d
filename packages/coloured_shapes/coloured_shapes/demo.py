# SPDX-License-Identifier: Apache-2.0
"""The steps of `vllm-omni demo` in which the models of this package hear, see, speak and paint.

1. starts both: `shapes` (an omni model) and `shapes-painter` (a diffusers pipeline)
2. draws a picture that training never saw, and lets one of the model's voices ask about it
3. sends picture and voice to the model, which answers in text and speech
4. paints a sentence
5. asks the model what it sees in that painting

Every result is checked.
"""

import base64
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import soundfile
from PIL import Image

from coloured_shapes.checker import agrees, find_shapes
from coloured_shapes.language import Scene, describe, random_dialogue, random_scene, split_words
from coloured_shapes.pictures import draw
from coloured_shapes.recognizer import Recognizer
from coloured_shapes.speech import SAMPLE_RATE
from vllm_omni.entrypoints.cli.demo_results import (
    DemoAnswer,
    DemoResult,
    DemoRun,
    Verdict,
    print_verdict,
    stream_answer,
)
from vllm_omni.entrypoints.omni_llm import OmniLLM
from vllm_omni.extras import install_command
from vllm_omni_talk.speech_recognition import count_understood

OMNI, PAINTER = "shapes", "shapes-painter"
LEAST_UNDERSTOOD = 0.75
"""The share of an answer's words that must be recognized: the recognizer misses some of anyone's."""


def run_shapes(run: DemoRun) -> None:
    """The seed is of the picture, the questions and the painting."""
    started = time.perf_counter()
    run.step(f"starting {OMNI} (thinker, talker, code2wav) and {PAINTER}, each stage in its own process")
    with ThreadPoolExecutor(2) as pool:
        starting = pool.submit(OmniLLM, OMNI, use_tqdm_on_load=False), pool.submit(OmniLLM, PAINTER)
    with starting[0].result() as omni, starting[1].result() as painter:
        print(f"      ready after {time.perf_counter() - started:.0f} s")
        Demo(run, omni, painter).run()


class Demo:
    """The steps after the start."""

    def __init__(self, run: DemoRun, omni: OmniLLM, painter: OmniLLM) -> None:
        self._run, self._omni, self._painter = run, omni, painter
        self._folder, self._rng = run.folder, random.Random(run.seed)
        self._recognizer = Recognizer() if Recognizer.is_installed() else None

    def run(self) -> None:
        scene = random_scene(self._rng, held_out=True)
        picture = draw(self._rng, scene)
        picture.save(self._folder / "picture.png")
        turn = random_dialogue(self._rng, scene)[0]
        self._run.step(f"a new picture: {_list(scene)} -> {self._folder}/picture.png")
        print("      a voice asks about it: ", end="")
        asked = self._chat([{"type": "text", "text": f"Say: {turn.question}"}], "ben")
        self._check_answer("The question, spoken by the model", turn.question, asked, "question.wav")

        self._run.step("hears the question and sees the picture; it answers: ", end="")
        voice = base64.b64encode((self._folder / "question.wav").read_bytes()).decode()
        heard = {"type": "input_audio", "input_audio": {"data": voice, "format": "wav"}}
        answer = self._chat([{"type": "image_pil", "image_pil": picture}, heard], "ada")
        self._check_answer("The answer", turn.answer, answer, "answer.wav", picture="picture.png")

        sentence = describe(random_scene(self._rng, held_out=True))
        self._run.step(f"paints: {sentence}")
        painting = self._paint(sentence)

        self._run.step("sees its painting, and says what is in it: ", end="")
        seen = find_shapes(painting)
        question = {"type": "text", "text": "What is in the picture?"}
        answer = self._chat([{"type": "image_pil", "image_pil": painting}, question], "ada")
        expected = describe(seen) if seen.shapes else sentence
        self._check_answer("What it sees in the painting", expected, answer, "painting.wav", picture="painting.png")

    def _chat(self, content: list[dict[str, Any]], speaker: str) -> DemoAnswer:
        return stream_answer(self._omni, content, additional_information={"speaker": speaker})

    def _check_answer(
        self, title: str, expected: str, answer: DemoAnswer, file: str, picture: str | None = None
    ) -> None:
        soundfile.write(self._folder / file, answer.speech.numpy(), SAMPLE_RATE)
        seconds = len(answer.speech) / SAMPLE_RATE
        print(f"      speech: {self._folder}/{file}, {seconds:.1f} s, began after {answer.first_audio:.2f} s")
        is_right = answer.text == expected
        print_verdict("text", is_right, f"expected: {expected}")
        understood = f"not checked: {install_command('recognizer')}"
        if self._recognizer is not None:
            words = split_words(answer.text)
            heard = self._recognizer.words(answer.speech.numpy(), SAMPLE_RATE)
            num = count_understood(words, heard)
            understood = f"{num} of {len(words)} words recognized by PocketSphinx"
            is_clear = num >= LEAST_UNDERSTOOD * len(words)
            is_right &= is_clear
            print_verdict("speech", is_clear, understood)
        else:
            print(f"      speech {understood}")
        note = f"Expected: {expected} Speech: {understood}."
        verdict = _verdict(is_right)
        self._run.results.append(DemoResult(OMNI, title, answer.text, note, verdict, picture, file, answer.output))

    def _paint(self, sentence: str) -> Image.Image:
        started = time.perf_counter()
        (output,) = self._painter.generate(sentence, [{"seed": self._rng.randrange(1000)}], use_tqdm=False)
        painting = output.images[0]
        painting.save(self._folder / "painting.png")
        print(f"      painting: {self._folder}/painting.png, after {time.perf_counter() - started:.1f} s")
        seen = find_shapes(painting)
        is_right = agrees(seen, sentence)
        note = f"its pixels show: {_list(seen)}"
        print_verdict("painting", is_right, note)
        self._run.results.append(
            DemoResult(
                PAINTER,
                "The painting",
                sentence,
                note[0].upper() + note[1:] + ".",
                _verdict(is_right),
                "painting.png",
                None,
                output,
            )
        )
        return painting


def _verdict(is_right: bool) -> Verdict:
    return "right" if is_right else "wrong"


def _list(scene: Scene) -> str:
    return ", ".join(f"{shape.size} {shape.name}" for shape in scene.shapes) or "nothing"
