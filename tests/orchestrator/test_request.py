# SPDX-License-Identifier: Apache-2.0
"""The outputs of a request that are kept until its end."""

import gc
import weakref
from typing import cast

import pytest
import torch

from tests.orchestrator.pipelines import fake_stage, make_config
from vllm_omni.events import OmniEvent
from vllm_omni.inputs import StageRequest
from vllm_omni.launch.stage_handle import StageHandle
from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.orchestrator.request import PipelineRequest, RequestRecord
from vllm_omni.outputs import Completion, OmniRequestOutput, StageOutput

RATE = 1000
CONFIG = make_config(
    fake_stage(0, "writer", (), "text"), fake_stage(1, "speaker", (0,), "audio") | {"sample_rate": RATE}
)


class Story:
    """A streamed request; no event is kept but the last."""

    def __init__(self, keep_outputs: bool) -> None:
        stages = {stage_id: StageRequest(request_id="r") for stage_id in (0, 1)}
        self.request = PipelineRequest(
            request_id="r",
            external_id="r",
            stages=stages,
            final_stages=[0, 1],
            on_event=self.take,
            streams=True,
            keep_outputs=keep_outputs,
        )
        self.record = RequestRecord(self.request, 1, CONFIG)
        self.last: OmniEvent
        self.waves: list[weakref.ref[torch.Tensor]] = []

    def take(self, event: OmniEvent) -> None:
        self.last = event

    def write(self, *tokens: int, finish_reason: str | None = None, index: int = 0, prompt: str | None = None) -> None:
        text = "".join(f"{token} " for token in tokens)
        completion = Completion(index=index, text=text, token_ids=list(tokens), finish_reason=finish_reason)
        piece = StageOutput(request_id="r", stage_id=0, completions=[completion], prompt=prompt)
        self.record.add_piece(0, piece)

    def speak(self, num_samples: int) -> None:
        wave = torch.ones(num_samples)
        self.waves.append(weakref.ref(wave))
        self.record.add_piece(1, StageOutput(request_id="r", stage_id=1, tensors={"audio": wave}))

    def num_held(self) -> int:
        """Of the pieces of sound."""
        gc.collect()
        return sum(wave() is not None for wave in self.waves)

    def complete(self) -> list[OmniRequestOutput]:
        for stage_id, name in enumerate(("writer", "speaker")):
            metrics = StageMetrics(stage_id=stage_id, name=name, num_output_tokens=7)
            self.record.finish(stage_id, metrics)
        return self.record.complete().outputs


@pytest.mark.parametrize(("keep_outputs", "num_held"), [(True, 100), (False, 1)])
def test_streamed_outputs_are_kept_only_on_request(keep_outputs: bool, num_held: int) -> None:
    story = Story(keep_outputs)
    for _ in range(100):
        story.speak(RATE // 2)
    assert story.num_held() == num_held
    assert story.record.summarize().audio_seconds == 50.0


def test_the_stages_of_a_stream_that_is_made_again_learn_what_its_caller_has() -> None:
    story, lost_in = Story(keep_outputs=False), cast(StageHandle, None)
    for _ in range(3):
        story.speak(RATE // 2)
    again = story.record.make_retry(lost_in)
    assert [stage.sent_s for stage in story.request.stages.values()] == [1.5, 1.5]
    again.add_piece(1, StageOutput(request_id="r", stage_id=1, tensors={"audio": torch.ones(2 * RATE)}))
    again.make_retry(lost_in)
    assert [stage.sent_s for stage in story.request.stages.values()] == [2.0, 2.0], "half a second was new"


def test_the_last_event_without_outputs_has_everything_else() -> None:
    whole, light = Story(True), Story(False)
    outputs = []
    for story in (whole, light):
        story.write(1, 2, prompt="p")
        story.write(5, index=1, finish_reason="length")
        story.write(3)
        story.write(4, finish_reason="stop")
        for num_samples in (5, 4, 0):
            story.speak(num_samples)
        outputs.append(story.complete())
    (text, speech), (light_text, light_speech) = outputs
    assert [c.token_ids for c in text.outputs] == [[1, 2, 3, 4], [5]]
    assert [c.token_ids for c in light_text.outputs] == [[4], []], "what is new since the event before"
    assert [c.text for c in light_text.outputs] == ["4 ", ""]
    for output in (text, light_text):
        assert [c.finish_reason for c in output.outputs] == ["stop", "length"]
        assert output.prompt == "p" and output.stage_metrics == speech.stage_metrics
    assert speech.multimodal_output["audio"].shape == (9,)
    assert light_speech.multimodal_output["audio"].shape == (0,)
    assert light_speech.sample_rate == speech.sample_rate == RATE
    assert light.record.summarize().num_text_tokens == 7


def test_an_output_of_one_segment_is_whole() -> None:
    story = Story(keep_outputs=False)
    story.write(1, 2, finish_reason="stop")
    story.speak(6)
    text, speech = story.complete()
    assert text.outputs[0].token_ids == [1, 2] and len(speech.multimodal_output["audio"]) == 6
