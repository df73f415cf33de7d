# SPDX-License-Identifier: Apache-2.0
"""What all answers of `vllm-omni demo` have in common: their text is printed while it is made, and verdicts follow."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from vllm_omni.entrypoints.omni_llm import OmniLLM
from vllm_omni.events import ARSegmentEvent, CompletedEvent, ErrorEvent
from vllm_omni.outputs import OmniRequestOutput


@dataclass
class Answer:
    """
    Attributes:
        speech: float32 `[samples]`, 24 kHz.
        first_audio: Seconds from the request to the first of them.
        seconds: Until the last of them.
        is_cut: The text has reached its maximum length.
        output: That of the speech.
    """

    text: str
    speech: torch.Tensor
    first_audio: float
    seconds: float
    is_cut: bool
    output: OmniRequestOutput


def stream_answer(omni: OmniLLM, content: str | list[dict[str, Any]], **options: Any) -> Answer:
    """Prints the text while it is generated."""
    started, first_audio = time.perf_counter(), 0.0
    messages: list[Any] = [{"role": "user", "content": content}]
    for event in omni.chat(messages, stream=True, **options):
        if isinstance(event, ErrorEvent):
            raise event.error
        if isinstance(event, ARSegmentEvent) and event.final_output_type == "text":
            print(event.text.replace("\n", "\n      "), end="", flush=True)
        elif isinstance(event, ARSegmentEvent):
            first_audio = first_audio or time.perf_counter() - started
    print()
    assert isinstance(event, CompletedEvent)
    text, speech = event.outputs
    return Answer(
        text=text.outputs[0].text,
        speech=speech.multimodal_output["audio"],
        first_audio=first_audio,
        seconds=time.perf_counter() - started,
        is_cut=text.outputs[0].finish_reason == "length",
        output=speech,
    )


def print_verdict(what: str, is_right: bool, note: str) -> None:
    print(f"      {what} {'right' if is_right else 'WRONG'}: {note}", flush=True)
