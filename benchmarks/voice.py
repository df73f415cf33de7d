# SPDX-License-Identifier: Apache-2.0
"""Spoken answers to requests at random times: whether their sound arrives in time to be played.

    python benchmarks/voice.py [--model NAME] [--patience S] [--output FILE.json] [--quick]

Requests of one question each arrive at random times (Poisson). A client begins to play `--patience` seconds after its
request and does not wait again: sound that arrives after it should have been played is late. The rate at 99 is the
highest request rate, in requests/s, at which 99% of the sound was in time: the goodput for that objective. Then each of
1, 4 and 16 clients sends its next request when the last one is done: the time to the first sound, and the underrun, the
seconds of silence for a client that plays from then on.

`talk` is compared with the same parts in a plain server: HF transformers writes the answer, and the synthesizer speaks
each sentence when it is written, with the ends of sentences found as in the pipeline. Once it handles one request after
the other, on all cores; once each request has a thread. All write greedily. `shapes`, and the omni models with random
weights, have no such server.
"""

import asyncio
import itertools
import math
import os
import random
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from backends import sampling_params
from report import Report, make_parser, percentile, progress, underrun
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from vllm_omni import ARSegmentEvent, AsyncOmniLLM, ErrorEvent
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.sentences import SentenceCutter
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

RANDOM_WEIGHTS = ("qwen2_5_omni", "qwen3_omni_moe")
MAX_TOKENS = 64
TALKER_TOKENS = 100
IN_TIME = 0.99
FIRST_RATE, NUM_HALVINGS = 0.2, 2
"""Requests/s; how often the step between a rate that is kept and one that is not is halved, in ratios."""
CONCURRENCY = (1, 4, 16)
QUESTIONS = (
    "What is the capital of France?", "Why is the sky blue?", "How do I make a cup of tea?", "What is a volcano?",
    "Tell me about the Moon.", "Why do people sleep?", "What do bees make?", "How does a bicycle work?",
    "Who was Isaac Newton?", "What is bread made of?", "Why do leaves fall in autumn?", "What is an island?",
)  # fmt: skip
SHAPES_QUESTIONS = ("Say: a red circle is left of a blue square.", "Say: there are three green stars.")


@dataclass
class Response:
    """What a client received of one request.

    Attributes:
        pieces: When each piece of sound arrived, in seconds since the request, and how many seconds it plays.
    """

    pieces: list[tuple[float, float]] = field(default_factory=list)

    @property
    def first_sound(self) -> float:
        return self.pieces[0][0]

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.pieces)

    def seconds_in_time(self, patience: float) -> float:
        """The sound that had arrived when it should have been played."""
        in_time, due = 0.0, patience
        for when, seconds in self.pieces:
            due += seconds
            in_time += min(seconds, max(0.0, due - when))
        return in_time

    @property
    def underrun(self) -> float:
        return underrun(self.pieces)


class Backend(ABC):
    """Answers questions in speech.

    Attributes:
        rate: Samples per second.
    """

    rate: int

    @abstractmethod
    def ask(self, question: str) -> AsyncIterator[int]:
        """The number of samples of each piece of sound, when it is there."""

    async def respond(self, question: str) -> Response:
        response, started = Response(), time.monotonic()
        async for samples in self.ask(question):
            if samples:
                response.pieces.append((time.monotonic() - started, samples / self.rate))
        if not response.pieces:
            raise RuntimeError(f"there was no sound for {question!r}")
        return response


class Pipeline(Backend):
    """A pipeline of ours."""

    def __init__(self, llm: AsyncOmniLLM, params: Sequence[Any]) -> None:
        self._llm = llm
        self._params = params
        rates = [stage.sample_rate for stage in llm.config.stage_args if stage.final_output_type == "audio"]
        assert rates[0] is not None
        self.rate = rates[0]

    async def ask(self, question: str) -> AsyncIterator[int]:
        prompt: Any = {"messages": [{"role": "user", "content": question}], "modalities": ["audio"]}
        async for event in self._llm.generate(prompt, self._params):
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, ARSegmentEvent) and "audio" in event.multimodal_output:
                yield len(event.multimodal_output["audio"])


class PlainServer(Backend):
    """The parts of `talk` without the pipeline: a pool of threads answers, each of them one request at a time."""

    def __init__(self, num_threads: int, cores_each: int) -> None:
        """
        Args:
            num_threads: Requests at once; others wait in the order of their arrival.
            cores_each: Threads of a request's tensor operations.
        """
        from vllm_omni.config.loader import load_pipeline_config
        from vllm_omni.config.utils import find_checkpoint
        from vllm_omni_talk import SAMPLE_RATE
        from vllm_omni_talk.voice import Voice, VoiceParameters
        from vllm_omni_talk.weights import language_model

        self.rate = SAMPLE_RATE
        folder = language_model(with_weights=True)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        stages = load_pipeline_config(Path(find_checkpoint("talk")) / "stage_config.yaml").stage_args
        self._params = next(stage for stage in stages if stage.name == "llm").default_sampling_params
        self._voice = Voice(next(stage for stage in stages if stage.name == "tts"), "")
        self._voice.start()
        self._parameters = VoiceParameters()
        self._pool = ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(cores_each,))

    async def ask(self, question: str) -> AsyncIterator[int]:
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[int]()

        def put(samples: int) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, samples)

        answer = loop.run_in_executor(self._pool, self._answer, question, put)
        answer.add_done_callback(lambda _: pieces.put_nowait(-1))
        while (samples := await pieces.get()) >= 0:
            yield samples
        await answer

    def _answer(self, question: str, put: Callable[[int], None]) -> None:
        state = self._voice.begin(StageRequest(request_id=""), self._parameters)

        def speak(text: str) -> None:
            output = StageOutput(request_id="", stage_id=0, completions=[Completion(text=text)])
            for piece in self._voice.window(state, {0: output}):
                put(len(piece["audio"]))

        messages = [{"role": "user", "content": question}]
        prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        with torch.inference_mode():
            self._model.generate(
                **prompt,
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                repetition_penalty=self._params["repetition_penalty"],
                streamer=_Sentences(self._tokenizer, speak),
            )

    def close(self) -> None:
        self._pool.shutdown()


class _Sentences(TextStreamer):
    """Passes on the sentences of an answer while it is written."""

    def __init__(self, tokenizer: Any, speak: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._cutter = SentenceCutter(first_is_clause=True)
        self._speak = speak

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        for sentence in self._cutter.add(text, is_last=stream_end):
            self._speak(sentence)


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        questions: Asked in turn.
        patience: Seconds from a request until its answer is played.
        seconds: Of requests at each rate, at least eight.
        num_rounds: Requests of each client.
    """

    questions: Sequence[str]
    patience: float
    seconds: float
    num_rounds: int

    async def at_rate(self, backend: Backend, rate: float) -> list[Response]:
        """Sends requests at times that are the same for all backends."""
        rng = random.Random(0)
        tasks = []
        async with asyncio.TaskGroup() as group:
            when = time.monotonic()
            for question in itertools.islice(itertools.cycle(self.questions), max(8, round(rate * self.seconds))):
                tasks.append(group.create_task(backend.respond(question)))
                when += rng.expovariate(rate)
                await asyncio.sleep(when - time.monotonic())
        return [task.result() for task in tasks]

    async def with_clients(self, backend: Backend, num_clients: int) -> list[Response]:
        questions = itertools.islice(itertools.cycle(self.questions), num_clients * self.num_rounds)

        async def ask() -> list[Response]:
            return [await backend.respond(question) for question in questions]

        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(ask()) for _ in range(num_clients)]
        return [response for client in clients for response in client.result()]

    def share_in_time(self, responses: Sequence[Response]) -> float:
        in_time = sum(response.seconds_in_time(self.patience) for response in responses)
        return in_time / sum(response.seconds for response in responses)


def measure(name: str, backend: Backend, plan: Plan, report: Report) -> float:
    """Adds the rows of a backend; returns its rate at 99."""
    progress(f"{name}: warming up")
    asyncio.run(plan.with_clients(backend, 2))
    best = find_rate(lambda rate: keeps(name, backend, rate, plan, report))
    for num_clients in CONCURRENCY:
        progress(f"{name}: concurrency {num_clients}")
        responses = asyncio.run(plan.with_clients(backend, num_clients))
        _add_row(report, name, f"concurrency {num_clients}", responses, plan.share_in_time(responses))
    return best


def keeps(name: str, backend: Backend, rate: float, plan: Plan, report: Report) -> bool:
    """Whether the sound is in time at this rate."""
    progress(f"{name}: {rate:.3g} requests/s")
    share = plan.share_in_time(responses := asyncio.run(plan.at_rate(backend, rate)))
    _add_row(report, name, f"{rate:.3g} requests/s", responses, share)
    return share >= IN_TIME


def find_rate(is_kept: Callable[[float], bool]) -> float:
    """The highest rate that is kept: doubled or halved to an interval, which is then halved in ratios."""
    low, high = FIRST_RATE, FIRST_RATE
    if is_kept(low):
        while is_kept(high := high * 2):
            low = high
    else:
        while not is_kept(low := low / 2):
            high = low
    for _ in range(NUM_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_kept(middle) else (low, middle)
    return low


def _add_row(report: Report, name: str, load: str, responses: Sequence[Response], share: float) -> None:
    first = [response.first_sound for response in responses]
    silence = [response.underrun for response in responses]
    report.rows.append(
        {
            "backend": name,
            "load": load,
            "in time": share,
            "first sound p50 s": percentile(first, 50),
            "first sound p99 s": percentile(first, 99),
            "underrun p50 s": percentile(silence, 50),
            "underrun p99 s": percentile(silence, 99),
            "sound s": sum(response.seconds for response in responses) / len(responses),
        }
    )


@contextmanager
def open_pipeline(model: str) -> Iterator[Pipeline]:
    with ExitStack() as stack:
        if model in RANDOM_WEIGHTS:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / model
            arguments: Any = {"dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20}
            llm = AsyncOmniLLM(str(write_tiny_checkpoint(model, folder)), **arguments)
            params: list[Any] = [*sampling_params(MAX_TOKENS, TALKER_TOKENS)]
        else:
            llm = AsyncOmniLLM(model)
            params = [{"max_tokens": MAX_TOKENS} if stage.name == "llm" else None for stage in llm.config.stage_args]
        stack.callback(llm.close)
        yield Pipeline(llm, params)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="talk", choices=["talk", "shapes", *RANDOM_WEIGHTS])
    parser.add_argument("--patience", type=float, default=2.0, metavar="S", help="default: %(default)s seconds")
    args = parser.parse_args()
    questions = SHAPES_QUESTIONS if args.model == "shapes" else QUESTIONS
    plan = Plan(questions, args.patience, seconds=15 if args.quick else 60, num_rounds=2 if args.quick else 4)
    report = Report("voice", {"quick": str(args.quick), "model": args.model, "patience": f"{args.patience:g} s"})
    with open_pipeline(args.model) as pipeline:
        ours = measure("pipeline", pipeline, plan, report)
    if args.model == "talk":
        compare(ours, plan, report)
    report.notes.append("in time: the share of all sound; sound: of an answer, in the mean")
    report.finish(args.output)


def compare(ours: float, plan: Plan, report: Report) -> None:
    cores = len(os.sched_getaffinity(0))
    servers = {"rate_at_99": ("one request at a time", 1, cores), "rate_at_99_threads": ("a thread each", 64, 1)}
    for ratio, (name, num_threads, cores_each) in servers.items():
        server = PlainServer(num_threads, cores_each)
        report.ratios[ratio] = ours / measure(name, server, plan, report)
        server.close()
    report.notes.append("rate_at_99: the pipeline's to that of each plain server; higher is better")


if __name__ == "__main__":
    main()
