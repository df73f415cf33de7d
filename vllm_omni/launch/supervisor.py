# SPDX-License-Identifier: Apache-2.0
"""Keeps the processes of a pipeline's stages running: starts, restarts and stops them, and notices those that do not
answer: their processes are stopped, or their IO threads hang.

Each stage that is ready sends a message every few seconds. One that does not is unresponsive, and is killed if it goes
on. A process detects a step that hangs by itself (`stage.watchdog`), but not that it is stopped as a whole.

Does not depend on requests. Belongs to the orchestrator's thread, except where noted.
"""

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from vllm_omni.config.stage_config import RestartConfig
from vllm_omni.distributed.messages import ShutdownMessage
from vllm_omni.errors import PipelineClosedError, StageStartError
from vllm_omni.launch.fork_server import StageProcess, wait_for_all
from vllm_omni.launch.launcher import Launcher
from vllm_omni.launch.stage_handle import StageHandle
from vllm_omni.metrics.stats import StageHealth, StageState
from vllm_omni.stage.watchdog import TIMEOUT_OPTION

logger = logging.getLogger("vllm.omni.orchestrator")

SHUTDOWN_GRACE_S = 10.0
END_GRACE_S = 2.0
"""How long to wait for the end of a process that is ending or was killed."""
UNRESPONSIVE_S = 10.0
_LATE_S = 1.0
"""How long the orchestrator's thread may do other things before it listens again."""


class SupervisedStage:
    """A replica of a stage and its process.

    Attributes:
        handle: The orchestrator's.
        process: Its process; None while there is none.
        end_reason: Why we ended the process; empty if we did not.
        fork_due: When the next process is started; None if none is due.
        ready_due: When it must be ready; None once it is.
        end_due: When it must have ended; None while it is not ending.
    """

    def __init__(self, handle: StageHandle) -> None:
        self.handle = handle
        self.process: StageProcess | None = None
        self.end_reason = ""
        self.fork_due: float | None = None
        self.ready_due: float | None = None
        self.end_due: float | None = None
        self.deaths: deque[float] = deque()

    @property
    def label(self) -> str:
        return self.handle.label

    @property
    def due(self) -> float | None:
        if self.process is None:
            return self.fork_due
        return self.ready_due if self.end_due is None else self.end_due


class Supervisor:
    """Owns the stages' processes.

    Attributes:
        restarts: Whether dead processes are replaced; false while the pipeline starts.
        health: The state of the stages, as of the last change; replaced as a whole, so any thread may read it.
    """

    def __init__(
        self,
        stages: Sequence[StageHandle],
        launcher: Launcher,
        restart: RestartConfig,
        stage_init_timeout: float,
        command: Callable[[Callable[[], None]], None],
        on_down: Callable[[StageHandle], None],
        on_wait: Callable[[StageHandle], None],
    ) -> None:
        """
        Args:
            stages: All replicas of all stages.
            launcher: Starts their processes.
            restart: How often, and when, a process is replaced.
            stage_init_timeout: Seconds that a process may take to become ready.
            command: Runs a function on the orchestrator's thread.
            on_down: Called for a stage whose process died, or could not be started again.
            on_wait: Called for a stage that cannot be started again before the cluster has a node for it.
        """
        self.restarts = False
        self.stages = [SupervisedStage(handle) for handle in stages]
        self._launcher = launcher
        self._restart = restart
        self._stage_init_timeout = stage_init_timeout
        self._command = command
        self._on_down = on_down
        self._on_wait = on_wait
        self.health = self._make_health()

    @property
    def due(self) -> float | None:
        """When `on_timer` must be called (`time.monotonic()`)."""
        times = [stage.due for stage in self.stages if stage.due is not None]
        return min(times) if times else None

    def start_all(self, timeout: float) -> None:
        """Starts all processes; they become ready later.

        Raises:
            StageStartError: A process could not be started.
        """
        deadline = time.monotonic() + timeout
        for stage in self.stages:
            try:
                stage.process = self._launcher.launch(stage.handle, deadline - time.monotonic(), logger.info)
            except (OSError, EOFError) as error:
                message = f"{stage.label} could not be started: {error}"
                raise StageStartError(message, stage.handle.stage_id) from error
            stage.ready_due = time.monotonic() + self._stage_init_timeout

    def on_ready(self, handle: StageHandle, address: str, remote_address: str = "") -> None:
        """The stage has announced that it takes requests at these addresses."""
        handle.on_ready(address, remote_address)
        self._find(handle).ready_due = None
        self.health = self._make_health()

    @property
    def serving(self) -> list[StageHandle]:
        """The stages whose processes take requests, and are not ending."""
        processes = [s for s in self.stages if s.process is not None and s.ready_due is None and s.end_due is None]
        return [stage.handle for stage in processes if stage.handle.state is not StageState.OUTDATED]

    def set_state(self, handle: StageHandle, state: StageState) -> None:
        """Sets the state of a stage whose process runs."""
        handle.state = state
        self.health = self._make_health()

    def filenos(self) -> list[int]:
        """File descriptors that become readable when a process ends, or is about to."""
        return [fd for stage in self.stages if stage.process is not None for fd in stage.process.filenos()]

    def handle_deaths(self, readable: set[int]) -> None:
        """Handles processes that have ended; only those with a readable file descriptor can have."""
        for stage in self.stages:
            if stage.process is None or readable.isdisjoint(stage.process.filenos()):
                continue
            stage.process.update()
            if stage.process.has_ended:
                self._on_death(stage)
            elif stage.process.is_ending:
                self._expect_end(stage)

    def on_timer(self) -> None:
        """Starts processes that are due, and kills those that are overdue."""
        now = time.monotonic()
        for stage in self.stages:
            if stage.due is None or now < stage.due:
                continue
            if stage.process is None:
                self._relaunch(stage)
            elif stage.end_due is not None:
                stage.process.kill()
                self._on_death(stage)
            else:
                limit = f"{self._stage_init_timeout:g} s"
                self._end(stage, f"it was not ready after {limit}; raise stage_init_timeout")

    def kill(self, handle: StageHandle, reason: str) -> None:
        """Kills a stage's process. Its death is handled like any other."""
        self._end(self._find(handle), reason)

    def _end(self, stage: SupervisedStage, reason: str) -> None:
        if stage.process is not None:
            stage.end_reason = stage.end_reason or reason
            stage.process.kill()
            self._expect_end(stage)

    def _expect_end(self, stage: SupervisedStage) -> None:
        if stage.end_due is None:
            stage.end_due = time.monotonic() + END_GRACE_S

    def stop_all(self) -> None:
        """Tells all stages to stop, waits for some time, and kills those that are left, or cannot read it."""
        running = {stage.process: stage for stage in self.stages if stage.process is not None}
        for process, stage in running.items():
            if stage.handle.state is StageState.READY:
                stage.handle.send(ShutdownMessage())
            else:
                process.kill()
        left = wait_for_all(list(running), SHUTDOWN_GRACE_S)
        for process in left:
            process.kill()
        for process in wait_for_all(left, END_GRACE_S):
            logger.error("%s: process %d was killed, and has not ended yet", running[process].label, process.pid)
        for process in running:
            process.close()

    def _on_death(self, stage: SupervisedStage) -> None:
        assert stage.process is not None
        how = stage.process.close()
        how, stage.end_reason = stage.end_reason or how, ""
        stage.process, stage.ready_due, stage.end_due = None, None, None
        self._take_down(stage, how)

    def _take_down(self, stage: SupervisedStage, how: str) -> None:
        stage.handle.on_death(how)
        if self.restarts:
            self._plan_restart(stage)
        self.health = self._make_health()
        self._on_down(stage.handle)

    def _plan_restart(self, stage: SupervisedStage) -> None:
        now = time.monotonic()
        stage.deaths.append(now)
        while stage.deaths[0] < now - self._restart.window_s:
            stage.deaths.popleft()
        if len(stage.deaths) > self._restart.max_restarts:
            self._mark_dead(stage)
            return
        backoff = self._restart.backoff_s * 2 ** (len(stage.deaths) - 1)
        stage.fork_due = now + min(backoff, self._restart.max_backoff_s)
        logger.error("%s: died (%s); restarting in %.1f s", stage.label, stage.handle.death, stage.fork_due - now)

    def _mark_dead(self, stage: SupervisedStage) -> None:
        """Lets a stage's requests fail until it has started again, which is tried at the longest back-off."""
        stage.handle.state = StageState.DEAD
        if not self._restart.max_restarts:
            logger.error("%s: died (%s); it is not restarted (runtime.restart)", stage.label, stage.handle.death)
            return
        stage.fork_due = time.monotonic() + self._restart.max_backoff_s
        logger.error(
            "%s: died (%s), too often; its requests fail until it has started again, in %.1f s (runtime.restart)",
            stage.label,
            stage.handle.death,
            self._restart.max_backoff_s,
        )

    def _relaunch(self, stage: SupervisedStage) -> None:
        """Launches on another thread: if the fork server has died too, its replacement takes seconds to start."""
        stage.fork_due = None

        def on_wait(what: str) -> None:
            with contextlib.suppress(PipelineClosedError):
                self._command(lambda: self._wait_for(stage, what))

        def fork() -> None:
            try:
                process = self._launcher.launch(stage.handle, self._stage_init_timeout, on_wait)
            except (OSError, EOFError) as error:
                reason = str(error)
                with contextlib.suppress(PipelineClosedError):
                    self._command(lambda: self._take_down(stage, reason))
                return
            try:
                self._command(lambda: self._on_forked(stage, process))
            except PipelineClosedError:
                process.kill()

        threading.Thread(target=fork, name="omni-restart", daemon=True).start()

    def _wait_for(self, stage: SupervisedStage, what: str) -> None:
        logger.error("%s: waits for %s", stage.label, what)
        stage.handle.waits_for = what
        self.health = self._make_health()
        self._on_wait(stage.handle)

    def _on_forked(self, stage: SupervisedStage, process: StageProcess) -> None:
        stage.process, stage.handle.waits_for = process, ""
        self.health = self._make_health()
        if not stage.handle.does_verbs:  # It may be ready already.
            stage.ready_due = time.monotonic() + self._stage_init_timeout

    def _find(self, handle: StageHandle) -> SupervisedStage:
        return next(stage for stage in self.stages if stage.handle is handle)

    def _make_health(self) -> list[StageHealth]:
        health = [
            StageHealth(
                handle.stage_id, handle.instance.name, handle.instance.replica, handle.state.value, handle.epoch,
                handle.death, handle.node_name, handle.waits_for, handle.weight_version,
            )
            for stage in self.stages
            for handle in (stage.handle,)
        ]  # fmt: skip
        return sorted(health, key=lambda stage: (stage.stage_id, stage.replica))


class SilenceWatch:
    """Notices stages that do not answer.

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
