# SPDX-License-Identifier: Apache-2.0
"""Random requests to an omni model, their results, and how far two results are apart."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams

from vllm_omni import ARSegmentEvent, AsyncOmniLLM, CompletedEvent, ErrorEvent, OmniRequestOutput
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import HARD_KINDS, PROMPT_KINDS, make_prompt

SPEAKERS = ("Chelsie", "Ethan", "Aiden")
CODES = "codes"
"""The name of the talker's tokens where they are an output."""
WAVE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class RandomRequest:
    """
    Attributes:
        kind, media_seed: Of the prompt (`media.make_prompt`).
        modalities: As in a prompt; None for all outputs of the pipeline.
        text_tokens, talker_tokens: (min, max).
        seed: Of text and codes, which are then sampled as the model's authors do; None: greedy.
        wave_seed: Of the noise that the wave is made from, in models that draw noise.
        delay_s: When it is sent, after the first of the concurrent requests could be.
        stream: Whether its client streams.
        aborts: Its client disconnects at the first event.
    """

    kind: str
    media_seed: int
    speaker: str
    modalities: tuple[str, ...] | None
    text_tokens: tuple[int, int]
    talker_tokens: tuple[int, int]
    seed: int | None
    wave_seed: int
    delay_s: float
    stream: bool
    aborts: bool

    def prompt(self, checkpoint: Path) -> dict[str, Any]:
        prompt = make_prompt(checkpoint, self.kind, self.media_seed)
        prompt["additional_information"] = {"speaker": self.speaker}
        if self.modalities is not None:
            prompt["modalities"] = list(self.modalities)
        return prompt

    def sampling_params(self, top_k: int, top_p: float) -> list[SamplingParams]:
        """One for each stage. `top_k` and `top_p` are the talker's, where it samples."""
        greedy: dict[str, Any] = {"temperature": 0.0}
        text = greedy if self.seed is None else {"temperature": 0.8, "top_p": 0.95, "top_k": 20, "seed": self.seed}
        codes = greedy if self.seed is None else {"temperature": 0.9, "top_p": top_p, "top_k": top_k, "seed": self.seed}
        return [
            SamplingParams(min_tokens=self.text_tokens[0], max_tokens=self.text_tokens[1], **text),
            SamplingParams(
                min_tokens=self.talker_tokens[0],
                max_tokens=self.talker_tokens[1],
                repetition_penalty=1.05,
                detokenize=False,
                **codes,
            ),
            SamplingParams(max_tokens=1, seed=self.wave_seed, detokenize=False),
        ]


def make_random_request(
    rng: random.Random, max_talker_tokens: int, spread_s: float, modalities: Sequence[tuple[str, ...] | None]
) -> RandomRequest:
    """Any kind of prompt, any length, any voice, any of the `modalities`; half of them greedy."""
    return RandomRequest(
        kind=rng.choice((*PROMPT_KINDS, *HARD_KINDS)),
        media_seed=rng.randrange(1000),
        speaker=rng.choice(SPEAKERS),
        modalities=rng.choice(modalities),
        text_tokens=_length(rng, 28),
        talker_tokens=_length(rng, max_talker_tokens),
        seed=rng.choice((None, rng.randrange(1 << 31))),
        wave_seed=rng.randrange(1 << 31),
        delay_s=rng.uniform(0, spread_s),
        stream=rng.random() < 0.5,
        aborts=rng.random() < 0.1,
    )


def _length(rng: random.Random, longest: int) -> tuple[int, int]:
    """Sometimes fixed, sometimes up to the model, now and then 1."""
    length = rng.choice((1, *(rng.randint(2, longest) for _ in range(7))))
    return rng.choice((0, 0, length)), length


@dataclass(frozen=True)
class Result:
    """The outputs of a request; None: not requested.

    Attributes:
        codes: The talker's tokens, as sampled.
        audio: float32 `[samples]`.
    """

    text: list[int] | None = None
    codes: list[int] | None = None
    audio: torch.Tensor | None = None

    def difference_to(self, other: "Result") -> str | None:
        """In words; None if there is none beyond rounding of the wave."""
        for name, mine, theirs in (("text", self.text, other.text), ("codes", self.codes, other.codes)):
            if mine is not None and theirs is not None and mine != theirs:
                return f"{name}: {mine} and {theirs}"
        distance = self.wave_distance(other)
        if not distance <= WAVE_TOLERANCE:
            return f"waves of {_samples(self)} and {_samples(other)} samples differ by {distance:.2g}"
        return None

    def wave_distance(self, other: "Result") -> float:
        """The largest difference of two samples; infinite if one wave is longer; 0 where there are not two."""
        if self.audio is None or other.audio is None:
            return 0.0
        if self.audio.shape != other.audio.shape:
            return float("inf")
        return (self.audio - other.audio).abs().max().item() if len(self.audio) else 0.0


async def send(llm: AsyncOmniLLM, prompt: Any, params: list[SamplingParams], request: RandomRequest) -> Result | None:
    """Sends one request; None if its client aborts.

    Raises:
        AssertionError: It failed, or its segments, joined, are not the result at its end.
    """
    segments: list[ARSegmentEvent] = []
    async for event in llm.generate(prompt, params, stream=request.stream):
        assert not isinstance(event, ErrorEvent), f"{request}: {event}"
        if isinstance(event, CompletedEvent):
            return _read(event.outputs, segments, request)
        if request.aborts:
            return None
        if isinstance(event, ARSegmentEvent):
            segments.append(event)
    raise AssertionError(f"{request}: no terminal event")


async def send_concurrently(
    llm: AsyncOmniLLM, requests: list[tuple[RandomRequest, dict[str, Any], list[SamplingParams]]]
) -> list[Result | None]:
    """Sends all requests, each after its delay."""

    async def send_later(request: RandomRequest, prompt: dict[str, Any], params: list[SamplingParams]) -> Result | None:
        await asyncio.sleep(request.delay_s)
        return await send(llm, prompt, params, request)

    return await asyncio.gather(*(send_later(*each) for each in requests))


def run_hf(oracle: HFOracle, prompt: dict[str, Any], request: RandomRequest) -> Result:
    """The result of HF transformers for a greedy request, with all outputs."""
    result = oracle.generate(
        prompt,
        thinker_min_tokens=request.text_tokens[0],
        thinker_max_tokens=request.text_tokens[1],
        talker_min_tokens=request.talker_tokens[0],
        talker_max_tokens=request.talker_tokens[1],
        speaker=request.speaker,
        wave_seed=request.wave_seed,
    )
    return Result(result.thinker_token_ids, result.talker_token_ids, result.audio)


def _read(outputs: list[OmniRequestOutput], segments: list[ARSegmentEvent], request: RandomRequest) -> Result:
    text = codes = audio = None
    for output in outputs:
        own = [segment for segment in segments if segment.stage_id == output.stage_id]
        if output.final_output_type == "audio":
            audio = output.multimodal_output["audio"]
            waves = [s.multimodal_output["audio"] for s in own if "audio" in s.multimodal_output]
            assert not waves or torch.equal(torch.cat(waves), audio), f"{request}: segments of audio are not the whole"
        else:
            tokens = list(output.outputs[0].token_ids) if output.outputs else []
            joined = [token for segment in own for token in segment.tokens]
            assert not own or joined == tokens, f"{request}: segments of tokens are not the whole"
            if output.final_output_type == CODES:
                codes = tokens
            else:
                text = tokens
    return Result(text, codes, audio)


def _samples(result: Result) -> int:
    return 0 if result.audio is None else len(result.audio)
