# SPDX-License-Identifier: Apache-2.0
"""A part of `streaming.py`: conversations of ten turns with caches and without, and with HF transformers, in one run.

The user shows a picture and plays a sound in the first turn, and asks about them in each turn. Every conversation goes
on as soon as it has its answer; all run at once. Greedy, in float32, with answers of fixed length; weights are random.
Each backend gets the same prompts, which it has to answer in the same way.

TTFT, TTFA: time to the first token, and to the first segment of speech. HF transformers, which runs one request at a
time, has four conversations at once only; its thinker keeps what it has computed, and its first segment is its whole
speech.
"""

import asyncio
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from backends import CODES, REPETITION_PENALTY, WAVE_RATE, Client, Response, sampling_params
from report import Report, mean, percentile, progress, tiny_checkpoint
from transformers import AutoTokenizer, DynamicCache

from vllm_omni import AsyncOmniLLM
from vllm_omni.inputs import OmniPrompt
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import SAMPLE_RATE, make_audio, make_image

CACHES, NO_CACHES, HF = "OmniLLM", "OmniLLM without caches", "HF transformers"
HF_CONVERSATIONS = 4
WITHOUT = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
PICTURE, SOUND_SECONDS = (1024, 768), 10.0
PIXELS = {"shortest_edge": 4 * 28 * 28, "longest_edge": 1024 * 28 * 28}
"""Of a picture, at least and at most: a real checkpoint's tokens, not the few of a tiny one."""
TEXT_TOKENS, SPEECH_SECONDS = 24, 2.0
MEDIA = ("pixel_values", "image_grid_thw", "input_features", "feature_attention_mask")
QUESTIONS = ("What is in this picture, and what do you hear?", "And what else is there?", "Which of them is near?")


@dataclass(frozen=True)
class Plan:
    """What each backend does."""

    conversations: int
    turns: int
    rounds: int


@dataclass
class Turns:
    """Responses of one backend: `[conversation][turn]`."""

    responses: list[list[Response]] = field(default_factory=list)

    def later(self, name: str) -> list[float]:
        """A time of all turns after the first."""
        return [getattr(response, name) for turns in self.responses for response in turns[1:]]

    def first(self, name: str) -> list[float]:
        return [getattr(turns[0], name) for turns in self.responses]

    @property
    def results(self) -> list[list[tuple[list[int], int]]]:
        return [[(response.token_ids, response.samples) for response in turns] for turns in self.responses]


class Conversation:
    """The prompt of each turn, in vLLM's format."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        self._media = {
            "image": [make_image(seed, *PICTURE)],
            "audio": [(make_audio(seed, SOUND_SECONDS), SAMPLE_RATE)],
        }
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are a helpful voice. ({seed})"}]

    def ask(self) -> OmniPrompt:
        turn = len(self._messages) // 2
        content = [{"type": "text", "text": QUESTIONS[turn % len(QUESTIONS)]}]
        if not turn:
            content = [{"type": "image"}, {"type": "audio"}, *content]
        self._messages.append({"role": "user", "content": content})
        text = self._tokenizer.apply_chat_template(self._messages, tokenize=False, add_generation_prompt=True)
        return {"prompt": text, "multi_modal_data": self._media, "mm_processor_kwargs": {"size": PIXELS}}

    def add_answer(self, token_ids: Sequence[int]) -> None:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        self._messages.append({"role": "assistant", "content": text})


class OmniBackend:
    """A pipeline, all conversations at once."""

    def __init__(self, client: Client, tokenizer: Any) -> None:
        self._client, self._tokenizer = client, tokenizer

    def run(self, plan: Plan, first_seed: int) -> Turns:
        return Turns(asyncio.run(self._run(plan, first_seed)))

    async def _run(self, plan: Plan, first_seed: int) -> list[list[Response]]:
        seeds = range(first_seed, first_seed + plan.conversations)
        return await asyncio.gather(*(self._talk(Conversation(self._tokenizer, seed), plan.turns) for seed in seeds))

    async def _talk(self, conversation: Conversation, turns: int) -> list[Response]:
        responses = []
        for _ in range(turns):
            response = await self._client.send(conversation.ask())
            conversation.add_answer(response.token_ids)
            responses.append(response)
        return responses


class KeptThinker:
    """One conversation's state of HF's thinker, which computes new tokens only.

    Its keys, values and hidden states are kept, and so its media are encoded once. What HF does after it is unchanged:
    the talker reads the whole prompt, and the vocoder makes the speech at once.
    """

    def __init__(self, oracle: HFOracle) -> None:
        self._oracle = oracle
        self._thinker: Any = oracle.model.thinker
        self._cache = DynamicCache()
        self._token_ids = torch.empty(0, dtype=torch.long)
        self._rows: tuple[torch.Tensor, ...] = ()
        self._rope_deltas: torch.Tensor | None = None
        self._original: Any = None
        self.first_token = 0.0
        """When the last prompt's first token was there."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The oracle generates with this state."""
        reference = self._oracle._reference
        self._original, reference._thinker_generate = reference._thinker_generate, self._generate
        hook = self._thinker.lm_head.register_forward_hook(self._on_logits)
        self.first_token = 0.0
        try:
            yield
        finally:
            hook.remove()
            reference._thinker_generate = self._original

    def _on_logits(self, *_: Any) -> None:
        self.first_token = self.first_token or time.monotonic()

    def _generate(self, **kwargs: Any) -> Any:
        token_ids = kwargs["input_ids"][0]
        num_kept = self._keep(token_ids)
        if num_kept:
            self._thinker.rope_deltas = self._rope_deltas
            kwargs = {name: value for name, value in kwargs.items() if name not in MEDIA}
        output = self._original(**kwargs, past_key_values=self._cache)
        first, *others = output.hidden_states
        if num_kept:
            first = tuple(
                torch.cat((kept[:, :num_kept], new), dim=1) for kept, new in zip(self._rows, first, strict=True)
            )
            output.hidden_states = (first, *others)
        self._rows = tuple(torch.cat(layer, dim=1) for layer in zip(*output.hidden_states, strict=True))
        self._token_ids, self._rope_deltas = output.sequences[0, :-1], self._thinker.rope_deltas
        return output

    def _keep(self, token_ids: torch.Tensor) -> int:
        """Removes what is no beginning of the prompt. Returns the tokens that are left."""
        length = min(len(self._token_ids), len(token_ids) - 1)
        differs = (self._token_ids[:length] != token_ids[:length]).nonzero()
        num_kept = int(differs[0]) if len(differs) else length
        if num_kept < len(self._token_ids):
            self._cache.crop(num_kept)
        return num_kept


class HFBackend:
    """HF transformers on one thread. Each conversation asks again when it has its answer; the others wait."""

    def __init__(self, oracle: HFOracle, tokenizer: Any, talker_tokens: int) -> None:
        self._oracle, self._tokenizer = oracle, tokenizer
        self._params = {
            "thinker_min_tokens": TEXT_TOKENS,
            "thinker_max_tokens": TEXT_TOKENS,
            "talker_min_tokens": talker_tokens,
            "talker_max_tokens": talker_tokens,
            "repetition_penalty": REPETITION_PENALTY,
        }

    def run(self, plan: Plan, first_seed: int) -> Turns:
        seeds = range(first_seed, first_seed + min(HF_CONVERSATIONS, plan.conversations))
        conversations = [Conversation(self._tokenizer, seed) for seed in seeds]
        thinkers = [KeptThinker(self._oracle) for _ in seeds]
        asked = [time.monotonic()] * len(seeds)
        turns = Turns([[] for _ in seeds])
        for _ in range(plan.turns):
            for index, conversation in enumerate(conversations):
                response = self._answer(conversation, thinkers[index], asked[index])
                asked[index] += response.completed
                turns.responses[index].append(response)
        return turns

    def _answer(self, conversation: Conversation, thinker: KeptThinker, asked: float) -> Response:
        with thinker.installed():
            result = self._oracle.generate(conversation.ask(), **self._params)
        done = time.monotonic() - asked
        conversation.add_answer(result.thinker_token_ids)
        return Response(
            first_text=thinker.first_token - asked,
            segments=[(done, len(result.audio) / WAVE_RATE)],
            completed=done,
            token_ids=result.thinker_token_ids,
            samples=len(result.audio),
        )


def start(path: Path, model: str, plan: Plan, stack: ExitStack) -> dict[str, OmniBackend | HFBackend]:
    """Both pipelines of one checkpoint, and HF transformers. An idle one costs no time."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    per_second, extra = CODES[model]
    talker_tokens = round(per_second * SPEECH_SECONDS) + extra
    params = sampling_params(TEXT_TOKENS, talker_tokens)
    backends: dict[str, OmniBackend | HFBackend] = {
        HF: HFBackend(HFOracle(path, num_threads=1), tokenizer, talker_tokens)
    }
    for name, arguments in ((CACHES, {}), (NO_CACHES, WITHOUT)):
        llm = AsyncOmniLLM(str(path), dtype="float32", max_model_len=4096, max_num_seqs=plan.conversations, **arguments)
        backends[name] = OmniBackend(Client(stack.enter_context(llm), params, streams=True), tokenizer)
    return backends


def measure(model: str, size: str, plan: Plan, report: Report) -> None:
    """One checkpoint: all backends, round by round, with other conversations in each. A short one warms up."""
    label = f"{model} {size}"
    measured: dict[str, Turns] = {}
    with ExitStack() as stack:
        path = stack.enter_context(tiny_checkpoint(model, size))
        progress(f"{label}: starting")
        backends = start(path, model, plan, stack)
        for backend in backends.values():
            backend.run(Plan(min(4, plan.conversations), 2, 1), first_seed=1000)
        for number in range(plan.rounds):
            for name, backend in backends.items():
                progress(f"{label}: round {number + 1} of {plan.rounds}, {name}")
                turns = backend.run(plan, first_seed=number * plan.conversations)
                measured.setdefault(name, Turns()).responses += turns.responses
    check_results(label, measured)
    add_figures(label, f"{model}{'_large' if size == 'large' else ''}", measured, report)


def check_results(label: str, measured: dict[str, Turns]) -> None:
    """
    Raises:
        ValueError: The backends gave other answers, or speech of another length.
    """
    expected = measured[NO_CACHES].results
    for name, turns in measured.items():
        for index, (got, wanted) in enumerate(zip(turns.results, expected, strict=False)):
            for turn, (mine, other) in enumerate(zip(got, wanted, strict=True)):
                if mine != other:
                    where = f"{label}, conversation {index + 1}, turn {turn + 1}"
                    raise ValueError(f"{where}: {name} answers {mine}, not {other}")


def add_figures(label: str, prefix: str, measured: dict[str, Turns], report: Report) -> None:
    for name, turns in measured.items():
        row: dict[str, Any] = {"model": label, "backend": name}
        for title, key in (("TTFT", "first_text"), ("TTFA", "first_audio")):
            row[f"first {title} p50 s"] = percentile(turns.first(key), 50)
            row[f"later {title} p50 s"] = percentile(turns.later(key), 50)
            row[f"later {title} p95 s"] = percentile(turns.later(key), 95)
        report.rows.append({**row, "later turn s": mean(turns.later("completed"))})
    ours = measured[CACHES]
    for other, suffix in ((NO_CACHES, ""), (HF, "_to_hf")):
        for ratio, key in (("later_ttft", "first_text"), ("later_first_audio", "first_audio")):
            report.ratios[f"{prefix}_{ratio}{suffix}"] = percentile(ours.later(key), 50) / percentile(
                measured[other].later(key), 50
            )


def measure_all(args: Namespace) -> Report:
    conversations, turns, rounds = (4, 4, 1) if args.quick else (16, 10, 1)
    plan = Plan(args.conversations or conversations, turns, rounds)
    report = Report("conversations", {"quick": str(args.quick), "conversations": plan.conversations, "turns": turns})
    for model in args.models:
        for size in args.sizes or ["default", "large"]:
            measure(model, size, plan, report)
    report.notes.append(f"ratios of medians, to {NO_CACHES}, and to {HF} with {HF_CONVERSATIONS}: lower is better")
    return report
