# SPDX-License-Identifier: Apache-2.0
"""Handles of stages, a launcher and processes without processes: for tests of what handles, starts and routes."""

from typing import Any

from vllm_omni.config.stage_config import StageInstance
from vllm_omni.distributed.credit import Credit
from vllm_omni.distributed.messages import Message, PeerUpMessage
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.launch.fork_server import StageProcess
from vllm_omni.launch.launcher import Launcher, OnWait
from vllm_omni.launch.stage_handle import StageHandle
from vllm_omni.metrics.stats import StageState


class FakeStage(StageHandle):
    """A handle that records what is sent; ready from the beginning.

    Attributes:
        log: What was sent to all stages, in order: (stage name, message), or (stage name, (request id, number)) for a
            submit.
        submits: The arguments of `submit`, by request id.
        aborted: Requests that were aborted here.
        submit_error: Raised by `submit` and `extend`.
    """

    def __init__(self, instance: StageInstance, log: list[tuple[str, Any]], max_queued: int = 2) -> None:
        super().__init__(instance, Credit(max_queued, 1 << 20))
        self.state = StageState.READY
        self.log = log
        self.submits: dict[str, dict[str, Any]] = {}
        self.aborted: list[str] = []
        self.submit_error: Exception | None = None

    @property
    def name(self) -> str:
        return self.instance.name

    def submit(self, request: StageRequest, number: int, **arguments: Any) -> None:
        assert self.is_up
        if self.submit_error is not None:
            raise self.submit_error
        self.submits[request.request_id] = arguments
        self.log.append((self.name, (request.request_id, number)))
        if not arguments["sources"]:
            self.credit.spend(1, 0)

    def extend(self, request_id: str, stage_input: StageInput, is_last: bool) -> None:
        assert self.is_up and request_id in self.submits
        if self.submit_error is not None:
            raise self.submit_error
        self.log.append((self.name, (request_id, stage_input.prompt, is_last)))

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def send(self, message: Message) -> None:
        if self.receives(message):
            self.log.append((self.name, message))

    def peer_up(self, node: str) -> PeerUpMessage:
        return PeerUpMessage(instance_id=self.instance_id, epoch=self.epoch, address=f"{self.name}{self.epoch}")


class FakeProcess(StageProcess):
    """A process that ends when the test says so.

    Attributes:
        has_failed: It is ending.
        kills: How often it was killed.
    """

    def __init__(self, number: int) -> None:
        self.pid = 1000 + number
        self.has_ended = False
        self.kills = 0
        self.is_closed = False
        self.has_failed = False

    @property
    def is_ending(self) -> bool:
        return self.has_failed

    def filenos(self) -> list[int]:
        return [self.pid]

    def update(self) -> None:
        pass

    def kill(self) -> None:
        self.kills += 1

    def close(self) -> str:
        self.is_closed = True
        return "it exited with status 1"


class FakeLauncher(Launcher):
    """Makes fake processes.

    Attributes:
        specs: The name of the stage and its epoch, of each launch.
        processes: Those that it made.
        errors: Raised by the next launches.
        waits_for: What is missing for a process; empty if nothing is.
    """

    def __init__(self) -> None:
        self.specs: list[tuple[str, int]] = []
        self.processes: list[FakeProcess] = []
        self.errors: list[Exception] = []
        self.waits_for = ""

    def launch(self, stage: StageHandle, timeout: float, on_wait: OnWait) -> FakeProcess:
        if self.waits_for:
            on_wait(self.waits_for)
        if self.errors:
            raise self.errors.pop(0)
        self.specs.append((stage.instance.name, stage.epoch))
        self.processes.append(FakeProcess(len(self.processes)))
        return self.processes[-1]

    def close(self) -> None:
        pass
