# SPDX-License-Identifier: Apache-2.0
"""Notices stages that do not answer: their processes are stopped, or their IO threads hang.

Each stage that is ready sends a message every few seconds. One that does not is unresponsive, and is killed if it goes
on. A process detects a step that hangs by itself (`stage.watchdog`), but not that it is stopped as a whole.
"""

import logging
import math
import time

from vllm_omni.launch.stage_handle import StageHandle
from vllm_omni.launch.supervisor import Supervisor
from vllm_omni.metrics.stats import StageState
from vllm_omni.stage.watchdog import TIMEOUT_OPTION

logger = logging.getLogger("vllm.omni.orchestrator")

UNRESPONSIVE_S = 10.0
_LATE_S = 1.0
"""How long the orchestrator's thread may do other things before it listens again."""


class SilenceWatch:
    """Belongs to the orchestrator's thread.

    Attributes:
        due: When `on_timer` must be called (`time.monotonic()`).
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._listened_s = 0.0
        self._listened_at = time.monotonic()
        self.due = self._listened_at + UNRESPONSIVE_S

    def listened(self, wait_s: float) -> None:
        """The thread has waited for messages, for `wait_s` seconds at most, and receives them next.

        Silence is counted in the time between these calls. Where it is longer than expected, this thread was late, or
        was stopped, perhaps with all processes: what stages have sent may still be on its way, and nothing is counted.
        """
        now = time.monotonic()
        passed, self._listened_at = now - self._listened_at, now
        if passed <= wait_s + _LATE_S:
            self._listened_s += passed

    def heard(self, stage: StageHandle, more_s: float = 0.0) -> None:
        """The stage has sent a message, and starts work that may take so much longer than its time limit."""
        stage.heard_s, stage.more_s = self._listened_s, more_s
        if stage.state is StageState.UNRESPONSIVE:
            logger.warning("%s: answers again", stage.label)
            self._supervisor.set_state(stage, StageState.READY)

    def on_timer(self) -> None:
        """Reports stages that are silent for too long, and kills them if they go on."""
        if time.monotonic() < self.due:
            return
        for stage in self._supervisor.serving:
            if self._left_s(stage) <= 0:
                self._on_silence(stage)
        self.due = self._listened_at + min([UNRESPONSIVE_S, *map(self._left_s, self._supervisor.serving)])

    def _left_s(self, stage: StageHandle) -> float:
        """Seconds that the stage may still be silent."""
        limit_s = UNRESPONSIVE_S
        if stage.state is StageState.UNRESPONSIVE:
            limit_s += (stage.config.runtime.step_timeout_s or math.inf) + stage.more_s
        return limit_s - (self._listened_s - stage.heard_s)

    def _on_silence(self, stage: StageHandle) -> None:
        if stage.state is StageState.UNRESPONSIVE:
            limit_s = stage.config.runtime.step_timeout_s + stage.more_s
            self._supervisor.kill(stage, f"it did not answer for {limit_s:g} s ({TIMEOUT_OPTION})")
        else:
            logger.error("%s: does not answer; is its process stopped?", stage.label)
            self._supervisor.set_state(stage, StageState.UNRESPONSIVE)
