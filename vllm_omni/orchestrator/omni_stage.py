# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's handle of a stage, across restarts of its process."""

import os
from enum import Enum

import zmq

from vllm_omni.config.stage_config import ConnectorConfig, OmniStageConfig
from vllm_omni.distributed.connectors import make_connector
from vllm_omni.distributed.credit import Credit
from vllm_omni.distributed.messages import ORCHESTRATOR, AbortMessage, Message, PeerUpMessage, SubmitMessage
from vllm_omni.distributed.payloads import PayloadSender
from vllm_omni.distributed.run_dir import RunDir, remove_unread
from vllm_omni.inputs import StageRequest
from vllm_omni.stage.peers import Peer


class StageState(Enum):
    STARTING = "starting"
    """Its process loads the model."""
    READY = "ready"
    """It takes requests."""
    RESTARTING = "restarting"
    """Its process died, and the next one is due or loading."""
    DEAD = "dead"
    """Its process died too often, and is not restarted."""


class OmniStage:
    """Handle of one stage. Belongs to the orchestrator's thread.

    Attributes:
        epoch: Counts its processes, from 0.
        death: How its last process ended; empty if none has.
        peer_up: Announces its process to its neighbours. Of a stage that is ready.
        credit: Limits what is sent to it, where it is a first stage.
    """

    peer_up: PeerUpMessage

    def __init__(
        self, config: OmniStageConfig, run_dir: RunDir, context: zmq.Context, connector: ConnectorConfig, credit: Credit
    ) -> None:
        self.config = config
        self.state = StageState.STARTING
        self.epoch = 0
        self.death = ""
        self.credit = credit
        self._run_dir = run_dir
        self._peer = Peer(context, ORCHESTRATOR, config.stage_id)
        self._payloads = PayloadSender(make_connector(connector, run_dir.path, ORCHESTRATOR, config.stage_id))

    @property
    def stage_id(self) -> int:
        return self.config.stage_id

    @property
    def label(self) -> str:
        return self.config.label

    @property
    def is_ready(self) -> bool:
        return self.state is StageState.READY

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
        """Sends the stage its part of a request. The stage is ready."""
        payload, frames = self._payloads.put(request)
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
        self._peer.send(message, frames)

    def abort(self, request_ids: list[str]) -> None:
        self.send(AbortMessage(request_ids=request_ids))

    def send(self, message: Message) -> None:
        """Sends to the stage's process. Does nothing unless the stage is ready: a new process knows no request."""
        if self.is_ready:
            self._peer.send(message)

    def on_ready(self, address: str) -> None:
        """Its process takes requests at this address."""
        self.state = StageState.READY
        self.peer_up = PeerUpMessage(stage_id=self.stage_id, epoch=self.epoch, address=address)
        self._peer.connect(self.peer_up)

    def on_death(self, how: str) -> None:
        """Its process ended. What was sent to it is lost; the next one has another address."""
        self.state = StageState.RESTARTING
        self.death = how
        self.credit.reset()
        self.epoch += 1
        self._peer.disconnect()
        remove_unread(self._run_dir.path, os.getpid(), ORCHESTRATOR, self.stage_id)
