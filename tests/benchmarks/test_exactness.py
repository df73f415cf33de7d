# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks/exactness.py` must have right to find anything; a small run of it is in `tests/entrypoints`."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

MODALITIES = (None, ("text",), ("text", "audio"))


@pytest.fixture
def wishes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, imported as the script does it: with its own folder on the path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import wishes

    return wishes


def test_a_seed_decides_what_is_asked_and_lengths_fit(wishes: Any) -> None:
    first, again = (
        [wishes.make_wish(rng, max_talker_tokens=40, spread_s=1.0, modalities=MODALITIES) for _ in range(200)]
        for rng in (random.Random(1), random.Random(1))
    )

    assert again == first
    for wish in first:
        for shortest, longest in (wish.text_tokens, wish.talker_tokens):
            assert 0 <= shortest <= longest <= 40 and longest >= 1
    assert {wish.modalities for wish in first} == set(MODALITIES)
    for kind_of_wish in ("stream", "leaves"):
        assert {getattr(wish, kind_of_wish) for wish in first} == {True, False}


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda answer: answer | {"text": [1, 2, 4]}, "text: "),
        (lambda answer: answer | {"codes": [7]}, "codes: "),
        (lambda answer: answer | {"audio": answer["audio"][:-1]}, "waves of 4 and 3 samples"),
        (lambda answer: answer | {"audio": answer["audio"] + 2e-4}, "differ by 0.0002"),
        (lambda answer: answer | {"audio": torch.full((4,), torch.nan)}, "differ by nan"),
        (lambda answer: answer | {"audio": answer["audio"] + 5e-5}, None),
        (lambda answer: answer | {"codes": None, "audio": None}, None),
    ],
)
def test_differences_are_told(
    wishes: Any, change: Callable[[dict[str, Any]], dict[str, Any]], complaint: str | None
) -> None:
    fields: dict[str, Any] = {"text": [1, 2, 3], "codes": [7, 8], "audio": torch.zeros(4)}
    difference = wishes.Answer(**fields).difference_to(wishes.Answer(**change(fields)))

    assert (difference is None) if complaint is None else (complaint in difference)
