# SPDX-License-Identifier: Apache-2.0
"""Spoken answers to requests at random times: whether their sound arrives in time to be played.

    python benchmarks/voice.py [--model NAME] [--patience S] [--edge] [--output FILE.json] [--quick]

Requests of one question each arrive at random times (Poisson). A client begins to play `--patience` seconds after its
request and does not wait again: sound that arrives after it should have been played is late. The rate at 99 is the
highest request rate, in requests/s, at which 99% of the sound was in time: the goodput for that objective. Then each of
1, 4 and 16 clients sends its next request when the last one is done: the time to the first sound, and the underrun, the
seconds of silence for a client that plays from then on.

`talk` is compared with the same parts in a plain server: HF transformers writes the answer, and the synthesizer speaks
each sentence when it is written, with the ends of sentences found as in the pipeline. Once it handles one request after
the other, on all cores; once each request has a thread. All write greedily. `shapes`, and the omni models with random
weights, have no such server.

`--edge`: instead, at the edge of capacity, which is the highest rate at which 99.5% of the streams are continuous: all
of their sound is in time. Five times, with other arrivals: this rate, and of `talk` the same of the server that handles
one request after the other, whose queue is computed from what each answer takes alone. Three times at 70% of it: the
95th percentile of the first sound, over the median of one client. And of a pipeline with a vocoder: the first sound,
over that with the smallest first window, which has gaps.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from backends import sampling_params
from report import Report, make_parser, percentile, progress, underrun
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from vllm_omni import ARSegmentEvent, AsyncOmniLLM, ErrorEvent
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.inputs import StageRequest
from vllm_omni.model_packages import find_models
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
CONTINUOUS, NUM_SEEDS, NUM_LOADED, LOAD = 0.995, 5, 3, 0.7
"""With --edge: the share of streams; how often the rate is looked for, and the load is made; the load, to that rate."""
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
        ended: When the answer was complete, in seconds since the request.
    """

    pieces: list[tuple[float, float]] = field(default_factory=list)
    ended: float = 0.0

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

    def is_continuous(self, patience: float) -> bool:
        """Whether all of its sound was in time."""
        return self.seconds - self.seconds_in_time(patience) < 1e-6

    def later(self, seconds: float) -> "Response":
        """The same, after a time in a queue."""
        return Response([(when + seconds, plays) for when, plays in self.pieces], self.ended + seconds)

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
        response.ended = time.monotonic() - started
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

    def arrivals(self, rate: float, seed: int) -> list[float]:
        """When requests are sent, in seconds."""
        rng = random.Random(seed)
        count = max(8, round(rate * self.seconds))
        return [0.0, *itertools.accumulate(rng.expovariate(rate) for _ in range(count - 1))]

    async def at_rate(self, backend: Backend, rate: float, seed: int = 0) -> list[Response]:
        """Sends requests at times that are the same for all backends."""
        tasks = []
        async with asyncio.TaskGroup() as group:
            started = time.monotonic()
            for when, question in zip(self.arrivals(rate, seed), itertools.cycle(self.questions), strict=False):
                await asyncio.sleep(started + when - time.monotonic())
                tasks.append(group.create_task(backend.respond(question)))
        return [task.result() for task in tasks]

    def one_after_the_other(self, alone: Sequence[Response], rate: float, seed: int) -> list[Response]:
        """What a server without concurrency would have sent: `alone` are the answers to the questions."""
        free_at, responses = 0.0, []
        for when, response in zip(self.arrivals(rate, seed), itertools.cycle(alone), strict=False):
            begun = max(when, free_at)
            free_at = begun + response.ended
            responses.append(response.later(begun - when))
        return responses

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

    def share_continuous(self, responses: Sequence[Response]) -> float:
        return sum(response.is_continuous(self.patience) for response in responses) / len(responses)


def measure(name: str, backend: Backend, plan: Plan, report: Report) -> float:
    """Adds the rows of a backend; returns its rate at 99."""
    progress(f"{name}: warming up")
    asyncio.run(plan.with_clients(backend, 2))
    best = find_rate(lambda rate: keeps(name, backend, rate, plan, report))
    for num_clients in CONCURRENCY:
        progress(f"{name}: concurrency {num_clients}")
        responses = asyncio.run(plan.with_clients(backend, num_clients))
        _add_row(report, name, f"concurrency {num_clients}", responses, plan)
    return best


def keeps(name: str, backend: Backend, rate: float, plan: Plan, report: Report) -> bool:
    """Whether the sound is in time at this rate."""
    progress(f"{name}: {rate:.3g} requests/s")
    responses = asyncio.run(plan.at_rate(backend, rate))
    _add_row(report, name, f"{rate:.3g} requests/s", responses, plan)
    return plan.share_in_time(responses) >= IN_TIME


def find_rate(is_kept: Callable[[float], bool], first: float = FIRST_RATE) -> float:
    """The highest rate that is kept: doubled or halved to an interval, which is then halved in ratios."""
    low, high = first, first
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


def _add_row(report: Report, name: str, load: str, responses: Sequence[Response], plan: Plan) -> None:
    first = [response.first_sound for response in responses]
    silence = [response.underrun for response in responses]
    report.rows.append(
        {
            "backend": name,
            "load": load,
            "in time": plan.share_in_time(responses),
            "continuous": plan.share_continuous(responses),
            "first sound p50 s": percentile(first, 50),
            "p95 s": percentile(first, 95),
            "p99 s": percentile(first, 99),
            "underrun p50 s": percentile(silence, 50),
            "underrun p99 s": percentile(silence, 99),
            "sound s": sum(response.seconds for response in responses) / len(responses),
        }
    )


@contextmanager
def open_pipeline(model: str, *, smallest_windows: bool = False) -> Iterator[Pipeline]:
    """`smallest_windows`: The first window of the vocoder is one frame."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = str(write_config(model, folder / "stages.yaml")) if smallest_windows else None
        if model in RANDOM_WEIGHTS:
            arguments: Any = {"dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20}
            llm = AsyncOmniLLM(str(write_tiny_checkpoint(model, folder / model)), config, **arguments)
            params: list[Any] = [*sampling_params(MAX_TOKENS, TALKER_TOKENS)]
        else:
            llm = AsyncOmniLLM(model, config)
            params = [{"max_tokens": MAX_TOKENS} if stage.name == "llm" else None for stage in llm.config.stage_args]
        stack.callback(llm.close)
        yield Pipeline(llm, params)


def read_config(model: str) -> dict[str, Any]:
    known = find_models().checkpoints
    path = known[model] / "stage_config.yaml" if model in known else stage_configs_dir() / f"{model}.yaml"
    return yaml.safe_load(path.read_text())


def vocoder_edges(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Those to the last stage that have windows of frames."""
    last = max(stage["stage_id"] for stage in config["stage_args"])
    return [edge for edge in config["runtime"]["edges"] if edge["to"] == last and "first_window_size" in edge]


def write_config(model: str, path: Path) -> Path:
    config = read_config(model)
    for edge in vocoder_edges(config):
        edge["first_window_size"] = 1
    path.write_text(yaml.safe_dump(config))
    return path


def measure_edge(model: str, plan: Plan, num_seeds: int, report: Report) -> None:
    with ExitStack() as stack:
        ours = stack.enter_context(open_pipeline(model))
        pipelines = {"pipeline": ours}
        if vocoder_edges(read_config(model)):
            pipelines["smallest windows"] = stack.enter_context(open_pipeline(model, smallest_windows=True))
        for pipeline in pipelines.values():
            asyncio.run(plan.with_clients(pipeline, 2))  # warms up
        for num_clients in CONCURRENCY[:2]:
            compare_windows(pipelines, num_clients, plan, report)
        rates: list[float] = []
        for seed in range(num_seeds):
            is_kept = partial(is_continuous, backend=ours, seed=seed, plan=plan, report=report)
            rates.append(find_rate(is_kept, rates[-1] if rates else 1.0))
        rate = LOAD * percentile(rates, 50)
        loaded: list[Response] = []
        for seed in range(min(num_seeds, NUM_LOADED)):
            progress(f"pipeline: {rate:.3g} requests/s, {LOAD:.0%} of capacity")
            loaded += asyncio.run(plan.at_rate(ours, rate, 100 + seed))
        _add_row(report, "pipeline", f"{LOAD:.0%} of capacity", loaded, plan)
    alone = next(row for row in report.rows if row["load"] == "concurrency 1")
    report.ratios["first_sound_p95"] = float(report.rows[-1]["p95 s"]) / float(alone["first sound p50 s"])
    report.notes.append(f"first_sound_p95: at {LOAD:.0%} of capacity, to the median of one client")
    report.notes.append("capacity, requests/s: " + ", ".join(f"{rate:.3g}" for rate in rates))
    if model == "talk":
        add_rate_to_one_at_a_time(rates, plan, report)


def compare_windows(pipelines: dict[str, Pipeline], num_clients: int, plan: Plan, report: Report) -> None:
    """Adds a row for each pipeline, round by round, and the ratios."""
    found: dict[str, list[Response]] = {name: [] for name in pipelines}
    for number in range(plan.num_rounds):
        for name in sorted(pipelines, reverse=bool(number % 2)):
            progress(f"{name}: concurrency {num_clients}")
            found[name] += asyncio.run(plan.with_clients(pipelines[name], num_clients))
    medians = {name: percentile([one.first_sound for one in responses], 50) for name, responses in found.items()}
    for name, responses in found.items():
        _add_row(report, name, f"concurrency {num_clients}", responses, plan)
        if name != "pipeline":
            report.ratios[f"{name.replace(' ', '_')}_c{num_clients}"] = medians["pipeline"] / medians[name]
    if len(pipelines) > 1 and num_clients == 1:
        report.notes.append("smallest_windows_cN: our first sound to that of these, N clients")


def is_continuous(rate: float, backend: Backend, seed: int, plan: Plan, report: Report) -> bool:
    """Whether the streams are continuous at this rate."""
    progress(f"pipeline: {rate:.3g} requests/s, arrivals {seed}")
    responses = asyncio.run(plan.at_rate(backend, rate, seed))
    _add_row(report, "pipeline", f"{rate:.3g} requests/s, arrivals {seed}", responses, plan)
    return plan.share_continuous(responses) >= CONTINUOUS


def add_rate_to_one_at_a_time(rates: Sequence[float], plan: Plan, report: Report) -> None:
    server = PlainServer(1, len(os.sched_getaffinity(0)))
    asyncio.run(server.respond(plan.questions[0]))  # warms up
    progress("one request at a time")
    alone = [asyncio.run(server.respond(question)) for question in plan.questions]
    server.close()
    _add_row(report, "one request at a time", "each question alone", alone, plan)
    if plan.share_continuous(alone) < CONTINUOUS:
        report.notes.append("one request at a time: not continuous at any rate")
        return
    ratios = []
    for seed, rate in enumerate(rates):

        def is_kept(rate: float, seed: int = seed) -> bool:
            return plan.share_continuous(plan.one_after_the_other(alone, rate, seed)) >= CONTINUOUS

        ratios.append(rate / find_rate(is_kept))
    report.ratios["rate_to_one_at_a_time"] = percentile(ratios, 50)
    report.notes.append("rate_to_one_at_a_time, of each set of arrivals: " + ", ".join(f"{one:.3g}" for one in ratios))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="talk", choices=["talk", "shapes", *RANDOM_WEIGHTS])
    parser.add_argument("--patience", type=float, default=2.0, metavar="S", help="default: %(default)s seconds")
    parser.add_argument("--edge", action="store_true", help="instead, latency and continuity at the edge of capacity")
    args = parser.parse_args()
    questions = SHAPES_QUESTIONS if args.model == "shapes" else QUESTIONS
    plan = Plan(questions, args.patience, seconds=15 if args.quick else 60, num_rounds=2 if args.quick else 4)
    report = Report("voice", {"quick": str(args.quick), "model": args.model, "patience": f"{args.patience:g} s"})
    if args.edge:
        quick = Plan(questions[:4], args.patience, seconds=12, num_rounds=2)
        measure_edge(args.model, quick if args.quick else plan, 1 if args.quick else NUM_SEEDS, report)
        report.finish(args.output)
        return
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
