# SPDX-License-Identifier: Apache-2.0
"""Random concurrent requests get what each of them gets alone, and what HF transformers makes of it.

Prompts of all kinds, lengths, voices and modalities, greedy and sampled, at random times; some clients abort. Text and
codes must be equal, and waves within 1e-4.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from vllm import SamplingParams

from vllm_omni import ARSegmentEvent, AsyncOmniLLM, CompletedEvent, ErrorEvent, OmniRequestOutput
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import HARD_KINDS, PROMPT_KINDS, make_prompt

MAX_CONCURRENCY = 8
SPEAKERS = ("Chelsie", "Ethan", "Aiden")
CODES = "codes"
"""The name of the talker's tokens where they are an output."""
MODALITIES = (None, ("text",), ("audio",), ("text", "audio"), ("audio", CODES))
MAX_TALKER_TOKENS = 60
"""The longest speech, in codes."""
SPREAD_S = 0.6
"""Of the times at which requests are sent."""
WAVE_TOLERANCE = 1e-4
ONE_IN_REFERENCE = 3
"""Of the greedy requests, how many HF transformers repeats."""


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


def make_random_request(rng: random.Random) -> RandomRequest:
    """Any kind of prompt, any length, any voice, any modalities; half of them greedy."""
    return RandomRequest(
        kind=rng.choice((*PROMPT_KINDS, *HARD_KINDS)),
        media_seed=rng.randrange(1000),
        speaker=rng.choice(SPEAKERS),
        modalities=rng.choice(MODALITIES),
        text_tokens=_length(rng, 28),
        talker_tokens=_length(rng, MAX_TALKER_TOKENS),
        seed=rng.choice((None, rng.randrange(1 << 31))),
        wave_seed=rng.randrange(1 << 31),
        delay_s=rng.uniform(0, SPREAD_S),
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


@dataclass(frozen=True)
class Model:
    """
    Attributes:
        top_k, top_p: The talker's, by its authors.
        streamed_wave_differs: From that of clients that do not stream, by design.
    """

    name: str
    checkpoint: str
    top_k: int
    top_p: float
    streamed_wave_differs: bool


MODELS = (
    Model("qwen2_5_omni", "tiny_qwen2_5_omni", 40, 0.8, streamed_wave_differs=True),
    Model("qwen3_omni_moe", "tiny_qwen3_omni_moe", 50, 1.0, streamed_wave_differs=False),
)


@dataclass
class Comparison:
    """A pipeline, its reference, and the comparisons so far."""

    model: Model
    checkpoint: Path
    llm: AsyncOmniLLM
    num_alone: int = 0
    num_reference: int = 0
    num_tokens: int = 0
    differences: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._oracle = HFOracle(self.checkpoint, num_threads=1)

    def run_until(self, num_alone: int, seed: int) -> None:
        """Rounds of concurrent requests, each of which is sent again alone; some are put to the reference."""
        rng = random.Random(seed)
        while self.num_alone < num_alone or not self.num_reference:
            self._run_round(rng)

    def _run_round(self, rng: random.Random) -> None:
        requests = [make_random_request(rng) for _ in range(rng.randint(2, MAX_CONCURRENCY))]
        sent = [(request, request.prompt(self.checkpoint), self._params(request)) for request in requests]
        results = asyncio.run(send_concurrently(self.llm, sent))
        for request, result in zip(requests, results, strict=True):
            if result is None:
                continue
            self.num_alone += 1
            self.num_tokens += len(result.text or []) + len(result.codes or [])
            self._compare(request, result, self._send_alone(request), "concurrent and alone")
            if request.seed is None and rng.randrange(ONE_IN_REFERENCE) == 0:
                self._compare_to_reference(request, result)

    def _compare_to_reference(self, request: RandomRequest, result: Result) -> None:
        expected = run_hf(self._oracle, request.prompt(self.checkpoint), request)
        self.num_reference += 1
        if request.stream and self.model.streamed_wave_differs and result.audio is not None:
            self._compare(request, replace(result, audio=None), expected, "streamed and HF")
            request = replace(request, stream=False)
            result = self._send_alone(request)
        self._compare(request, result, expected, "ours and HF")

    def _send_alone(self, request: RandomRequest) -> Result:
        prompt = request.prompt(self.checkpoint)
        result = asyncio.run(send(self.llm, prompt, self._params(request), replace(request, aborts=False)))
        assert result is not None
        return result

    def _params(self, request: RandomRequest) -> list[Any]:
        return request.sampling_params(self.model.top_k, self.model.top_p)

    def _compare(self, request: RandomRequest, result: Result, other: Result, which: str) -> None:
        difference = result.difference_to(other)
        if difference is not None:
            self.differences.append(f"{which}: {difference}: {request}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_many_requests_with_the_codes_as_an_output(
    model: Model, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """As its stage configuration has it, windows included, with the talker's codes as one more output."""
    config = yaml.safe_load((stage_configs_dir() / f"{model.name}.yaml").read_text())
    config["stage_args"][1] |= {"final_output": True, "final_output_type": CODES}
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(config))
    checkpoint = request.getfixturevalue(model.checkpoint)
    limits = {"max_model_len": 1024, "max_num_seqs": MAX_CONCURRENCY, "kv_cache_memory_bytes": 64 << 20}
    with AsyncOmniLLM(str(checkpoint), str(file), dtype="float32", **limits) as llm:
        comparison = Comparison(model, checkpoint, llm)
        comparison.run_until(12, seed=0)
    assert comparison.differences == []
    assert comparison.num_tokens > 0


def test_a_seed_decides_the_requests_and_lengths_fit() -> None:
    first, again = ([make_random_request(rng) for _ in range(200)] for rng in (random.Random(1), random.Random(1)))

    assert again == first
    for request in first:
        for shortest, longest in (request.text_tokens, request.talker_tokens):
            assert 0 <= shortest <= longest <= MAX_TALKER_TOKENS and longest >= 1
    assert {request.modalities for request in first} == set(MODALITIES)
    for name in ("stream", "aborts"):
        assert {getattr(request, name) for request in first} == {True, False}


@pytest.mark.parametrize(
    "change, difference",
    [
        (lambda fields: fields | {"text": [1, 2, 4]}, "text: "),
        (lambda fields: fields | {"codes": [7]}, "codes: "),
        (lambda fields: fields | {"audio": fields["audio"][:-1]}, "waves of 4 and 3 samples"),
        (lambda fields: fields | {"audio": fields["audio"] + 2e-4}, "differ by 0.0002"),
        (lambda fields: fields | {"audio": torch.full((4,), torch.nan)}, "differ by nan"),
        (lambda fields: fields | {"audio": fields["audio"] + 5e-5}, None),
        (lambda fields: fields | {"codes": None, "audio": None}, None),
    ],
)
def test_differences_are_found(change: Callable[[dict[str, Any]], dict[str, Any]], difference: str | None) -> None:
    fields: dict[str, Any] = {"text": [1, 2, 3], "codes": [7, 8], "audio": torch.zeros(4)}
    found = Result(**fields).difference_to(Result(**change(fields)))

    assert (found is None) if difference is None else (difference in found)
