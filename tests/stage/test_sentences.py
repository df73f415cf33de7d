# SPDX-License-Identifier: Apache-2.0
"""Sentences are whole, nothing is lost, and the pieces in which a text arrives do not matter."""
# ruff: noqa: RUF001 (punctuation of many languages)

import random

import pytest

from vllm_omni.stage.sentences import MAX_CHARS, SentenceCutter


def cut(text: str, sizes: list[int] | None = None, *, first_is_clause: bool = False) -> list[str]:
    """The sentences of a text that arrives in pieces of these sizes, then in single characters; None: at once."""
    cutter = SentenceCutter(first_is_clause=first_is_clause)
    found, start = [], 0
    for size in [len(text)] if sizes is None else sizes:
        found += cutter.add(text[start : start + size])
        start += size
    for character in text[start:]:
        found += cutter.add(character)
    return found + cutter.add("", is_last=True)


@pytest.mark.parametrize(
    "sentences",
    [
        ["Hello there. ", "How are you? ", "Fine! ", "Good"],
        ["Mr. Smith met Dr. J. R. Jones at 5 p.m. on Jan. 5 in St. Louis. ", "They left."],
        ["Use a tool, e.g. Python, i.e. A language. ", "It works, etc. and so on. ", "Done."],
        ["He lives in the U.S. Army base. ", "She left the U.S. ", "The end."],
        ["Pi is 3.14, and 1,000.5 is more. ", "See No. 5 and Fig. 3. ", "No. ", "Yes."],
        ["It was 1990. ", "Then 3 cats came. ", "2 stayed."],
        ['"Stop!" he said. ', '"Why?" ', '"Because." ', "(It was late.) ", "**Bold end.** ", "Next."],
        ["Wait... what? ", "Well… maybe. ", "No... ", "Yes!"],
        ["What?! ", "Really?? ", "OK."],
        ["A heading\n", "First paragraph without an end\n\n", "Second one. ", "Its end.\n", "Last"],
        ["Steps:\n", "1. Open the door.\n", "2. Go in.\n", "- An item\n", "* another\n"],
        ["The steps are: 1. Open it. ", "2. Close it."],
        ["你好。", "你是谁？", "「真的！」", "好"],
        ["Visit www.example.com. ", "See main.py. ", "Version 2.0.1 is out. ", "Bye."],
        ["He doesn't. ", "Cats don't. ", "Dogs do."],
        ["Plan B. ", "Then we go. ", "It was I. ", "He knew."],
        ["\n\n... Hello there. ", "--- \n Yes."],
        ["It costs $5. ", "😀 Great! ", "Élan vital. ", "Ça va."],
        ["```python\n", "x = a.b(1)\n", "print(x)\n", "```\nDone."],
        ["oh! ", "how nice? ", "very nice. and so. ", "Done."],
        ["the cat is on the sea. ", "it sees a dog. ", "then it looks for help"],
        ["use a tool, e.g. python, etc. and so on. ", "see fig. a of j. smith, at 5 p.m. in main.py. ", "it was red."],
        ["one is well... and so on. ", '"look at it!" he said. ', "1. open it. ", "(all of them.) ", "bye"],
        ["a cat. a dog. ", "a bird. ", "The cats saw it. here they are. ", "Done."],
        ["it is in the U.S. and so on. not here."],
    ],
)
def test_sentences(sentences: list[str]) -> None:
    assert cut("".join(sentences)) == sentences
    assert cut("".join(sentences), []) == sentences


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Of course, I can help you with that. Next.", "Of course, I can help you with that. "),
        ("Well, as you can see, it works. Next.", "Well, as you can see, "),
        ("I looked at it; it works. Next.", "I looked at it; "),
        ("Here is the answer: it works. Next.", "Here is the answer: "),
        ("I have seen it — it works. Next.", "I have seen it — "),
        ("I have seen it - it works. Next.", "I have seen it - "),
        ("It was well-known and 1,000 came on May 5, 2026. Next.", "It was well-known and 1,000 came on May 5, 2026. "),
        ("今天天气很好，我们走吧。好", "今天天气很好，"),
        ("Here are the steps:\n1. Go.", "Here are the steps:\n"),
        ("Yes. And so on, and on, and on.", "Yes. "),
    ],
)
def test_the_first_part_may_be_a_clause(text: str, first: str) -> None:
    whole, *later = cut(text, first_is_clause=True)
    assert whole == first and "".join(later) == text.removeprefix(first)
    assert cut(text, [], first_is_clause=True) == [whole, *later]
    assert later == cut(text.removeprefix(first)), "later ones are sentences"


def test_an_end_is_found_with_the_next_character() -> None:
    cutter = SentenceCutter(first_is_clause=True)
    pieces = [
        "Hello", ".", " ", "How", " are you", ",", " my", " friend", "?", "\n", "A", "t 5 p.m", ".", " Th", "e ", "cat",
    ]  # fmt: skip
    found = [cutter.add(piece) for piece in pieces]
    assert [(i, each) for i, each in enumerate(found) if each] == [
        (3, ["Hello. "]), (10, ["How are you, my friend?\n"]), (14, ["At 5 p.m. "])
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (f"{'word ' * 30}then, {'more ' * 100}", f"{'word ' * 30}then, "),
        (f"Oh, {'word ' * 200}", f"Oh, {'word ' * 79}"),
        ("x" * 1000, "x" * MAX_CHARS),
        (f"   {'x' * 1000}", f"   {'x' * (MAX_CHARS - 3)}"),
    ],
)
def test_a_run_without_an_end_is_cut(text: str, first: str) -> None:
    sentences = cut(text)
    assert sentences[0] == first and "".join(sentences) == text
    assert max(map(len, sentences)) <= MAX_CHARS
    assert cut(text, []) == sentences


@pytest.mark.parametrize("length", [MAX_CHARS - 1, MAX_CHARS, MAX_CHARS + 1])
def test_a_sentence_of_about_the_greatest_length(length: int) -> None:
    text = f"Go {'x' * (length - 5)}. "
    assert len(text) == length
    for sentences in (cut(text + "Then"), cut(text + "Then", [])):
        assert (sentences == [text, "Then"]) == (length <= MAX_CHARS)
        assert "".join(sentences) == text + "Then"


SENTENCES = [
    "Hello. ", "Mr. Smith and Mrs. J. Brown left. ", "It costs 3.14 or 1,000. ", "Really?! ", '"Yes," she said. ',
    "At 5 a.m. in the U.S. they slept. ", "An item\n", "See No. 5, e.g. of the U.N. Army. ", "Wait... what? ",
    "(He said so.) ", "The end of it, etc. is far.\n\n", "It was well, so to say; yes. ", "**Bold!** ",
]  # fmt: skip
NOISE = [*"aA1 .,;:!?…\n\"')(-—*_。！，你", ". ", "... ", "U.S. ", "No. ", "etc. ", "The ", "\n\n", "x" * 90, " " * 45]


@pytest.mark.parametrize("seed", range(60))
def test_the_pieces_of_a_text_do_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    whole = rng.choices(SENTENCES, k=rng.randint(1, 12))
    noise = "".join(rng.choices(NOISE, k=rng.randint(1, 200)))
    for text, expected in (("".join(whole), whole), (noise, None), ("".join([*whole, noise]), None)):
        for first_is_clause in (False, True):
            at_once = cut(text, first_is_clause=first_is_clause)
            assert "".join(at_once) == text and all(at_once) and max(map(len, at_once)) <= MAX_CHARS
            for _ in range(5):
                sizes = rng.choices([0, 1, 1, 2, 3, 7, 40, 500], k=rng.randint(0, 60))
                assert cut(text, sizes, first_is_clause=first_is_clause) == at_once
            if expected and not first_is_clause:
                assert at_once == expected
