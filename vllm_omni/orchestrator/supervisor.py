# SPDX-License-Identifier: Apache-2.0
"""Keeps the processes of a pipeline's stages running: starts, restarts and stops them.

Does not depend on requests. Belongs to the orchestrator's thread, except where noted.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_omni.config.stage_config import RestartConfig
from vllm_omni.distributed.messages import ShutdownMessage
from vllm_omni.errors import PipelineClosedError, StageStartError
from vllm_omni.orchestrator.fork_server import StageProcess, wait_for_all
from vllm_omni.orchestrator.launcher import Launcher
from vllm_omni.orchestrator.omni_stage import StageHandle, StageState

logger = logging.getLogger("vllm.omni.orchestrator")

_SHUTDOWN_GRACE_S = 10.0
_END_GRACE_S = 2.0
"""How long to wait for the end of a process that is ending or was killed."""


@dataclass(frozen=True, slots=True)
class StageHealth:
    """The state of a replica of a stage.

    Attributes:
        name, replica: `writer`, or `writer.1` where there are several.
        state: `starting`, `ready`, `unresponsive`, `restarting` or `dead`.
        num_restarts: How often its process was replaced.
        last_death: How its last process ended; empty if none has.
        node: The machine that it is on; empty without a cluster.
        waits_for: What is missing for its next process; empty if nothing is.
    """

    stage_id: int
    name: str
    replica: int
    state: str
    num_restarts: int = 0
    last_death: str = ""
    node: str = ""
    waits_for: str = ""


class StageGroup:
    """The stages of one process.

    Attributes:
        process: Their process; None while there is none.
        end_reason: Why we ended the process; empty if we did not.
        fork_due: When the next process is started; None if none is due.
        ready_due: When it must be ready; None once it is.
        end_due: When it must have ended; None while it is not ending.
        waits_for: What is missing for the next process.
    """

    def __init__(self, stages: Sequence[StageHandle]) -> None:
        self.stages = stages
        self.process: StageProcess | None = None
        self.end_reason = ""
        self.fork_due: float | None = None
        self.ready_due: float | None = None
        self.end_due: float | None = None
        self.waits_for = ""
        self.deaths: deque[float] = deque()

    @property
    def label(self) -> str:
        return ", ".join(stage.label for stage in self.stages)

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
        groups: Sequence[Sequence[StageHandle]],
        launcher: Launcher,
        restart: RestartConfig,
        stage_init_timeout: float,
        command: Callable[[Callable[[], None]], None],
        on_down: Callable[[StageHandle], None],
        on_wait: Callable[[StageHandle], None],
    ) -> None:
        """
        Args:
            groups: The stages of each process.
            launcher: Starts the processes.
            restart: How often, and when, a process is replaced.
            stage_init_timeout: Seconds that a process may take to become ready.
            command: Runs a function on the orchestrator's thread.
            on_down: Called for each stage whose process died, or could not be started again.
            on_wait: Called for each stage that cannot be started again before the cluster has a node for it.
        """
        self.restarts = False
        self.groups = [StageGroup(stages) for stages in groups]
        self._launcher = launcher
        self._restart = restart
        self._stage_init_timeout = stage_init_timeout
        self._command = command
        self._on_down = on_down
        self._on_wait = on_wait
        self.health = self._make_health()

    @property
    def due(self) -> float | None:
        """When `act_on_time` must be called (`time.monotonic()`)."""
        times = [group.due for group in self.groups if group.due is not None]
        return min(times) if times else None

    def start_all(self, timeout: float) -> None:
        """Starts a process for each group; they become ready later.

        Raises:
            StageStartError: A process could not be started.
        """
        deadline = time.monotonic() + timeout
        for group in self.groups:
            try:
                group.process = self._launcher.launch(group.stages, deadline - time.monotonic(), logger.info)
            except (OSError, EOFError) as error:
                message = f"{group.label} could not be started: {error}"
                raise StageStartError(message, group.stages[0].stage_id) from error
            group.ready_due = time.monotonic() + self._stage_init_timeout

    def on_ready(self, stage: StageHandle, address: str, remote_address: str = "") -> None:
        """The stage has announced that it takes requests at these addresses."""
        stage.on_ready(address, remote_address)
        group = self._group_of(stage)
        if all(one.is_up for one in group.stages):
            group.ready_due = None
        self.health = self._make_health()

    @property
    def serving(self) -> list[StageHandle]:
        """The stages of the processes that are ready as a whole, and not ending."""
        groups = [g for g in self.groups if g.process is not None and g.ready_due is None and g.end_due is None]
        return [stage for group in groups for stage in group.stages]

    def set_state(self, stage: StageHandle, state: StageState) -> None:
        """Sets the state of a stage whose process runs."""
        stage.state = state
        self.health = self._make_health()

    def filenos(self) -> list[int]:
        """File descriptors that become readable when a process ends, or is about to."""
        return [fd for group in self.groups if group.process is not None for fd in group.process.filenos()]

    def handle_deaths(self, readable: set[int]) -> None:
        """Handles processes that have ended; only those with a readable file descriptor can have."""
        for group in self.groups:
            if group.process is None or readable.isdisjoint(group.process.filenos()):
                continue
            group.process.update()
            if group.process.has_ended:
                self._on_death(group)
            elif group.process.is_ending:
                self._expect_end(group)

    def act_on_time(self) -> None:
        """Starts processes that are due, and kills those that are overdue."""
        now = time.monotonic()
        for group in self.groups:
            if group.due is None or now < group.due:
                continue
            if group.process is None:
                self._restart_group(group)
            elif group.end_due is not None:
                group.process.kill()
                self._on_death(group)
            else:
                limit = f"{self._stage_init_timeout:g} s"
                self._end(group, f"it was not ready after {limit}; raise stage_init_timeout")

    def kill(self, stage: StageHandle, reason: str) -> None:
        """Kills a stage's process. Its death is handled like any other."""
        self._end(self._group_of(stage), reason)

    def _end(self, group: StageGroup, reason: str) -> None:
        if group.process is not None:
            group.end_reason = group.end_reason or reason
            group.process.kill()
            self._expect_end(group)

    def _expect_end(self, group: StageGroup) -> None:
        if group.end_due is None:
            group.end_due = time.monotonic() + _END_GRACE_S

    def stop_all(self) -> None:
        """Tells all stages to stop, waits for some time, and kills those that are left, or cannot read it."""
        running = {group.process: group for group in self.groups if group.process is not None}
        for process, group in running.items():
            if all(stage.state is StageState.READY for stage in group.stages):
                for stage in group.stages:
                    stage.send(ShutdownMessage())
            else:
                process.kill()
        left = wait_for_all(list(running), _SHUTDOWN_GRACE_S)
        for process in left:
            process.kill()
        for process in wait_for_all(left, _END_GRACE_S):
            logger.error("%s: process %d was killed, and has not ended yet", running[process].label, process.pid)
        for process in running:
            process.close()

    def _on_death(self, group: StageGroup) -> None:
        assert group.process is not None
        how = group.process.close()
        how, group.end_reason = group.end_reason or how, ""
        group.process, group.ready_due, group.end_due = None, None, None
        self._take_down(group, how)

    def _take_down(self, group: StageGroup, how: str) -> None:
        for stage in group.stages:
            stage.on_death(how)
        if self.restarts:
            self._plan_restart(group)
        self.health = self._make_health()
        for stage in group.stages:
            self._on_down(stage)

    def _plan_restart(self, group: StageGroup) -> None:
        now = time.monotonic()
        group.deaths.append(now)
        while group.deaths[0] < now - self._restart.window_s:
            group.deaths.popleft()
        if len(group.deaths) > self._restart.max_restarts:
            self._take_for_dead(group)
            return
        backoff = self._restart.backoff_s * 2 ** (len(group.deaths) - 1)
        group.fork_due = now + min(backoff, self._restart.max_backoff_s)
        logger.error("%s: died (%s); restarting in %.1f s", group.label, group.stages[0].death, group.fork_due - now)

    def _take_for_dead(self, group: StageGroup) -> None:
        """Its requests fail immediately until it has started again, which is tried at the longest back-off."""
        for stage in group.stages:
            stage.state = StageState.DEAD
        if not self._restart.max_restarts:
            logger.error("%s: died (%s); it is not restarted (runtime.restart)", group.label, group.stages[0].death)
            return
        group.fork_due = time.monotonic() + self._restart.max_backoff_s
        logger.error(
            "%s: died (%s), too often; its requests fail until it has started again, in %.1f s (runtime.restart)",
            group.label,
            group.stages[0].death,
            self._restart.max_backoff_s,
        )

    def _restart_group(self, group: StageGroup) -> None:
        """Launches on another thread: if the fork server has died too, its replacement takes seconds to start."""
        group.fork_due = None

        def on_wait(what: str) -> None:
            with contextlib.suppress(PipelineClosedError):
                self._command(lambda: self._wait_for(group, what))

        def fork() -> None:
            try:
                process = self._launcher.launch(group.stages, self._stage_init_timeout, on_wait)
            except (OSError, EOFError) as error:
                reason = str(error)
                with contextlib.suppress(PipelineClosedError):
                    self._command(lambda: self._take_down(group, reason))
                return
            try:
                self._command(lambda: self._on_forked(group, process))
            except PipelineClosedError:
                process.kill()

        threading.Thread(target=fork, name="omni-restart", daemon=True).start()

    def _wait_for(self, group: StageGroup, what: str) -> None:
        logger.error("%s: waits for %s", group.label, what)
        group.waits_for = what
        self.health = self._make_health()
        for stage in group.stages:
            self._on_wait(stage)

    def _on_forked(self, group: StageGroup, process: StageProcess) -> None:
        group.process, group.waits_for = process, ""
        self.health = self._make_health()
        if not all(stage.is_up for stage in group.stages):  # It may be ready already.
            group.ready_due = time.monotonic() + self._stage_init_timeout

    def _group_of(self, stage: StageHandle) -> StageGroup:
        return next(group for group in self.groups if stage in group.stages)

    def _make_health(self) -> list[StageHealth]:
        health = [
            StageHealth(
                stage.stage_id, stage.instance.name, stage.instance.replica, stage.state.value, stage.epoch,
                stage.death, stage.node_name, group.waits_for,
            )
            for group in self.groups
            for stage in group.stages
        ]  # fmt: skip
        return sorted(health, key=lambda stage: (stage.stage_id, stage.replica))
