# SPDX-License-Identifier: Apache-2.0
"""What the shipped models answer, say and paint, judged by recognizers that know nothing of them.

The short form of `benchmarks/quality.py`: scenes and sentences are held out, training saw none of them.
"""

import base64
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from coloured_shapes.checker import agrees, find_shapes
from coloured_shapes.language import (
    REFUSAL,
    Scene,
    Turn,
    random_dialogue,
    random_painting,
    random_scene,
    random_sentence,
    split_words,
)
from coloured_shapes.pictures import draw
from coloured_shapes.recognizer import Recognizer
from coloured_shapes.speech import SAMPLE_RATE, SPEAKERS
from tests.coloured_shapes.recordings import RECORDINGS
from vllm_omni import OmniLLM
from vllm_omni.config.utils import find_checkpoint
from vllm_omni_talk.speech_recognition import count_understood

SMALL_WINDOWS = [
    {"from": 0, "to": 1, "window_size": 3, "first_window_size": 2},
    {"from": 1, "to": 2, "window_size": 3, "first_window_size": 1},
]


@pytest.fixture(scope="module", params=["as configured", pytest.param("small windows", marks=pytest.mark.slow)])
def omni(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OmniLLM]:
    config = yaml.safe_load(Path(find_checkpoint("shapes"), "stage_config.yaml").read_text())
    if request.param == "small windows":
        config["runtime"]["edges"] = SMALL_WINDOWS
    file = tmp_path_factory.mktemp("shapes") / "stage_config.yaml"
    file.write_text(yaml.safe_dump(config))
    with OmniLLM("shapes", stage_configs_path=str(file)) as llm:
        yield llm


@pytest.fixture(scope="module")
def painter() -> Iterator[OmniLLM]:
    with OmniLLM("shapes-painter") as llm:
        yield llm


@pytest.fixture(scope="module")
def recognizer() -> Recognizer:
    return Recognizer()


def answers(omni: OmniLLM, messages: list[list[dict[str, Any]]]) -> list[str]:
    return [output.outputs[0].text for output in omni.chat(messages, modalities=["text"], use_tqdm=False)]


def speech_of(omni: OmniLLM, sentences: Sequence[str], speaker: str) -> list[np.ndarray]:
    """Each on its own request, all at once."""
    messages = [[{"role": "user", "content": f"Say: {text}"}] for text in sentences]
    outputs = omni.chat(messages, additional_information={"speaker": speaker}, modalities=["audio"], use_tqdm=False)
    return [output.multimodal_output["audio"].numpy() for output in outputs]


def share_understood(recognizer: Recognizer, sentences: Sequence[str], waves: Sequence[np.ndarray]) -> float:
    words = [split_words(text) for text in sentences]
    heard = [recognizer.words(wave, SAMPLE_RATE) for wave in waves]
    return sum(map(count_understood, words, heard)) / sum(map(len, words))


def ask(rng: random.Random, scene: Scene, turns: Sequence[Turn], last: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation, with another form of its last question."""
    picture = draw(rng, scene, noise=rng.choice((0.0, 20.0)))
    messages = []
    for turn in turns[:-1]:
        messages.append({"role": "user", "content": [{"type": "text", "text": turn.question}]})
        messages.append({"role": "assistant", "content": turn.answer})
    messages.append({"role": "user", "content": [last]})
    messages[0]["content"].insert(0, {"type": "image_pil", "image_pil": picture})
    return messages


def share_right(omni: OmniLLM, messages: list[list[dict[str, Any]]], expected: list[str]) -> float:
    return float(np.mean([answer == right for answer, right in zip(answers(omni, messages), expected, strict=True)]))


def test_written_questions_are_answered(omni: OmniLLM) -> None:
    rng = random.Random(0)
    messages, expected = [], []
    for _ in range(40):
        scene = random_scene(rng, held_out=True)
        turns = random_dialogue(rng, scene)
        messages.append(ask(rng, scene, turns, {"type": "text", "text": turns[-1].question}))
        expected.append(turns[-1].answer)
    assert share_right(omni, messages, expected) >= 0.9


def test_spoken_questions_are_answered(omni: OmniLLM) -> None:
    rng = random.Random(1)
    messages, expected = [], []
    for question, dialogues in find_dialogues(rng, 4).items():
        data = base64.b64encode(RECORDINGS[question].read_bytes()).decode()
        for scene, turns in dialogues:
            recording = {"type": "input_audio", "input_audio": {"data": data, "format": "flac"}}
            messages.append(ask(rng, scene, turns, recording))
            expected.append(turns[-1].answer)
    assert share_right(omni, messages, expected) >= 0.85


def find_dialogues(rng: random.Random, count: int) -> dict[str, list[tuple[Scene, list[Turn]]]]:
    """For each recorded question, held-out scenes and dialogues that end with it."""
    found: dict[str, list[tuple[Scene, list[Turn]]]] = {question: [] for question in RECORDINGS}
    while any(len(dialogues) < count for dialogues in found.values()):
        scene = random_scene(rng, held_out=True)
        turns = random_dialogue(rng, scene)
        dialogues = found.get(" ".join(split_words(turns[-1].question)))
        if dialogues is not None and len(dialogues) < count:
            dialogues.append((scene, turns))
    return found


def test_a_later_turn_finds_those_before_it(omni: OmniLLM) -> None:
    def answer(messages: list[dict[str, Any]], salt: str) -> tuple[str, list[int]]:
        prompt: Any = {"messages": messages, "modalities": ["text", "audio"], "cache_salt": salt}
        written, spoken = omni.generate(prompt, use_tqdm=False)
        return written.outputs[0].text, [stage.num_cached_tokens for stage in spoken.stage_metrics[:2]]

    def user(*parts: dict[str, Any], text: str) -> dict[str, Any]:
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}

    rng = random.Random(2)
    picture = {"type": "image_pil", "image_pil": draw(rng, random_scene(rng, held_out=True))}
    messages = [user(picture, text="What is in the picture?")]
    num_cached = []
    for question in ("How many shapes are there?", "What is at the top left?", "And at the bottom right?"):
        text, cached = answer(messages, "one")
        num_cached.append(cached)
        messages += [{"role": "assistant", "content": text}, user(text=question)]
    text, cached = answer(messages, "one")
    assert answer(messages, "another") == (text, [0, 0]), "the same answer, computed as a whole"
    assert num_cached[0] == [0, 0] and min(num_cached[-1]) > 0
    assert all(now >= before for now, before in zip(cached, num_cached[-1], strict=True))


def test_other_requests_are_refused(omni: OmniLLM) -> None:
    requests = ["Write a letter to my mother.", "What is the weather today?", "Who is the queen?"]
    messages = [[{"role": "user", "content": text}] for text in requests]
    assert answers(omni, messages) == [REFUSAL] * len(requests)


@pytest.mark.parametrize("speaker", SPEAKERS)
@pytest.mark.parametrize("batch", [1, 8])
def test_speech_is_understood(omni: OmniLLM, recognizer: Recognizer, speaker: str, batch: int) -> None:
    rng = random.Random(batch)
    sentences = [random_sentence(rng, held_out=True) for _ in range(max(4, batch))]
    waves = []
    for begin in range(0, len(sentences), batch):
        waves += speech_of(omni, sentences[begin : begin + batch], speaker)
    assert share_understood(recognizer, sentences, waves) >= 0.75


@pytest.mark.parametrize("batch", [1, 8])
def test_paintings_show_what_was_asked(painter: OmniLLM, batch: int) -> None:
    rng = random.Random(batch)
    prompts = [random_painting(rng, held_out=True)[1] for _ in range(8)]
    paintings: list[Image.Image] = []
    for begin in range(0, len(prompts), batch):
        outputs = painter.generate(prompts[begin : begin + batch], [{"seed": begin}], use_tqdm=False)
        paintings += [output.images[0] for output in outputs]
    right = [agrees(find_shapes(painting), prompt) for painting, prompt in zip(paintings, prompts, strict=True)]
    assert np.mean(right) >= 0.75
