# SPDX-License-Identifier: Apache-2.0
"""Processes of stages that are killed while callers listen: every stream is the undisturbed one, sample by sample."""

import os
import random
import signal

import pytest
import torch

from coloured_shapes.language import describe, random_scene
from tests.orchestrator.test_failure import wait_until
from vllm_omni import ARSegmentEvent, CompletedEvent, OmniLLM

GROUP = "shapes"
pytestmark = pytest.mark.slow

NUM_CALLERS = 8
NUM_KILLS = 6
"""Each stage twice; a stage may die five times in 300 s."""
NUM_SAMPLES = 2000
"""Of speech, about as many as a character takes."""


def kill(llm: OmniLLM, name: str) -> None:
    stages = llm._pipeline.orchestrator._supervisor.stages
    (pid,) = [stage.process.pid for stage in stages if stage.process and stage.handle.instance.name == name]
    os.kill(pid, signal.SIGKILL)


def listen(
    llm: OmniLLM, conversations: list[list], victim: str | None = None, after: int = 0, params: list | None = None
) -> list[tuple]:
    """The streamed text and sound of each conversation. A stage is killed after so many samples, and characters for
    `NUM_SAMPLES` each: how many events they come in differs from time to time."""
    texts, sounds, num_heard = [""] * len(conversations), [[] for _ in conversations], 0
    for event in llm.chat(conversations, params, stream=True):
        if victim and num_heard >= after:
            kill(llm, victim)
            victim = None
        if isinstance(event, ARSegmentEvent):
            texts[event.prompt_index] += event.text
            num_heard += NUM_SAMPLES * len(event.text)
            if "audio" in event.multimodal_output:
                sounds[event.prompt_index].append(event.multimodal_output["audio"])
                num_heard += len(sounds[event.prompt_index][-1])
        else:
            assert isinstance(event, CompletedEvent), event
            text, speech = event.outputs
            assert texts[event.prompt_index] == text.outputs[0].text
            assert torch.equal(torch.cat(sounds[event.prompt_index]), speech.multimodal_output["audio"])
    assert victim is None, "it was never killed"
    return [(text, torch.cat(sound)) for text, sound in zip(texts, sounds, strict=True)]


def test_no_stream_breaks(shapes_llm: OmniLLM) -> None:
    llm = shapes_llm
    dice = random.Random(0)
    sentences = [f"Say: {describe(random_scene(dice))}" for _ in range(NUM_CALLERS)]
    conversations = [[{"role": "user", "content": sentence}] for sentence in sentences]
    expected = listen(llm, conversations)
    num_samples = sum(NUM_SAMPLES * len(text) + len(sound) for text, sound in expected)
    names = [stage.name for stage in llm.health()]
    for number in range(NUM_KILLS):
        heard = listen(llm, conversations, names[number % len(names)], dice.randrange(num_samples * 3 // 4))
        for (text, sound), (expected_text, expected_sound) in zip(heard, expected, strict=True):
            assert text == expected_text and sound.shape == expected_sound.shape
            assert torch.allclose(sound, expected_sound, rtol=0.0, atol=1e-6), (
                "which alone and in a batch differ by 4e-7"
            )
    # The last one was idle, perhaps.
    wait_until(lambda: sum(stage.num_restarts for stage in llm.health()) == NUM_KILLS)


def test_no_stream_of_a_random_answer_breaks(shapes_llm: OmniLLM) -> None:
    llm = shapes_llm
    conversations = [[{"role": "user", "content": "Say: there are three green stars."}]] * NUM_CALLERS
    first, *others = llm.health()
    params = [{"temperature": 1.0, "ignore_eos": True, "max_tokens": 24}, *[None] * len(others)]
    heard = listen(llm, conversations, first.name, NUM_CALLERS * 10 * NUM_SAMPLES, params)
    assert len({text for text, _ in heard}) > 1
