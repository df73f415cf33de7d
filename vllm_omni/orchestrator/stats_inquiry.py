# SPDX-License-Identifier: Apache-2.0
"""Asking all stages for their figures, and waiting for their answers."""

import threading
from collections.abc import Iterable

from vllm_omni.distributed.messages import StatsQuery
from vllm_omni.metrics.stats import StageStats
from vllm_omni.orchestrator.omni_stage import OmniStage


class StatsInquiry:
    """One question. All but `wait` happens on the orchestrator's thread."""

    def __init__(self) -> None:
        self._missing: set[int] = set()
        self._answers: dict[int, StageStats] = {}
        self._is_answered = threading.Event()

    @property
    def is_answered(self) -> bool:
        return self._is_answered.is_set()

    def ask(self, stages: Iterable[OmniStage]) -> None:
        """Asks those stages that can answer."""
        asked = [stage for stage in stages if stage.is_ready]
        self._missing = {stage.stage_id for stage in asked}
        for stage in asked:
            stage.send(StatsQuery())
        self._check()

    def answer(self, stats: StageStats) -> None:
        self._answers[stats.stage_id] = stats
        self.give_up_on(stats.stage_id)

    def give_up_on(self, stage_id: int) -> None:
        """The stage will not answer."""
        self._missing.discard(stage_id)
        self._check()

    def end(self) -> None:
        """Nobody will answer any more."""
        self._is_answered.set()

    def wait(self, timeout: float) -> list[StageStats]:
        """The answers, in stage order, when all are there or after `timeout` seconds."""
        self._is_answered.wait(timeout)
        return [self._answers[stage_id] for stage_id in sorted(self._answers)]

    def _check(self) -> None:
        if not self._missing:
            self._is_answered.set()
