# SPDX-License-Identifier: Apache-2.0
"""Random requests to an omni model, what came of them, and how far two answers are apart.

Used by `exactness.py` and its test. Knows nothing of reports.
"""

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
"""What the talker's tokens are called where they are an output."""
WAVE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Wish:
    """One request.

    Attributes:
        kind, media_seed: Of the prompt (`media.make_prompt`).
        modalities: As in a prompt; None for all that the pipeline has.
        text_tokens, talker_tokens: (min, max).
        seed: Of text and codes, which are sampled as the model's authors do; None for greedy ones.
        wave_seed: Of the noise that the wave is made from, in models that draw any.
        delay_s: When it is sent, after the crowd has begun to gather.
        stream: Whether its caller reads along.
        leaves: Its caller leaves at the first thing it hears.
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
    leaves: bool

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


def make_wish(
    rng: random.Random, max_talker_tokens: int, spread_s: float, modalities: Sequence[tuple[str, ...] | None]
) -> Wish:
    """Any kind of prompt, any length, any voice, any of the `modalities`; half of them greedy."""
    return Wish(
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
        leaves=rng.random() < 0.1,
    )


def _length(rng: random.Random, longest: int) -> tuple[int, int]:
    """Sometimes fixed, sometimes as long as the model likes, now and then 1."""
    length = rng.choice((1, *(rng.randint(2, longest) for _ in range(7))))
    return rng.choice((0, 0, length)), length


@dataclass(frozen=True)
class Answer:
    """What came of a wish; None where it did not ask for it.

    Attributes:
        codes: The talker's tokens, as sampled.
        audio: float32 `[samples]`.
    """

    text: list[int] | None = None
    codes: list[int] | None = None
    audio: torch.Tensor | None = None

    def difference_to(self, other: "Answer") -> str | None:
        """In words; None if there is none beyond rounding of the wave."""
        for name, mine, theirs in (("text", self.text, other.text), ("codes", self.codes, other.codes)):
            if mine is not None and theirs is not None and mine != theirs:
                return f"{name}: {mine} and {theirs}"
        distance = self.wave_distance(other)
        if not distance <= WAVE_TOLERANCE:
            return f"waves of {_samples(self)} and {_samples(other)} samples differ by {distance:.2g}"
        return None

    def wave_distance(self, other: "Answer") -> float:
        """The largest difference of two samples; infinite if one wave is longer; 0 where there are not two."""
        if self.audio is None or other.audio is None:
            return 0.0
        if self.audio.shape != other.audio.shape:
            return float("inf")
        return (self.audio - other.audio).abs().max().item() if len(self.audio) else 0.0


class WrongAnswer(Exception):
    """A request failed, or its pieces are not its whole."""


async def ask(llm: AsyncOmniLLM, prompt: Any, params: list[SamplingParams], wish: Wish) -> Answer | None:
    """Sends one request; None if its caller leaves.

    Raises:
        WrongAnswer: It failed, or its pieces, joined, are not what came at its end.
    """
    pieces: list[ARSegmentEvent] = []
    async for event in llm.generate(prompt, params, stream=wish.stream):
        if isinstance(event, ErrorEvent):
            raise WrongAnswer(f"{wish}: {event}")
        if isinstance(event, CompletedEvent):
            return _read(event.outputs, pieces, wish)
        if wish.leaves:
            return None
        if isinstance(event, ARSegmentEvent):
            pieces.append(event)
    raise WrongAnswer(f"{wish}: it has no end")


async def ask_crowd(
    llm: AsyncOmniLLM, requests: list[tuple[Wish, dict[str, Any], list[SamplingParams]]]
) -> list[Answer | None]:
    """Sends all requests, each after its delay."""

    async def send(wish: Wish, prompt: dict[str, Any], params: list[SamplingParams]) -> Answer | None:
        await asyncio.sleep(wish.delay_s)
        return await ask(llm, prompt, params, wish)

    return await asyncio.gather(*(send(*request) for request in requests))


def ask_reference(oracle: HFOracle, prompt: dict[str, Any], wish: Wish) -> Answer:
    """What HF transformers answers to a greedy wish: all that it can."""
    result = oracle.generate(
        prompt,
        thinker_min_tokens=wish.text_tokens[0],
        thinker_max_tokens=wish.text_tokens[1],
        talker_min_tokens=wish.talker_tokens[0],
        talker_max_tokens=wish.talker_tokens[1],
        speaker=wish.speaker,
        wave_seed=wish.wave_seed,
    )
    return Answer(result.thinker_token_ids, result.talker_token_ids, result.audio)


def _read(outputs: list[OmniRequestOutput], pieces: list[ARSegmentEvent], wish: Wish) -> Answer:
    answer = Answer()
    for output in outputs:
        its_pieces = [piece for piece in pieces if piece.stage_id == output.stage_id]
        if output.final_output_type == "audio":
            audio = output.multimodal_output["audio"]
            waves = [p.multimodal_output["audio"] for p in its_pieces if "audio" in p.multimodal_output]
            _check(not waves or torch.equal(torch.cat(waves), audio), f"{wish}: pieces of speech are not the whole")
            answer = Answer(answer.text, answer.codes, audio)
        else:
            tokens = list(output.outputs[0].token_ids) if output.outputs else []
            joined = [token for piece in its_pieces for token in piece.tokens]
            _check(not its_pieces or joined == tokens, f"{wish}: pieces of tokens are not the whole")
            is_codes = output.final_output_type == CODES
            answer = Answer(answer.text if is_codes else tokens, tokens if is_codes else answer.codes, answer.audio)
    return answer


def _check(is_right: bool, complaint: str) -> None:
    if not is_right:
        raise WrongAnswer(complaint)


def _samples(answer: Answer) -> int:
    return 0 if answer.audio is None else len(answer.audio)
