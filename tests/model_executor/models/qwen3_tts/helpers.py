# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS's stages on tiny checkpoints, and what the reference made of these (see `make_fixtures`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.model_executor.models.speech import SpeechCase, SpeechModel, load_prompts, start_speaker

from .prompts import MAX_FRAMES, PROMPTS

FIXTURES = Path(__file__).parent / "fixtures"
AUDIO_STEP = 61
GREEDY = {"temperature": 0.0, "repetition_penalty": 1.05, "min_tokens": 2, "max_tokens": MAX_FRAMES + 1}


def as_prompt(prompt: dict[str, Any], kind: str, size: str) -> dict[str, Any]:
    """A prompt with our names of the reference's fields."""
    fields = dict(prompt["additional_information"])
    fields.pop("x_vector_only_mode", None)  # without ref_text
    instructions = fields.pop("instruct", None)
    is_dropped = (kind, size) == ("qwen3_tts", "large")  # By the reference, which does not refuse them.
    if instructions is not None and not is_dropped:
        fields["instructions"] = instructions
    return {"prompt": prompt["prompt"], "additional_information": fields}


def read_cases(kind: str, size: str, fixtures: Path = FIXTURES) -> dict[str, SpeechCase]:
    made = load_file(fixtures / f"{size}.safetensors")
    cases = {}
    for name, prompt in PROMPTS[kind].items():
        ref_codes = made.get(f"{kind}/{name}/ref_codes")
        cases[name] = SpeechCase(
            prompt=as_prompt(prompt, kind, size),
            codes=made[f"{kind}/{name}/codes"].long(),
            audio=made[f"{kind}/{name}/audio"],
            audio_step=AUDIO_STEP,
            ref_codes=None if ref_codes is None else ref_codes.long(),
        )
    return cases


@contextmanager
def start_talker(checkpoint: Path, cases: dict[str, SpeechCase]) -> Iterator[SpeechModel]:
    with start_speaker(checkpoint, max_model_len=128, num_gpu_blocks_override=6) as engine:  # Its prompts are short.
        yield SpeechModel(engine, load_prompts("qwen3_tts", checkpoint), cases, GREEDY)
