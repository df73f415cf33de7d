# SPDX-License-Identifier: Apache-2.0
"""The closed language of the shipped models, and the checker of pictures, which judge their results."""

import random

import pytest
from PIL import Image

from coloured_shapes.checker import agrees, find_shapes
from coloured_shapes.language import (
    COLOURS,
    KINDS,
    PLACES,
    SIZES,
    SPOKEN_WORDS,
    WORDS,
    Scene,
    Shape,
    describe,
    is_held_out,
    painting_prompt,
    random_dialogue,
    random_scene,
    random_sentence,
    split_words,
)
from coloured_shapes.pictures import draw

LEFT_OF = Scene((Shape("circle", "red", "small", 3), Shape("square", "blue", "large", 5)))


def test_every_word_of_questions_answers_and_sentences_is_in_the_vocabulary() -> None:
    rng = random.Random(0)
    texts = [random_sentence(rng) for _ in range(300)]
    for _ in range(1000):
        scene = random_scene(rng)
        texts += [part for turn in random_dialogue(rng, scene) for part in (turn.question, turn.answer)]
        texts += [describe(scene), painting_prompt(rng, scene)]
    assert {word for text in texts for word in split_words(text)} <= {word.lower() for word in WORDS}
    assert len(SPOKEN_WORDS) >= 400


@pytest.mark.parametrize("held_out", [False, True])
def test_what_is_held_out_follows_from_the_content(held_out: bool) -> None:
    rng = random.Random(1)
    for _ in range(200):
        assert is_held_out(describe(random_scene(rng, held_out))) == held_out
        assert is_held_out(random_sentence(rng, held_out).upper()) == held_out


def test_answers_are_true() -> None:
    """For questions whose answer follows from the scene in a way that is written differently here."""
    rng = random.Random(2)
    for _ in range(2000):
        scene = random_scene(rng)
        turn, *_ = random_dialogue(rng, scene)
        if turn.question.startswith("How many shapes"):
            number = len(scene.shapes)
            assert turn.answer == f"There {'is' if number == 1 else 'are'} {('one', 'two', 'three')[number - 1]} " + (
                "shape." if number == 1 else "shapes."
            )
        elif turn.question.startswith("Where is the") and "no" not in turn.answer:
            (shape,) = [s for s in scene.shapes if s.kind in turn.question]
            assert turn.answer.endswith(f" is {PLACES[shape.place]}.")


def test_the_checker_finds_what_is_drawn() -> None:
    rng = random.Random(3)
    scenes = [random_scene(rng) for _ in range(150)]
    found = [find_shapes(draw(rng, scene)) for scene in scenes]
    assert sum(a == b for a, b in zip(scenes, found, strict=True)) >= 148


@pytest.mark.parametrize("shape", [Shape(k, c, s, 4) for k in KINDS for c in COLOURS for s in SIZES])
def test_the_checker_tells_all_shapes_apart(shape: Shape) -> None:
    assert find_shapes(draw(random.Random(4), Scene((shape,)))) == Scene((shape,))


@pytest.mark.parametrize(
    ("prompt", "is_right"),
    [
        ("a red circle is left of a blue square", True),
        ("A blue square and a red circle.", True),
        ("a small red circle left of a large blue square", True),
        ("a large red circle left of a large blue square", False),
        ("a red circle is right of a blue square", False),
        ("a red circle", False),
        ("a red circle, a blue square and a green star", False),
        ("a green circle is left of a blue square", False),
    ],
)
def test_a_prompt_agrees_with_what_it_describes_alone(prompt: str, is_right: bool) -> None:
    assert agrees(LEFT_OF, prompt) == is_right


def test_a_picture_without_shapes_agrees_with_nothing() -> None:
    seen = find_shapes(Image.new("RGB", (96, 96), "white"))
    assert seen == Scene(()) and not agrees(seen, "a red circle")
