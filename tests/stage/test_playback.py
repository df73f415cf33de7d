# SPDX-License-Identifier: Apache-2.0
"""What the client of a stream has left to play, and how long outputs play."""

import pytest
import torch

from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines.playback import Playback, playing_s


def test_a_client_plays_from_the_first_output_on() -> None:
    playback = Playback(now=5.0)
    playback.add(6.0, 2.0)
    assert playback.until == 8.0
    playback.add(7.0, 1.0)
    assert playback.until == 9.0
    playback.add(20.0, 1.0)
    assert playback.until == 21.0, "it had run dry"


def test_what_a_client_has_already_gives_it_nothing_more_to_play() -> None:
    playback = Playback(now=5.0, sent_s=3.0)
    playback.add(6.0, 2.0)
    assert playback.until == 5.0
    playback.add(7.0, 2.0)
    assert playback.until == 8.0
    playback.add(7.5, 2.0)
    assert playback.until == 10.0


@pytest.mark.parametrize(
    ("audio", "sample_rate", "seconds"),
    [(torch.zeros(500), 1000, 0.5), (torch.zeros(2, 500), 1000, 0.5), (torch.zeros(500), None, 0.0),
     (torch.tensor(1.0), 1000, 0.001), (None, 1000, 0.0)],
)  # fmt: skip
def test_seconds_of_an_output(audio: torch.Tensor | None, sample_rate: int | None, seconds: float) -> None:
    output = StageOutput(request_id="r", stage_id=0, tensors={} if audio is None else {"audio": audio})
    assert playing_s(output, sample_rate) == seconds
