# SPDX-License-Identifier: Apache-2.0
"""Sends a stage's output to the stages that read it, and to the orchestrator. Belongs to the stage's IO thread."""

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.distributed.connectors import InlineConnector, PayloadSender
from vllm_omni.distributed.credit import Credit
from vllm_omni.distributed.messages import (
    ORCHESTRATOR,
    DataMessage,
    Frames,
    Message,
    OutputMessage,
    PayloadRef,
    PeerUpMessage,
    ResultMessage,
    SubmitMessage,
    TextsMessage,
)
from vllm_omni.distributed.network import Network
from vllm_omni.distributed.peers import PayloadPeer
from vllm_omni.outputs import StageOutput, reads_tensors, select_fields
from vllm_omni.stage.request_state import RequestState
from vllm_omni.stage.segments import CallerReader, Reader, Segmenter, WindowReader
from vllm_omni.stage.spec import StageSpec, TargetSpec


class Target(PayloadPeer):
    """A stage that reads this stage's output.

    Attributes:
        spec: What it reads, and how.
        credit: Limits what it is sent.
    """

    def __init__(
        self, context: zmq.Context, run_dir: Path, own_id: int, own_epoch: int, instance_id: int, spec: TargetSpec,
        network: Network | None = None,
    ) -> None:  # fmt: skip
        super().__init__(context, run_dir, own_id, own_epoch, instance_id, spec.connector, network)
        self.spec = spec
        self.credit = Credit(spec.max_queued, spec.high_watermark_bytes)
        self._reserved: set[str] = set()  # requests that were started, and of which nothing was sent

    @property
    def takes_new_requests(self) -> bool:
        return self.epoch is not None and not self.credit.is_spent

    def connect(self, message: PeerUpMessage) -> None:
        """Connects to a process in which nothing waits yet."""
        super().connect(message)
        self.credit.reset()
        self.credit.spend(len(self._reserved), 0)

    def reserve(self, request_id: str) -> None:
        """A request is started; its output will be sent."""
        self._reserved.add(request_id)
        self.credit.spend(1, 0)

    def unreserve(self, request_id: str) -> None:
        """Nothing will be sent of the request. No effect if something was sent, or nothing was reserved."""
        if request_id in self._reserved:
            self._reserved.remove(request_id)
            self.credit.refund(1, 0)

    def put(self, request_id: str, output: StageOutput) -> tuple[PayloadRef, Frames]:
        """Makes the fields of an output that the target reads available to it; spends credit."""
        payload, frames = self.put_payload(select_fields(output, self.spec.reads))
        self._reserved.discard(request_id)  # The target returns the credit that was spent on it.
        self.credit.spend(0, payload.num_bytes)
        return payload, frames


class OutputSender:
    """Sends segments of output, with the fields that each consumer reads. Keeps what a restarting stage is to get.

    Segments of text for callers are sent together, by `flush`, or before the next message.

    Attributes:
        last_sent: When something was sent to the orchestrator (`time.monotonic()`).
    """

    def __init__(self, spec: StageSpec, context: zmq.Context, network: Network | None = None) -> None:
        """`network`: For targets, and an orchestrator, on other machines; None: there are none."""
        run_dir = Path(spec.run_dir)
        self._instance_id = spec.instance.instance_id
        self._segments = spec.segments
        self._hides_tensors = spec.stage.final_output_type == "text" and not spec.stage.kind.text_has_tensors
        self._orchestrator = PayloadPeer(
            context, run_dir, self._instance_id, spec.epoch, ORCHESTRATOR, spec.connector, network
        )
        self._orchestrator.connect(spec.orchestrator)
        self.targets = {
            target: Target(context, run_dir, self._instance_id, spec.epoch, target, target_spec, network)
            for target, target_spec in spec.targets.items()
        }
        self._backlog: dict[int, list[tuple[RequestState, StageOutput]]] = defaultdict(list)
        self._texts: list[StageOutput] = []
        self.last_sent = time.monotonic()
        self._inline = PayloadSender(InlineConnector())

    def has_room(self, targets: Sequence[int]) -> bool:
        """Whether all these stages accept more requests."""
        return all(self.targets[target].takes_new_requests for target in targets)

    def reserve(self, state: RequestState) -> None:
        """A request is started: its outputs will be sent."""
        for target in state.submit.targets:
            self.targets[target].reserve(state.request_id)

    def streams(self, state: RequestState) -> bool:
        """Whether a consumer reads this request's output while it is made."""
        submit = state.submit
        return (submit.is_final and submit.streams) or any(self._window(submit, i).streams for i in submit.targets)

    def reads_tensors(self, state: RequestState) -> bool:
        """Whether a consumer reads more of this request's output than its tokens."""
        if state.submit.is_final and not self._hides_tensors:
            return True
        return any(reads_tensors(self.targets[target].spec.reads) for target in state.submit.targets)

    def segmenter(self, submit: SubmitMessage) -> Segmenter:
        """The state of a request's output: when segments of it are sent."""
        windows = [self._window(submit, target) for target in submit.targets]
        is_read_whole = (submit.is_final and not submit.streams) or any(not window.streams for window in windows)
        readers: list[Reader] = []
        if self._segments is not None:  # Only tokens arrive in pieces so small that they are collected.
            readers += [WindowReader(window) for window in windows if window.streams]
            if submit.is_final and submit.streams:
                readers.append(CallerReader(self._segments))
        return Segmenter(readers, keeps_whole=is_read_whole)

    def _window(self, submit: SubmitMessage, target: int) -> WindowConfig:
        """How a target cuts this request's output into windows."""
        return self.targets[target].spec.window.for_request(submit.streams)

    def send(self, message: Message, frames: Frames = ()) -> None:
        """Sends to the orchestrator."""
        self.flush()
        self._send(message, frames)

    def flush(self) -> None:
        """Sends the segments of text that `send_segment` has kept."""
        if self._texts:
            payload, frames = self._inline.put(self._texts)
            self._texts = []
            self._send(TextsMessage(instance_id=self._instance_id, payload=payload), frames)

    def _send(self, message: Message, frames: Frames) -> None:
        self.last_sent = time.monotonic()
        self._orchestrator.send(message, frames)

    def send_segment(self, state: RequestState, segment: StageOutput) -> None:
        """Sends a segment to the streaming consumers.

        Raises:
            Exception: It has a value that cannot be sent.
        """
        for target in state.submit.targets:
            if self._window(state.submit, target).streams:
                self._send_data(state, target, segment)
        if state.submit.is_final and state.submit.streams:
            self._send_to_caller(state, self._for_caller(segment))

    def _send_to_caller(self, state: RequestState, segment: StageOutput) -> None:
        if self._hides_tensors and segment.completions and not segment.data:  # It is small, whatever the model.
            self._texts.append(segment)
            return
        payload, frames = self._orchestrator.put_payload(segment)
        self.send(OutputMessage(request_id=state.request_id, instance_id=self._instance_id, payload=payload), frames)

    def finish(self, state: RequestState, last_piece: StageOutput) -> tuple[ResultMessage, Frames]:
        """Sends the rest of the output to the targets that stream it, and all of it to the others. Raises as above.

        Returns:
            The message for the orchestrator, to be sent next.
        """
        segment, whole = state.outputs.finish(last_piece)
        for target in state.submit.targets:
            self._send_data(state, target, segment if self._window(state.submit, target).streams else whole)
        payload: PayloadRef | None = None
        frames: Frames = ()
        if state.submit.is_final:
            payload, frames = self._orchestrator.put_payload(
                self._for_caller(segment if state.submit.streams else whole)
            )
        epochs = {target: self.targets[target].epoch for target in state.submit.targets}
        message = ResultMessage(
            request_id=state.request_id,
            instance_id=self._instance_id,
            metrics=state.metrics,
            sent_to={target: epoch for target, epoch in epochs.items() if epoch is not None},
            payload=payload,
        )
        return message, frames

    def on_target_up(self, message: PeerUpMessage) -> dict[str, Exception]:
        """Connects to a target's new process and sends what was kept for it.

        Returns:
            Why the output of some requests could not be sent.
        """
        self.targets[message.instance_id].connect(message)
        errors: dict[str, Exception] = {}
        for state, output in self._backlog.pop(message.instance_id, ()):
            try:
                self._send_data(state, message.instance_id, output)
            except Exception as error:
                self.forget(state.request_id)
                errors[state.request_id] = error
        return errors

    def forget(self, request_id: str) -> None:
        """Drops what is kept of a request that has failed."""
        for target in self.targets.values():
            target.unreserve(request_id)
        for entries in self._backlog.values():
            entries[:] = [entry for entry in entries if entry[0].request_id != request_id]

    def _send_data(self, state: RequestState, target_id: int, output: StageOutput) -> None:
        target = self.targets[target_id]
        if target.epoch is None:
            self._backlog[target_id].append((state, output))
            return
        payload, frames = target.put(state.request_id, output)
        sequence = state.num_sent.get(target_id, 0)
        message = DataMessage(
            request_id=state.request_id,
            number=state.submit.number,
            source=self._instance_id,
            sequence=sequence,
            is_last=output.is_last,
            sent=time.monotonic(),
            payload=payload,
        )
        state.num_sent[target_id] = sequence + 1
        target.send(message, frames)

    def _for_caller(self, output: StageOutput) -> StageOutput:
        """What a caller gets of an output: a text, without the tensors that only other stages read."""
        return msgspec.structs.replace(output, tensors={}) if self._hides_tensors and output.tensors else output
