# SPDX-License-Identifier: Apache-2.0
"""The cards of the checkpoints in this repository, to which docs/models.md sends its readers, hold measured figures."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from vllm_omni.model_packages import find_models

CARDS = [folder / "README.md" for folder in find_models().checkpoints.values()]
TRAINED = [card for card in CARDS if list(card.parent.rglob("*.safetensors"))]
PLACEHOLDER = re.compile(r"\b(?:FIGURES?|TODO|TBD|TBA|FIXME|XXX+|N/?A|PLACEHOLDER)\b|\?\?|\.\.\.$", re.MULTILINE)


def test_every_checkpoint_has_a_card() -> None:
    assert {"talk", "shapes", "shapes-painter"} <= {card.parent.name for card in CARDS}
    for card in CARDS:
        assert card.is_file()
        assert card.relative_to(ROOT).as_posix() in (ROOT / "docs/models.md").read_text()


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.parent.name)
def test_a_card_is_complete(card: Path) -> None:
    assert PLACEHOLDER.findall(card.read_text()) == []
    assert "Measured" in card.read_text()


@pytest.mark.parametrize("card", TRAINED, ids=lambda card: card.parent.name)
def test_the_card_of_a_trained_model_holds_what_was_measured(card: Path) -> None:
    text = card.read_text()
    _, measured = text.split("Measured", 1)
    assert "benchmarks/quality.py" in measured and (ROOT / "benchmarks/quality.py").is_file()
    shares = [float(share) for share in re.findall(r"(?<![\d.])[01]\.\d+(?![\d.]*\d)", measured)]
    assert len(shares) >= 3 and all(0.5 < share <= 1 for share in shares)
