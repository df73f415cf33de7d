# SPDX-License-Identifier: Apache-2.0
"""A stage as its parent sees it: what is sent to it, across the deaths and restarts of its process."""

import os
from enum import Enum

import zmq

from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.distributed.connectors import ThresholdConnector
from vllm_omni.distributed.credit import Credit
from vllm_omni.distributed.messages import ORCHESTRATOR, AbortMessage, Message, SubmitMessage, send
from vllm_omni.distributed.payload_channel import PayloadChannel
from vllm_omni.distributed.run_dir import RunDir, payload_prefix, remove_unread
from vllm_omni.inputs import StageRequest


class StageState(Enum):
    STARTING = "starting"
    """Its process loads what it needs."""
    READY = "ready"
    """It takes requests."""
    RESTARTING = "restarting"
    """Its process died, and the next one is due or loading."""
    DEAD = "dead"
    """Its process died too often. Only a new pipeline helps."""


class OmniStage:
    """Handle of one stage. Belongs to the orchestrator's thread.

    Attributes:
        state: What it is doing.
        epoch: Counts its processes, from 0.
        death: How its last process ended; empty if none has.
        credit: What it may be sent, where it is a first stage.
    """

    def __init__(
        self, config: OmniStageConfig, run_dir: RunDir, context: zmq.Context, shm_threshold_bytes: int, credit: Credit
    ) -> None:
        self.config = config
        self.state = StageState.STARTING
        self.epoch = 0
        self.death = ""
        self.credit = credit
        self._run_dir = run_dir
        self._context = context
        self._socket: zmq.Socket
        self._connect()
        prefix = payload_prefix(os.getpid(), ORCHESTRATOR, config.stage_id)
        connector = ThresholdConnector(run_dir.path, prefix, shm_threshold_bytes)
        self._channel = PayloadChannel(connector)

    @property
    def stage_id(self) -> int:
        return self.config.stage_id

    @property
    def label(self) -> str:
        return f"stage {self.config.stage_id} ({self.config.name})"

    @property
    def is_ready(self) -> bool:
        return self.state is StageState.READY

    @property
    def serving_epoch(self) -> int | None:
        """Where its peers find it: the process that serves, or is the first to; None while one is awaited."""
        return self.epoch if self.state in (StageState.STARTING, StageState.READY) else None

    def submit(
        self,
        request: StageRequest,
        number: int,
        *,
        sources: list[int],
        targets: list[int],
        is_final: bool,
        streams: bool,
    ) -> None:
        """Gives the stage its part of a request."""
        payload, frames = self._channel.put(request)
        message = SubmitMessage(
            request_id=request.request_id,
            number=number,
            sources=sources,
            targets=targets,
            is_final=is_final,
            streams=streams,
            payload=payload,
        )
        if not sources:
            self.credit.spend(1, payload.num_bytes)
        send(self._socket, message, frames, sender=ORCHESTRATOR)

    def abort(self, request_ids: list[str]) -> None:
        self.tell(AbortMessage(request_ids=request_ids))

    def tell(self, message: Message) -> None:
        """Sends to the stage, if it is there to listen."""
        if self.is_ready:
            self.send(message)

    def send(self, message: Message) -> None:
        """Sends to the stage's process; one that is still loading, or not even there, gets it when it listens."""
        send(self._socket, message, sender=ORCHESTRATOR)

    def on_death(self, how: str) -> None:
        """Its process ended. What was sent to it is lost; the next one has another address."""
        self.state = StageState.RESTARTING
        self.death = how
        self.credit.reset()
        self.epoch += 1
        self._socket.close(linger=0)
        remove_unread(self._run_dir.path, os.getpid(), ORCHESTRATOR, self.stage_id)
        self._connect()

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.PUSH)
        # Without a limit of its own: what is sent is bounded by admission and by the stage's watermark.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self._run_dir.stage_address(self.config.stage_id, self.epoch))
