# SPDX-License-Identifier: Apache-2.0
"""A stage as its parent sees it: a process that is spawned, becomes ready, takes requests, and stops."""

import time

import msgspec
import zmq

from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.distributed.connectors import ThresholdConnector
from vllm_omni.distributed.payload_channel import PayloadChannel
from vllm_omni.inputs import StageRequest
from vllm_omni.orchestrator.messages import AbortMessage, Message, ShutdownMessage, SubmitMessage, send
from vllm_omni.orchestrator.run_dir import RunDir
from vllm_omni.stage.fork_server import ForkServer, StageProcess
from vllm_omni.stage.spec import StageSpec


class OmniStage:
    """Handle of one stage. Belongs to the orchestrator's thread.

    Attributes:
        ready: The stage has said that it takes requests.
        death: How its process ended; None while it lives.
        held: Requests that were submitted to it and that it has not answered.
    """

    def __init__(self, spec: StageSpec, run_dir: RunDir, context: zmq.Context) -> None:
        self.config: OmniStageConfig = spec.stage
        self.ready = False
        self.death: str | None = None
        self.held: set[str] = set()
        self._spec = spec
        self._process: StageProcess | None = None
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(run_dir.stage_address(spec.stage.stage_id))
        connector = ThresholdConnector(run_dir.path, f"submit-{spec.stage.stage_id}", spec.shm_threshold_bytes)
        self._channel = PayloadChannel(connector)

    @property
    def label(self) -> str:
        return f"stage {self.config.stage_id} ({self.config.name})"

    @property
    def alive(self) -> bool:
        return self._process is not None and self.death is None

    def spawn(self, server: ForkServer, timeout: float) -> None:
        """Starts the process; `ready` follows later. Raises as `ForkServer.fork`."""
        self._process = server.fork(msgspec.json.encode(self._spec), timeout)

    def fileno(self) -> int:
        """Readable when the process has ended."""
        assert self._process is not None
        return self._process.fileno()

    def submit(
        self, request: StageRequest, number: int, sources: list[int], targets: list[int], is_final: bool
    ) -> None:
        """Gives the stage its part of a request.

        Raises:
            OSError: There is no room for the request's data.
        """
        payload, frames = self._channel.put(request)
        message = SubmitMessage(
            request_id=request.request_id,
            number=number,
            sources=sources,
            targets=targets,
            is_final=is_final,
            payload=payload,
        )
        self.held.add(request.request_id)
        send(self._socket, message, frames)

    def abort(self, request_ids: list[str]) -> None:
        self.held.difference_update(request_ids)
        self._tell(AbortMessage(request_ids=request_ids))

    def on_death(self) -> str:
        """Takes note that the process ended; returns how."""
        assert self._process is not None
        self.death = self._process.reap()
        return self.death

    def ask_to_stop(self) -> None:
        self._tell(ShutdownMessage())

    def stop(self, deadline: float) -> None:
        """Waits until `deadline` (`time.monotonic()`) for the process to end, then kills it."""
        if not self.alive:
            return
        assert self._process is not None
        if not self._process.wait(deadline - time.monotonic()):
            self._process.kill()
        self.on_death()

    def _tell(self, message: Message) -> None:
        if self.alive:
            send(self._socket, message)
