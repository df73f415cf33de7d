# SPDX-License-Identifier: Apache-2.0
"""Windows that follow playback, on a clock that stands still between two events: early, without a gap, and few."""

import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.stage.running_engine import chunk, new_request
from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.inputs import StageInput
from vllm_omni.stage.engines import llm_request
from vllm_omni.stage.engines.llm_request import GenerationRequest
from vllm_omni.stage.engines.playback import Pace, Playback
from vllm_omni.stage.window import WindowSizes

SAMPLE_RATE = 1000
UNIT_S = 0.08
WINDOW = WindowConfig(window_size=50, first_window_size=1, window_growth="playback", unit="codes")


class Stream:
    """A request, the source that makes its units, an engine that computes its windows, and a client that plays.

    Attributes:
        sizes: Units of each window.
        first_sound: Seconds from the first unit to the first sound.
        silence: Seconds of the client, between its first sound and its last.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, pace: Pace, window: WindowConfig = WINDOW, sent_s: float = 0.0
    ) -> None:
        self.now = 0.0
        self.sizes: list[int] = []
        self.first_sound = math.nan
        self.silence = 0.0
        self._played_until = math.inf
        monkeypatch.setattr(llm_request, "time", SimpleNamespace(monotonic=lambda: self.now))
        engine: Any = SimpleNamespace(
            batch_tokens=64, add_request=self._compute, set_window=lambda *_: None, release_state=lambda _: None
        )
        self._window, self._sizes = window, WindowSizes(window)
        self._params = SamplingParams(max_tokens=1, detokenize=False)
        self._num_held = window.right_context
        item = new_request("r", None, self._params, is_last=False, streams_output=True, window=window)
        item.request.sent_s = sent_s
        self._item = item
        self._request = GenerationRequest(engine, 0, item, pace, SAMPLE_RATE)

    def _compute(self, engine_id: str, prompt: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.sizes.append(len(prompt["prompt_token_ids"]))

    def run(self, arrivals: list[float], base_s: float, unit_s: float) -> "Stream":
        """
        Args:
            arrivals: When each unit is made.
            base_s, unit_s: Seconds that a window takes, and each of its units in addition.
        """
        pieces: deque[tuple[float, int, bool]] = deque()
        start = 0
        while start < len(arrivals):
            size = min(self._sizes.current, len(arrivals) - start)
            self._sizes.advance()
            start += size
            pieces.append((arrivals[start - 1], size, start == len(arrivals)))
        done, num_started = math.inf, 0
        while pieces or done < math.inf or self._request.starts_at < math.inf:
            self.now = max(self.now, min(pieces[0][0] if pieces else math.inf, done, self._request.starts_at))
            if done <= self.now:
                done = math.inf
                self._play(self.sizes[-1])
            elif pieces and pieces[0][0] <= self.now:
                self._add(*pieces.popleft()[1:])
            else:
                self._request.resume()
            if len(self.sizes) > num_started:
                num_started = len(self.sizes)
                done = self.now + base_s + unit_s * self.sizes[-1]
        return self

    def _add(self, size: int, is_last: bool) -> None:
        stage_input = StageInput(prompt_token_ids=[0] * size, is_extensible=True)
        if self._item.stage_input is None:
            self._item.stage_input, self._item.is_last = stage_input, is_last
            self._request.start(self._item)
        else:
            self._request.extend(chunk("r", stage_input, is_last))

    def _play(self, size: int) -> None:
        num_playable = max(0, size - self._num_held)
        self._num_held -= size - num_playable
        seconds = num_playable * UNIT_S
        if seconds and math.isnan(self.first_sound):
            self.first_sound = self.now
        self.silence += max(0.0, self.now - self._played_until)
        if seconds:
            self._played_until = max(self.now, 0.0 if self._played_until == math.inf else self._played_until) + seconds
        self._request.take(output(size, round(seconds * SAMPLE_RATE)))


def output(num_units: int, num_samples: int) -> Any:
    completion = SimpleNamespace(
        **dict.fromkeys(("cumulative_logprob", "logprobs", "finish_reason", "stop_reason", "weight_versions")),
        index=0, text="", token_ids=[],
    )  # fmt: skip
    return SimpleNamespace(
        outputs=[completion], prompt=None, prompt_token_ids=[0] * num_units, prompt_logprobs=None, num_cached_tokens=0,
        multimodal_output={"audio": torch.zeros(num_samples)},
    )  # fmt: skip


def evenly(interval: float, count: int = 150) -> list[float]:
    return [interval * number for number in range(count)]


def test_of_a_fast_engine_the_first_window_is_one_unit_and_later_ones_are_few(monkeypatch: pytest.MonkeyPatch):
    pace = Pace()
    for _ in range(2):
        stream = Stream(monkeypatch, pace).run(evenly(0.02), base_s=0.004, unit_s=0.001)
    assert stream.sizes[0] == 1 and stream.first_sound == pytest.approx(0.005)
    assert stream.silence == 0 and sum(stream.sizes) == 150
    assert stream.sizes[:-1] == sorted(stream.sizes[:-1]) and len(stream.sizes) <= 10


@pytest.mark.parametrize(("interval", "base_s", "unit_s"), [(0.07, 0.03, 0.001), (0.03, 0.1, 0.01), (0.01, 0.02, 0.04)])
def test_of_a_slow_engine_the_first_window_is_as_long_as_it_has_to_be(
    monkeypatch: pytest.MonkeyPatch, interval: float, base_s: float, unit_s: float
):
    """Where units come slowly, where each window takes long, and where the engine is hardly faster than sound."""
    pace = Pace()
    for _ in range(2):
        stream = Stream(monkeypatch, pace).run(evenly(interval), base_s, unit_s)
    assert 1 < stream.sizes[0] <= math.ceil(2 * (interval + base_s + unit_s) / UNIT_S)
    assert stream.silence == 0 and sum(stream.sizes) == 150


def test_a_first_window_does_not_wait_for_units_that_do_not_come(monkeypatch: pytest.MonkeyPatch):
    pace = Pace()
    Stream(monkeypatch, pace).run(evenly(0.05), base_s=0.1, unit_s=0.001)
    stream = Stream(monkeypatch, pace).run([0.0, *(30 + when for when in evenly(0.05))], base_s=0.1, unit_s=0.001)
    assert stream.sizes[0] == 1 and stream.first_sound < 0.5


def test_units_that_the_model_holds_back_play_nothing(monkeypatch: pytest.MonkeyPatch):
    pace, window = Pace(), WindowConfig(
        window_size=50, first_window_size=1, window_growth="playback", right_context=7, unit="codes"
    )  # fmt: skip
    for _ in range(2):
        stream = Stream(monkeypatch, pace, window).run(evenly(0.02), base_s=0.004, unit_s=0.001)
    assert stream.sizes[0] == 8 and stream.silence == 0 and len(stream.sizes) <= 10


def test_what_a_client_has_already_is_made_again_without_delay(monkeypatch: pytest.MonkeyPatch):
    pace = Pace()
    Stream(monkeypatch, pace).run(evenly(0.02), base_s=0.004, unit_s=0.001)
    again = Stream(monkeypatch, pace, sent_s=100 * UNIT_S).run(evenly(0.0, 100) + evenly(0.02)[1:], 0.004, 0.001)
    assert again.sizes[0] == 1 and 48 < again.sizes[1] <= 64, "what has arrived, up to a batch"
    playback = Playback(now=5.0, sent_s=3.0)
    playback.add(6.0, 2.0)
    assert (playback.until, playback.is_behind) == (5.0, True)
    playback.add(7.0, 2.0)
    assert (playback.until, playback.is_behind) == (8.0, False)
    playback.add(7.5, 2.0)
    assert playback.until == 10.0


def test_before_it_is_known_how_long_units_play_nothing_is_held(monkeypatch: pytest.MonkeyPatch):
    stream = Stream(monkeypatch, Pace()).run(evenly(0.02, 3), base_s=0.004, unit_s=0.001)
    assert stream.sizes[0] == 1
