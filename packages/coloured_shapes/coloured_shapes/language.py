# SPDX-License-Identifier: Apache-2.0
"""The closed language of the model: scenes of coloured shapes, questions about them, and sentences to be spoken.

Everything is drawn from a `random.Random`. A scene or sentence is held out by its content (`is_held_out`), so that no
seed can bring it into the training data.
"""

import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("circle", "square", "triangle", "star")
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")
SIZES = ("small", "large")
PLACES = (
    "at the top left", "at the top", "at the top right",
    "on the left", "in the middle", "on the right",
    "at the bottom left", "at the bottom", "at the bottom right",
)  # fmt: skip
"""Row by row, on a grid of three by three."""
NUMBERS = ("no", "one", "two", "three")
HELD_OUT = 0.1
"""The share of scenes and sentences that training never sees."""

REFUSAL = "Sorry, I can only talk about shapes."
NO_PICTURE = "I see no picture."

_WORDS = {
    "noun": "apple baby bag ball band bank bed bird boat body book box boy bread bridge brother bus cake camera candle "
    "car castle cat chair child church city clock cloud coat coffee computer corner country cousin cup daughter day "
    "desk doctor dog dollar door dream dress driver egg engine family farm farmer father field finger fire fish floor "
    "food forest friend game garden girl glass hand hat hill horse hospital hotel house husband island jacket judge "
    "key king kitchen lake lamp language lawyer letter library light lion machine man map market minute money monkey "
    "month moon morning mother mountain mouse music name neighbor night number ocean office paper park party pencil "
    "people person phone piano picture pilot plane planet plant pocket police potato problem project queen question "
    "rabbit radio river road robot roof room salad sand school season shadow shape ship shirt shop sister snow soldier "
    "song spoon station stone storm story street student summer sun table tea teacher ticket tiger town toy train "
    "tree uncle village voice wall water wife wind window winter woman world",
    "verb": "answers asks becomes begins believes brings builds buys calls carries catches changes chooses cleans "
    "closes cooks counts cuts draws drinks drives drops eats enjoys feels fills finds finishes follows forgets gets "
    "gives has hears helps holds keeps kicks knows learns leaves likes loses loves makes meets moves needs opens "
    "paints plays pulls pushes puts reads remembers says sells sends shows sings starts stops studies takes tells "
    "thinks touches uses visits wants washes watches wins works writes",
    "adjective": "angry bad beautiful best better big black bright broken brown busy careful cheap clean clever cold "
    "dark deep different difficult dirty dry easy empty famous fast favorite fresh friendly full funny gold good great "
    "happy hard heavy high hot important interesting kind little long lucky modern narrow nervous new nice noisy old "
    "open other perfect pink pretty quick quiet ready rich round sad safe secret short silver simple slow soft "
    "special strange strong sweet tall thick thin tired warm white wild wonderful wooden wrong young",
    "adverb": "again always badly carefully early finally later never now often quickly quietly slowly sometimes soon "
    "together today tomorrow tonight usually well yesterday",
    "preposition": "about above across after before behind below beside between for from in inside near of on outside "
    "over past through to under with without",
    "pronoun": "I he it she they we you everybody nobody somebody",
    "possessive": "her his my our their your",
    "other": "a an and are at because but can do does everything go how is many me more not nothing only please see "
    "say sorry than that the there these this those twenty until very was were what when where which who why will yes "
    "be four five six seven eight nine ten hello talk shapes circles squares triangles stars color colour size left "
    "right top bottom its been here",
}
WORD_CLASSES = {name: tuple(words.split()) for name, words in _WORDS.items()}
WORDS = tuple(
    dict.fromkeys(
        itertools.chain(
            *WORD_CLASSES.values(), KINDS, COLOURS, SIZES, NUMBERS, ("describe", "repeat", "middle", "or", "place")
        )
    )
)
_UNCLEAR = (
    "bag band bank bed bird boat book boy car cat clock cloud coat cup daughter doctor dog door floor game hat horse "
    "house key king light moon pencil rabbit road room school season ship shirt soldier song tea toy voice wall water "
    "woman builds draws eats fills follows gets helps holds kicks leaves needs pulls sings uses wants pushes wins "
    "cooks bad big bright cheap cold deep full gold hard high hot noisy old open quick sad safe short thick thin warm "
    "white wooden across for through than"
)
SPOKEN_WORDS = tuple(word for word in WORDS if word not in _UNCLEAR.split())
"""Those of sentences. The others are known, but mistaken for each other when they are said one by one (ship, shape)."""
PUNCTUATION = (".", ",", "?", "!", ":")


# Scenes.


@dataclass(frozen=True)
class Shape:
    """`place` is an index of `PLACES`."""

    kind: str
    colour: str
    size: str
    place: int

    @property
    def name(self) -> str:
        return f"{self.colour} {self.kind}"

    @property
    def row(self) -> int:
        return self.place // 3

    @property
    def column(self) -> int:
        return self.place % 3


@dataclass(frozen=True)
class Scene:
    """One to three shapes in reading order."""

    shapes: tuple[Shape, ...]

    def find(self, **properties: str) -> list[Shape]:
        return [shape for shape in self.shapes if all(getattr(shape, k) == v for k, v in properties.items())]


def random_scene(rng: random.Random, held_out: bool = False) -> Scene:
    while True:
        places = sorted(rng.sample(range(9), rng.choice((1, 2, 2, 3, 3))))
        scene = Scene(
            tuple(Shape(rng.choice(KINDS), rng.choice(COLOURS), rng.choice(SIZES), place) for place in places)
        )
        if is_held_out(describe(scene)) == held_out:
            return scene


def is_held_out(text: str) -> bool:
    """Whether a sentence, or the scene that it describes, belongs to the evaluation."""
    digest = hashlib.sha256(" ".join(split_words(text)).encode()).digest()
    return digest[0] < 256 * HELD_OUT


def split_words(text: str) -> list[str]:
    """Lower case, without punctuation."""
    return "".join(c if c.isalpha() else " " for c in text.lower()).split()


def relation(first: Shape, second: Shape) -> str:
    if first.column != second.column:
        return "left of" if first.column < second.column else "right of"
    return "above" if first.row < second.row else "below"


def article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    return text[0].upper() + text[1:] + "."


def join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def describe(scene: Scene) -> str:
    """The answer to "What is in the picture?", and a prompt for the painter."""
    names = [article(shape.name) for shape in scene.shapes]
    if len(names) == 1:
        return sentence(f"{names[0]} {PLACES[scene.shapes[0].place]}")
    if len(names) == 2:
        return sentence(f"{names[0]} is {relation(*scene.shapes)} {names[1]}")
    return sentence(join(names))


def painting_prompt(rng: random.Random, scene: Scene) -> str:
    """One of the ways to ask for a picture of a scene, without what it leaves open."""
    with_size = rng.random() < 0.4
    names = [article(f"{shape.size} {shape.name}" if with_size else shape.name) for shape in scene.shapes]
    if len(names) == 1:
        text = rng.choice((names[0], f"{names[0]} {PLACES[scene.shapes[0].place]}"))
    elif len(names) == 2:
        how = relation(*scene.shapes)
        text = rng.choice((f"{names[0]} is {how} {names[1]}", f"{names[0]} {how} {names[1]}", " and ".join(names)))
    else:
        text = join(names)
    return rng.choice((text, sentence(text)))


def random_painting(rng: random.Random, held_out: bool = False) -> tuple[Scene, str]:
    """A scene and a prompt for it."""
    while True:
        scene = random_scene(rng, held_out)
        prompt = painting_prompt(rng, scene)
        if is_held_out(prompt) == held_out:
            return scene, prompt


# Questions.


@dataclass(frozen=True)
class Turn:
    """
    Attributes:
        topic: The only shape that it is about; None if there is no such shape.
    """

    question: str
    answer: str
    topic: Shape | None = None


def random_dialogue(rng: random.Random, scene: Scene | None) -> list[Turn]:
    """One turn, or two: the second question refers to the first one's shape."""
    if scene is None:
        question = rng.choice(_QUESTIONS)(rng, random_scene(rng)).question
        return [Turn(question, NO_PICTURE)]
    turns = [rng.choice(_QUESTIONS)(rng, scene)]
    if turns[0].topic is not None and rng.random() < 0.5:
        turns.append(_follow_up(rng, turns[0].topic))
    return turns


def _describe(rng: random.Random, scene: Scene) -> Turn:
    texts = ("What is in the picture?", "What do you see?", "Describe the picture.", "What is here?")
    return Turn(rng.choice(texts), describe(scene), scene.shapes[0] if len(scene.shapes) == 1 else None)


def _count(rng: random.Random, scene: Scene) -> Turn:
    kind, colour = rng.choice(KINDS), rng.choice(COLOURS)
    if rng.random() < 0.5:  # more often about what is there
        shape = rng.choice(scene.shapes)
        kind, colour = shape.kind, shape.colour
    what, found = rng.choice(
        [
            ("shape", list(scene.shapes)),
            (kind, scene.find(kind=kind)),
            (f"{colour} shape", scene.find(colour=colour)),
        ]
    )
    number = f"{NUMBERS[len(found)]} {what}" + ("" if len(found) == 1 else "s")
    verb = "is" if len(found) == 1 else "are"
    texts = (f"How many {what}s are there?", f"How many {what}s do you see?", f"How many {what}s are in the picture?")
    return Turn(rng.choice(texts), f"There {verb} {number}.", found[0] if len(found) == 1 else None)


def _colour(rng: random.Random, scene: Scene) -> Turn:
    kind, found = _kind(rng, scene)
    word = rng.choice(("colour", "color"))
    texts = (f"What {word} is the {kind}?", f"What is the {word} of the {kind}?", f"Which {word} has the {kind}?")
    return _about(rng.choice(texts), kind, found, "colour")


def _where(rng: random.Random, scene: Scene) -> Turn:
    kind, found = _kind(rng, scene)
    name = kind if not found or rng.random() < 0.5 else found[0].name
    texts = (f"Where is the {name}?", f"Where do you see the {name}?", f"In which place is the {name}?")
    if not found:
        return Turn(rng.choice(texts), f"There is no {name}.")
    return Turn(rng.choice(texts), f"The {name} is {PLACES[found[0].place]}.", found[0])


def _size(rng: random.Random, scene: Scene) -> Turn:
    kind, found = _kind(rng, scene)
    texts = (f"How big is the {kind}?", f"Is the {kind} small or large?", f"What is the size of the {kind}?")
    return _about(rng.choice(texts), kind, found, "size")


def _about(question: str, kind: str, found: list[Shape], attribute: str) -> Turn:
    """The turn of a question for an attribute of the only shape of a kind, if there is one."""
    if not found:
        return Turn(question, f"There is no {kind}.")
    return Turn(question, f"The {kind} is {getattr(found[0], attribute)}.", found[0])


def _what_is_at(rng: random.Random, scene: Scene) -> Turn:
    place = rng.choice(scene.shapes).place if rng.random() < 0.7 else rng.randrange(9)
    found = [shape for shape in scene.shapes if shape.place == place]
    texts = (f"What is {PLACES[place]}?", f"What do you see {PLACES[place]}?")
    if not found:
        return Turn(rng.choice(texts), "Nothing.")
    return Turn(rng.choice(texts), sentence(article(found[0].name)), found[0])


def _what_is_beside(rng: random.Random, scene: Scene) -> Turn:
    """Only of two shapes; of others it is the question for their number."""
    if len(scene.shapes) != 2 or scene.shapes[0].kind == scene.shapes[1].kind:
        return _count(rng, scene)
    target, other = rng.sample(scene.shapes, 2)
    asked = rng.choice((relation(target, other), relation(target, other), relation(other, target)))
    question = f"What is {asked} the {rng.choice((other.kind, other.name))}?"
    if asked != relation(target, other):
        return Turn(question, "Nothing.")
    return Turn(question, sentence(article(target.name)), target)


def _is_there(rng: random.Random, scene: Scene) -> Turn:
    shape = rng.choice(scene.shapes)
    kind, colour = rng.choice(((shape.kind, shape.colour),) * 2 + ((rng.choice(KINDS), rng.choice(COLOURS)),))
    texts = (f"Is there {article(f'{colour} {kind}')}?", f"Do you see {article(f'{colour} {kind}')}?")
    found = scene.find(kind=kind, colour=colour)
    answer = "Yes, I see it." if found else "No, I do not."
    return Turn(rng.choice(texts), answer, found[0] if len(found) == 1 else None)


def _which(rng: random.Random, scene: Scene) -> Turn:
    colour = rng.choice(scene.shapes).colour if rng.random() < 0.7 else rng.choice(COLOURS)
    found = scene.find(colour=colour)
    if len(found) > 1:
        return _count(rng, scene)
    texts = (f"Which shape is {colour}?", f"What is {colour}?")
    if not found:
        return Turn(rng.choice(texts), f"Nothing is {colour}.")
    return Turn(rng.choice(texts), f"The {found[0].kind} is {colour}.", found[0])


_QUESTIONS = (
    _describe, _describe, _count, _colour, _where, _size, _what_is_at, _what_is_beside, _is_there, _which,
)  # fmt: skip


def _kind(rng: random.Random, scene: Scene) -> tuple[str, list[Shape]]:
    """A kind of which there is one shape, or none."""
    single = [kind for kind in KINDS if len(scene.find(kind=kind)) == 1]
    absent = [kind for kind in KINDS if not scene.find(kind=kind)]
    kind = rng.choice(single if single and rng.random() < 0.8 else absent)
    return kind, scene.find(kind=kind)


def _follow_up(rng: random.Random, topic: Shape) -> Turn:
    word = rng.choice(("colour", "color"))
    questions, answer = rng.choice(
        (
            ((f"And its {word}?", f"What {word} is it?"), f"It is {topic.colour}."),
            (("And its size?", "How big is it?", "Is it small or large?"), f"It is {topic.size}."),
            (("And where is it?", "Where is it?"), f"It is {PLACES[topic.place]}."),
        )
    )
    return Turn(rng.choice(questions), answer, topic)


# Sentences.

_TEMPLATES = (
    "the {a} {n} {v} the {n}",
    "the {n} {v} a {n} {p} the {n}",
    "{o} {n} {v} the {a} {n} {d}",
    "{d} the {n} {v} {p} the {n}",
    "{who} {v} the {n} and the {a} {n}",
    "{who} {v} {o} {n} {d}",
    "this {n} is {a} but that {n} is {a}",
    "there is a {a} {n} {p} the {n}",
    "the {n} was {a} until the {n} {v} it",
    "they were not {a} because {o} {n} is {d} {a}",
    "only {c} people were {p} the {n}",
    "the number of the {n} is {c}",
    "where is {o} {a} {n}",
    "who {v} those people {p} the {n}",
    "what is {p} the {n}",
    "why does it say {a} {n}",
    "how are these people {p} the {n}",
    "everything will be {a} when the {n} {v}",
    "please say hello to {o} {a} {n}",
    "many people are {a} and {a}",
    "{w} {w} {w}",
    "{w} {w} {w} {w}",
    "{w} {w} {w} {w} {w}",
)
_CLASS_OF_FIELD = {
    "a": "adjective", "n": "noun", "v": "verb", "o": "possessive", "d": "adverb", "p": "preposition"
}  # fmt: skip
_CHOICES = {
    field: [word for word in WORD_CLASSES[name] if word in SPOKEN_WORDS] for field, name in _CLASS_OF_FIELD.items()
} | {
    "who": ["he", "she", "everybody", "nobody", "somebody"],
    "c": ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twenty"],
    "w": list(SPOKEN_WORDS),
}


def random_sentence(rng: random.Random, held_out: bool = False) -> str:
    """A sentence of known words: one of the templates, some of them words in random order."""
    while True:
        parts = [_fill(rng, part) for part in rng.choice(_TEMPLATES).split()]
        text = " ".join(parts)
        if is_held_out(text) == held_out:
            return sentence(text)


def _fill(rng: random.Random, part: str) -> str:
    if part[0] != "{":
        return part
    field, end = part[1:].split("}")
    return rng.choice(_CHOICES[field]) + end


def say_request(rng: random.Random, text: str) -> Turn:
    """A request to repeat a sentence."""
    return Turn(f"{rng.choice(('Say', 'Please say', 'Repeat', 'Please repeat'))}: {text}", text)
