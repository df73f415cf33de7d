# SPDX-License-Identifier: Apache-2.0
"""What a stage sends to each consumer, and what it keeps, with fake sockets."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stage.fake_sockets import FakeContext
from vllm_omni.config.stage_config import ConnectorConfig, OmniStageConfig, StageInstance, WindowConfig
from vllm_omni.distributed.connectors import PayloadReceiver
from vllm_omni.distributed.messages import (
    InlineRef,
    OutputMessage,
    PeerUpMessage,
    ResultMessage,
    SubmitMessage,
    TextsMessage,
    recv_at_orchestrator,
    recv_at_stage,
)
from vllm_omni.inputs import StageRequest
from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.output_sender import OutputSender
from vllm_omni.stage.request_state import InputStreams, RequestState
from vllm_omni.stage.spec import StageSpec, TargetSpec

INLINE = ConnectorConfig(name="InlineConnector")
ORCHESTRATOR = PeerUpMessage(instance_id=-1, epoch=0, address="orchestrator")
IN_WINDOWS, WHOLE, TOKENS = 1, 2, 3
"""Targets: one reads rows in windows, one everything as a whole, one only tokens."""
MAX_QUEUED = 2


class Stage:
    """The sender of stage 0; all targets are connected."""

    def __init__(self, run_dir: Path, output_type: str = "audio") -> None:
        self.context = FakeContext()
        window = WindowConfig(window_size=2, first_window_size=2, unit="rows")
        spec = StageSpec(
            instance=StageInstance(
                instance_id=0,
                replica=0,
                stage=OmniStageConfig(stage_id=0, final_output=True, final_output_type=output_type),
            ),
            run_dir=str(run_dir),
            orchestrator=ORCHESTRATOR,
            connector=INLINE,
            targets={
                IN_WINDOWS: target_spec(window, None),
                WHOLE: target_spec(WindowConfig(), None),
                TOKENS: target_spec(WindowConfig(), ["completions"]),
            },
        )
        self.sender = OutputSender(spec, self.context)  # type: ignore[arg-type]
        self._payloads = PayloadReceiver(run_dir)
        for target in (IN_WINDOWS, WHOLE, TOKENS):
            self.connect(target)

    def connect(self, target: int, epoch: int = 0) -> dict[str, Exception]:
        address = f"{target}.{epoch}"
        return self.sender.on_target_up(PeerUpMessage(instance_id=target, epoch=epoch, address=address))

    def start(
        self, request_id: str, *targets: int, is_final: bool = True, streams: bool = False, number: int = 1
    ) -> RequestState:
        submit = make_submit(request_id, list(targets), is_final, streams, number)
        state = RequestState(
            submit=submit,
            request=StageRequest(request_id=request_id),
            inputs=InputStreams({}),
            outputs=self.sender.segmenter(submit),
            metrics=StageMetrics(stage_id=0, name="a"),
        )
        self.sender.reserve(state)
        return state

    def write(self, state: RequestState, token: int) -> None:
        segment = state.outputs.add(piece(state.request_id, token))
        assert segment is not None
        self.sender.send_segment(state, segment)

    def data(self, target: int, epoch: int = 0) -> list[tuple[str, int, bool, list[int], list[str]]]:
        """What a target's process received: request, sequence, `is_last`, tokens, and names of tensors."""
        received = []
        for message, frames in self.context.read(f"{target}.{epoch}", recv_at_stage):
            output = self._payloads.get(StageOutput, message.payload, frames)
            tokens = [token for completion in output.completions for token in completion.token_ids]
            received.append((message.request_id, message.sequence, message.is_last, tokens, sorted(output.tensors)))
        return received

    def events(self) -> list[tuple[list[int], list[str]]]:
        """What the orchestrator received: tokens and names of tensors."""
        messages = self.context.read(ORCHESTRATOR.address, recv_at_orchestrator)
        assert all(isinstance(message, OutputMessage) for message, _ in messages)
        return [self.read(message.payload, frames) for message, frames in messages]

    def texts(self) -> list[list[tuple[str, list[int]]]]:
        """What the orchestrator received after `flush`: for each message its requests and their tokens."""
        self.sender.flush()
        received = []
        for message, frames in self.context.read(ORCHESTRATOR.address, recv_at_orchestrator):
            assert isinstance(message, TextsMessage) and isinstance(message.payload, InlineRef)
            outputs = self._payloads.get(list[StageOutput], message.payload, frames)
            received.append([(output.request_id, output.completions[0].token_ids) for output in outputs])
        return received

    def read(self, payload: Any, frames: Any) -> tuple[list[int], list[str]]:
        output = self._payloads.get(StageOutput, payload, [memoryview(frame) for frame in frames])
        return output.completions[0].token_ids, sorted(output.tensors)


def target_spec(window: WindowConfig, reads: list[str] | None) -> TargetSpec:
    return TargetSpec(window=window, reads=reads, max_queued=MAX_QUEUED, high_watermark_bytes=1 << 20, connector=INLINE)


def make_submit(request_id: str, targets: list[int], is_final: bool, streams: bool, number: int = 1) -> SubmitMessage:
    return SubmitMessage(
        request_id=request_id,
        number=number,
        sources=[],
        targets=targets,
        is_final=is_final,
        streams=streams,
        payload=InlineRef(sizes=[]),
    )


def piece(request_id: str, *tokens: int, **tensors: torch.Tensor) -> StageOutput:
    completion = Completion(token_ids=list(tokens))
    rows = {"rows": torch.ones(len(tokens), 4), "other": torch.ones(1)}
    return StageOutput(request_id=request_id, stage_id=0, completions=[completion], tensors={**rows, **tensors})


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


# What each consumer gets.


def test_segments_go_to_streaming_consumers_and_the_whole_to_others(stage: Stage) -> None:
    state = stage.start("r", IN_WINDOWS, WHOLE, streams=True)
    for token in (1, 2):
        stage.write(state, token)
    both = ["other", "rows"]
    assert stage.data(IN_WINDOWS) == [("r", 0, False, [1], both), ("r", 1, False, [2], both)]
    assert stage.data(WHOLE) == [] and stage.events() == [([1], both), ([2], both)]
    message, frames = stage.sender.finish(state, piece("r", 3))
    assert stage.data(IN_WINDOWS) == [("r", 2, True, [3], both)]
    assert stage.data(WHOLE) == [("r", 0, True, [1, 2, 3], both)]
    assert stage.events() == [], "the caller of `finish` sends the result"
    assert isinstance(message, ResultMessage) and message.metrics is state.metrics
    assert stage.read(message.payload, frames) == ([3], both)
    assert message.sent_to == {IN_WINDOWS: 0, WHOLE: 0}


def test_a_caller_that_does_not_stream_gets_the_whole(stage: Stage) -> None:
    state = stage.start("r", IN_WINDOWS)
    stage.write(state, 1)
    message, frames = stage.sender.finish(state, piece("r", 2))
    assert stage.events() == [] and stage.read(message.payload, frames)[0] == [1, 2]


def test_only_final_stages_send_output_to_the_caller(stage: Stage) -> None:
    state = stage.start("r", WHOLE, is_final=False, streams=True)
    stage.write(state, 1)
    message, frames = stage.sender.finish(state, piece("r", 2))
    assert stage.events() == [] and message.payload is None and not frames


def test_targets_get_only_the_fields_that_they_read(stage: Stage) -> None:
    state = stage.start("r", TOKENS, is_final=False)
    stage.sender.finish(state, piece("r", 1))
    assert stage.data(TOKENS) == [("r", 0, True, [1], [])]


def test_callers_of_a_text_stage_get_no_tensors(tmp_path: Path) -> None:
    stage = Stage(tmp_path, output_type="text")
    state = stage.start("r", IN_WINDOWS, streams=True)
    stage.write(state, 1)
    message, frames = stage.sender.finish(state, piece("r", 2))
    assert stage.texts() == [[("r", [1])]] and stage.read(message.payload, frames) == ([2], [])
    assert [names for *_, names in stage.data(IN_WINDOWS)] == [["other", "rows"]] * 2


def test_texts_of_several_requests_are_one_message(tmp_path: Path) -> None:
    stage = Stage(tmp_path, output_type="text")
    states = [stage.start(request_id, streams=True) for request_id in "rs"]
    for state in states:
        stage.write(state, 1)
    assert stage.texts() == [[("r", [1]), ("s", [1])]] and stage.texts() == []


def test_a_text_is_sent_before_the_end_of_its_request(tmp_path: Path) -> None:
    stage = Stage(tmp_path, output_type="text")
    state = stage.start("r", streams=True)
    stage.write(state, 1)
    stage.sender.send(*stage.sender.finish(state, piece("r", 2)))
    messages = stage.context.read(ORCHESTRATOR.address, recv_at_orchestrator)
    assert [type(message) for message, _ in messages] == [TextsMessage, ResultMessage]


@pytest.mark.parametrize(
    ("targets", "is_final", "streams", "expected"),
    [
        ([], True, False, (False, True)),
        ([], True, True, (True, True)),
        ([WHOLE], False, True, (False, True)),
        ([IN_WINDOWS], False, False, (True, True)),
        ([TOKENS], False, False, (False, False)),
        ([TOKENS, WHOLE], False, False, (False, True)),
    ],
)
def test_what_the_engine_must_output(
    stage: Stage, targets: list[int], is_final: bool, streams: bool, expected: tuple[bool, bool]
) -> None:
    state = stage.start("r", *targets, is_final=is_final, streams=streams)
    assert (stage.sender.streams(state), stage.sender.reads_tensors(state)) == expected


@pytest.mark.parametrize(
    ("targets", "is_final", "streams", "num_kept"),
    [
        ([IN_WINDOWS], True, True, 0),
        ([IN_WINDOWS], False, False, 0),
        ([], True, True, 0),
        ([], True, False, 10),
        ([IN_WINDOWS], True, False, 10),
        ([IN_WINDOWS, WHOLE], True, True, 10),
    ],
)
def test_sent_segments_are_kept_only_for_consumers_that_read_the_whole(
    stage: Stage, targets: list[int], is_final: bool, streams: bool, num_kept: int
) -> None:
    output, kept = stage.sender.segmenter(make_submit("r", targets, is_final, streams)), []
    for _ in range(10):
        rows = torch.ones(2, 4)
        kept.append(weakref.ref(rows))
        assert output.add(StageOutput(request_id="r", stage_id=0, tensors={"rows": rows})) is not None
        del rows

    assert sum(rows() is not None for rows in kept) == num_kept
    segment, whole = output.finish(StageOutput(request_id="r", stage_id=0, tensors={"rows": torch.ones(1, 4)}))
    assert len(segment.tensors["rows"]) == 1
    if num_kept:
        assert len(whole.tensors["rows"]) == 21


# Credit.


def test_a_started_request_takes_room_until_the_target_returns_it(stage: Stage) -> None:
    states = [stage.start(request_id, WHOLE) for request_id in "rs"]
    assert not stage.sender.has_room([WHOLE]) and not stage.sender.has_room([IN_WINDOWS, WHOLE])
    assert stage.sender.has_room([IN_WINDOWS]) and stage.sender.has_room([])
    stage.sender.finish(states[0], piece("r", 1))
    stage.sender.forget("r")
    assert not stage.sender.has_room([WHOLE]), "the request now waits in the target"
    stage.sender.targets[WHOLE].credit.refund(1, 0)
    assert stage.sender.has_room([WHOLE])


def test_a_forgotten_request_of_which_nothing_was_sent_gives_its_room_back(stage: Stage) -> None:
    for request_id in "rs":
        stage.start(request_id, WHOLE)
    for request_id in ("r", "r", "unknown"):
        stage.sender.forget(request_id)
    assert stage.sender.has_room([WHOLE])
    stage.start("t", WHOLE)
    assert not stage.sender.has_room([WHOLE])


# Targets that restart.


def test_output_for_a_restarting_target_is_sent_to_its_next_process(stage: Stage) -> None:
    state = stage.start("r", IN_WINDOWS, WHOLE, is_final=False)
    stage.sender.targets[IN_WINDOWS].disconnect()
    assert not stage.sender.has_room([IN_WINDOWS])
    stage.write(state, 1)
    message, _ = stage.sender.finish(state, piece("r", 2))
    assert message.sent_to == {WHOLE: 0} and stage.data(IN_WINDOWS) == []
    assert stage.connect(IN_WINDOWS, epoch=1) == {}
    assert [entry[:4] for entry in stage.data(IN_WINDOWS, epoch=1)] == [("r", 0, False, [1]), ("r", 1, True, [2])]
    assert stage.connect(IN_WINDOWS, epoch=2) == {} and stage.data(IN_WINDOWS, epoch=2) == []


def test_kept_output_of_a_forgotten_request_is_dropped(stage: Stage) -> None:
    stage.sender.targets[WHOLE].disconnect()
    for request_id in "rs":
        stage.sender.finish(stage.start(request_id, WHOLE, is_final=False), piece(request_id, 1))
    stage.sender.forget("r")
    stage.connect(WHOLE, epoch=1)
    assert [entry[0] for entry in stage.data(WHOLE, epoch=1)] == ["s"]


def test_kept_output_that_cannot_be_sent_fails_only_its_request(stage: Stage) -> None:
    stage.sender.targets[WHOLE].disconnect()
    states = {request_id: stage.start(request_id, WHOLE, is_final=False) for request_id in "rs"}
    broken = piece("r", 1)
    broken.data = {"value": object()}
    stage.sender.finish(states["r"], broken)
    stage.sender.finish(states["s"], piece("s", 2))
    errors = stage.connect(WHOLE, epoch=1)
    assert list(errors) == ["r"] and isinstance(errors["r"], TypeError)
    assert [entry[0] for entry in stage.data(WHOLE, epoch=1)] == ["s"]


def test_output_that_cannot_be_sent_raises(stage: Stage) -> None:
    broken = piece("r", 1)
    broken.data = {"value": object()}
    with pytest.raises(TypeError):
        stage.sender.finish(stage.start("r", WHOLE), broken)
    assert stage.data(WHOLE) == [] and stage.events() == []
