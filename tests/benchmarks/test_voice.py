# SPDX-License-Identifier: Apache-2.0
"""When sound is in time, and the search for the highest request rate."""

from collections.abc import Callable
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def voice(import_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return import_benchmark("voice")


def test_sound_is_in_time_if_it_arrives_before_it_would_be_played(voice: ModuleType) -> None:
    response = voice.Response([(0.5, 1.0), (1.5, 2.0), (5.5, 2.0)])  # played from 1, 2 and 4 on
    assert response.seconds_in_time(patience=1.0) == pytest.approx(1.0 + 2.0 + 0.5)
    assert response.seconds_in_time(patience=10.0) == response.seconds == 5.0
    assert response.seconds_in_time(patience=0.0) == pytest.approx(0.5 + 1.5)


@pytest.mark.parametrize("limit", [0.03, 0.2, 0.33, 5.0])
def test_the_rate_is_the_highest_that_is_kept(voice: ModuleType, limit: float) -> None:
    tried = []

    def is_kept(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = voice.find_rate(is_kept)
    assert found <= limit < found * 2 ** (1 / 2**voice.NUM_HALVINGS) * 1.001
    assert len(tried) < 10
