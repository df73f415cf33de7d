# SPDX-License-Identifier: Apache-2.0
"""What is said of a written reply."""

import pytest

from vllm_omni_talk.speakable import speakable, split_code


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("The Moon is round.", "The Moon is round."),
        ("**Bold**, *italic*, ***both***, __also__ _so_, ~~gone~~.", "Bold, italic, both, also so, gone."),
        ("**bold with *italics* inside**", "bold with italics inside"),
        ("5 * 3 * 2 = 30", "5 times 3 times 2 = 30"),
        ("2*3*4 = 24, (a+b)*c", "2 times 3 times 4 = 24, (a+b) times c"),
        ("f(x)*g(y)*h and (*really*) so", "f(x) times g(y) times h and (really) so"),
        ("2**3, x**2 + y**2", "2 to the power of 3, x to the power of 2 + y to the power of 2"),
        ("**S**elf, un**believ**able", "Self, unbelievable"),
        ("__One. Two.__ __init__", "One. Two. init"),
        ("# Planets\nThere are eight.", "Planets.\nThere are eight."),
        ("## Why? ##", "Why?"),
        ("- one\n* two\n+ three!\n• four", "one.\ntwo.\nthree!\nfour."),
        ("- [x] done\n- [ ] open", "done.\nopen."),
        ("1. Boil water\n2) Add tea", "1, Boil water.\n2, Add tea."),
        ("> A quote", "A quote"),
        ("above\n\n---\n\n***\nbelow", "above\nbelow"),
        ("| Name | Age |\n|---|:-:|\n| Ada | 36 |", "Name, Age.\nAda, 36."),
        ("Run `make_demo` now.", "Run make demo now."),
        ("See [the guide](https://example.com/a_(b)) first.", "See the guide first."),
        ("![A red circle](circle.png)", "A red circle"),
        ("[one][1]", "one"),
        ("Go to https://www.example.com/a/b?c=1#d.", "Go to example dot com."),
        ("(see http://docs.example.org/x)", "(see docs dot example dot org)"),
        ("See https://example.com. Or www.example.org?a=1!", "See example dot com. Or example dot org!"),
        ("<https://example.com>", "example dot com"),
        ("Write to ada@example.com!", "Write to ada at example dot com!"),
        ("a<br/>b &amp; c", "a b & c"),
        ("<a href='x' target=\"_b\">Here</a>, <div class=x>there</div>", "Here, there"),
        ("<details open>\n<summary>More</summary> a <input type=checkbox CHECKED/> b</details>", "More a b"),
        ("<!DOCTYPE html><video controls loop src=x></video>One.<!-- not this -->", "One."),
        ("x<y and y>z, a<open b", "x<y and y>z, a<open b"),
        ("1" * 36, "1" * 36),
        (f"It is {'12' * 18}3.", f"It is {'1 2 1, 2 1 2, ' * 6}3."),
        (f"{'123,' * 12}123", ", ".join(["1 2 3"] * 13)),
        ("Hello \U0001f600\U0001f44d\U0001f3fd! \u2764\ufe0f", "Hello!"),
        ("\U0001f1e9\U0001f1ea", ""),
        ("20 °C, 3 € © 2024", "20 °C, 3 € © 2024"),
        ("fruit, e.g. apples, i.e. food, etc.", "fruit, for example, apples, that is, food, et cetera."),
        ("cats, etc. and dogs vs. birds", "cats, et cetera and dogs versus birds"),
        ("tea w/ milk, w/o sugar", "tea with milk, without sugar"),
        ("A → B, x >= 2", "A to B, x is at least 2"),
        (r"\(x^2\)", "x to the power of 2"),
        ("***", ""),
        ("...", ""),
        ("", ""),
    ],
)
def test_what_is_said(written: str, spoken: str) -> None:
    assert speakable(written) == spoken


def test_code_is_left_out() -> None:
    assert speakable("Try this:\n```python\nprint(1)\n```\nIt prints one.") == "Try this:\nIt prints one."
    assert speakable("~~~\nls\n~~~") == ""


def test_code_may_begin_in_one_part_and_end_in_another() -> None:
    first, in_code = split_code("Try this:\n```\nx = 1.")
    assert (first, in_code) == ("Try this:", True)
    assert split_code("y = 2.", in_code) == ("", True)
    assert split_code("z\n```\nDone.", in_code) == ("Done.", False)


@pytest.mark.parametrize(
    ("parts", "spoken"),
    [
        (("Read [this. ", "And that](https://a.example/b_(c)) now."), ("Read [this.", "And that now.")),
        (("![A cat. ", "A dog.][1]"), ("[A cat.", "A dog.")),
        (("__One. ", "Two.__"), ("One.", "Two.")),
        (("**One. ", "Two.**"), ("One.", "Two.")),
    ],
)
def test_marks_may_begin_in_one_part_and_end_in_another(parts: tuple[str, ...], spoken: tuple[str, ...]) -> None:
    assert tuple(map(speakable, parts)) == spoken


def test_what_is_said_does_not_change_when_it_is_said_again() -> None:
    text = "# Title\n- **one** https://a.example\n1. two & three"
    assert speakable(speakable(text)).split() == speakable(text).split()
