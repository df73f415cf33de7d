# SPDX-License-Identifier: Apache-2.0
"""The HTTP server against `AsyncOmniLLM` called directly, and against plain vLLM, in one run.

    python benchmarks/serve.py [--parts chat speech images] [--sizes default large] [--concurrency 1 8 64]
                               [--rounds N] [--output FILE.json] [--quick]
    python benchmarks/serve.py --parts vllm offline [--model DIR] [--eager] [--concurrency 1 16 64]
                               [--async-scheduling | --no-async-scheduling]

All load comes from vLLM's load generator (`vllm bench serve --omni`), in this process: random prompts, greedy, of
equal length. `chat`: speech and text through the server, and through `AsyncOmniLLM` in this process, which the
generator calls as one more backend. `speech`, `images`: the server alone. `vllm`: a text model through our server and
through plain vLLM's, each as it comes. Backends take turns, round by round; an idle one costs no time. Figures are the
median of the rounds. Weights are random.

`offline`: `OmniLLM` and `vllm.LLM` on the same batch, in turns, and all tokens are compared. Plain vLLM runs twice
there: with its engine in a process of its own, which is its default, and inside this process, where no message is sent.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from report import Cell, Report, make_parser, parse, percentile, progress, tiny_checkpoint
from servers import Plan, Target, omni_server, plain_server, run_server
from transformers import AutoProcessor
from vllm import LLM, SamplingParams
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput

from vllm_omni import AsyncOmniLLM, OmniLLM
from vllm_omni.entrypoints.cli.bench_requests import BACKENDS, Backend, OmniRequestFuncOutput
from vllm_omni.events import ARSegmentEvent, ErrorEvent
from vllm_omni.testing.media import make_prompt

SAMPLE_RATE = 24_000
OURS, PLAIN, INSIDE = "vllm_omni", "vLLM", "vLLM, in this process"
BATCH, OFFLINE_TOKENS = 32, 128
"""Requests of `offline`, and the length of each answer."""
TEXT_ARGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 256 << 20}
SPEECH_ARGS = TEXT_ARGS | {"max_num_seqs": 64, "enforce_eager": True}
COLUMNS = {
    "requests/s": "request_throughput",
    "TTFT p50 ms": "median_ttft_ms",
    "TTFT p99 ms": "p99_ttft_ms",
    "TPOT p50 ms": "median_tpot_ms",
    "ITL p50 ms": "median_itl_ms",
    "TTFA p50 ms": "median_ttfa_ms",
    "RTF p50": "median_rtf",
    "E2EL p50 ms": "median_e2el_ms",
    "E2EL p99 ms": "p99_e2el_ms",
    "CPU s/request": "cpu_per_request",
    "failed": "failed",
}
"""Headings, and the keys of a target's result."""
VLLM_RATIOS = {
    "cpu_per_request": "cpu_per_request",
    "ttft_p50": "median_ttft_ms",
    "itl_p50": "median_itl_ms",
    "tpot_p50": "median_tpot_ms",
}


class DirectBackend:
    """A request function that calls `AsyncOmniLLM`, as `openai-chat-omni` calls a server."""

    def __init__(self, llm: AsyncOmniLLM, model: Path) -> None:
        self._llm = llm
        self._processor = AutoProcessor.from_pretrained(model)

    async def request(
        self, request_func_input: RequestFuncInput, session: Any, pbar: Any = None
    ) -> OmniRequestFuncOutput:
        body = request_func_input.extra_body or {}
        chat = [{"role": "user", "content": [{"type": "text", "text": request_func_input.prompt}]}]
        prompt = self._processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        text = {"temperature": 0.0, "max_tokens": request_func_input.output_len, "ignore_eos": True}
        params = [text, *body["sampling_params_list"][1:]]
        output = OmniRequestFuncOutput(prompt_len=request_func_input.prompt_len, start_time=time.perf_counter())
        async for event in self._llm.generate({"prompt": prompt, "modalities": body["modalities"]}, params):
            when = time.perf_counter() - output.start_time
            if isinstance(event, ErrorEvent):
                output.error = str(event.error)
            elif isinstance(event, ARSegmentEvent) and event.final_output_type == "text":
                output.ttft = output.ttft or when
                output.text_latency = when
                output.output_tokens += len(event.tokens)
            elif isinstance(event, ARSegmentEvent) and "audio" in event.multimodal_output:
                output.ttfa = output.ttfa or when
                output.audio_duration += len(event.multimodal_output["audio"]) / SAMPLE_RATE
        output.latency, output.success = time.perf_counter() - output.start_time, not output.error
        return output


def flags_of(engine_args: dict[str, Any]) -> list[str]:
    """Of `vllm serve`."""
    flags = {name.replace("_", "-"): value for name, value in engine_args.items()}
    return [
        f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}"
        for name, value in flags.items()
    ]


def measure(part: str, targets: list[Target], plan: Plan, body: dict[str, Any], report: Report) -> None:
    """All concurrencies by all targets, in turns. Adds rows, and ratios of the first target to the second."""
    for target in targets:
        target.run(plan, plan.concurrencies[-1], body)  # to warm up
    for concurrency in plan.concurrencies:
        results: dict[str, list[dict[str, Any]]] = {target.name: [] for target in targets}
        for number in range(plan.rounds):
            progress(f"{part}: concurrency {concurrency}, round {number + 1} of {plan.rounds}")
            for target in targets[:: -1 if number % 2 else 1]:
                results[target.name].append(target.run(plan, concurrency, body))
        medians = {
            name: {key: statistics.median(each[key] for each in rounds) for key in COLUMNS.values() if key in rounds[0]}
            for name, rounds in results.items()
        }
        for name, median in medians.items():
            figures = {heading: median.get(key, "") for heading, key in COLUMNS.items()}
            report.rows.append({"part": part, "concurrency": concurrency, "backend": name, **figures})
        if len(targets) > 1:
            ours, baseline = medians.values()
            first = "ttfa" if "median_ttfa_ms" in ours else "ttft"
            ratio = ours["request_throughput"] / baseline["request_throughput"]
            report.ratios[f"{part}_throughput_c{concurrency}"] = ratio
            added = ours[f"median_{first}_ms"] - baseline[f"median_{first}_ms"]
            report.ratios[f"{part}_{first}_added_ms_c{concurrency}"] = added
            for name, key in VLLM_RATIOS.items() if first == "ttft" else ():
                report.ratios[f"{part}_{name}_c{concurrency}"] = ours[key] / baseline[key]


def measure_speaking_model(size: str, parts: list[str], plan: Plan, report: Report) -> None:
    suffix = "" if size == "default" else f"_{size}"
    with ExitStack() as stack:
        model = stack.enter_context(tiny_checkpoint("qwen3_omni_moe", size))
        progress(f"{size}: starting the server and the pipeline")
        server = stack.enter_context(run_server(omni_server(model, *flags_of(SPEECH_ARGS)), model.parent))
        if "chat" in parts:
            # The server counts what it does, by default: so the pipeline does, too.
            llm = stack.enter_context(AsyncOmniLLM(str(model), log_stats=True, **SPEECH_ARGS))
            BACKENDS["direct"] = Backend(DirectBackend(llm, model).request, "/v1/chat/completions", has_text=True)
            targets = [
                Target("server", "openai-chat-omni", server.url, server.pid, model),
                Target("direct", "direct", server.url, None, model),
            ]
            body = {"modalities": ["text", "audio"], "sampling_params_list": [None, plan.talker_params, None]}
            measure(f"chat{suffix}", targets, plan, body, report)
        if "speech" in parts:
            target = Target("server", "openai-audio-speech", server.url, server.pid, model)
            measure(
                f"speech{suffix}", [target], plan, {"sampling_params_list": [None, plan.talker_params, None]}, report
            )


def measure_images(plan: Plan, report: Report) -> None:
    with tiny_checkpoint("z_image") as model:
        progress("images: starting the server")
        with run_server(omni_server(model, "--dtype=float32"), model.parent) as server:
            body = {"size": "32x32", "num_inference_steps": 2}
            measure("images", [Target("server", "openai-images", server.url, server.pid, model)], plan, body, report)


def measure_text_model(suffix: str, model: Path, engine_args: dict[str, Any], plan: Plan, report: Report) -> None:
    with ExitStack() as stack:
        targets, logs = [], Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = flags_of(engine_args)
        for name, command in {OURS: omni_server(model, *flags), PLAIN: plain_server(model, *flags)}.items():
            progress(f"starting {name}")
            server = stack.enter_context(run_server(command, logs))
            targets.append(Target(name, "openai-chat", server.url, server.pid, model))
        measure(f"vllm{suffix}", targets, plan, {}, report)


class OfflineBackend:
    """Generates the batch, and keeps the rates."""

    def __init__(self, name: str, generate: Callable[[list[Any]], list[Any]]) -> None:
        self.name = name
        self._generate = generate
        self.rates: list[float] = []
        self.token_ids: list[list[int]] = []

    def run(self, prompts: list[Any]) -> None:
        started = time.perf_counter()
        outputs = self._generate(prompts)
        seconds = time.perf_counter() - started
        self.token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        self.rates.append(len(prompts) / seconds)


def measure_offline(suffix: str, model: Path, engine_args: dict[str, Any], rounds: int, report: Report) -> None:
    """Adds a row for each backend; the first round of each warms up and is not counted."""
    prompts = [make_prompt(model, "text", seed) for seed in range(BATCH)]
    params = SamplingParams(temperature=0, max_tokens=OFFLINE_TOKENS, ignore_eos=True)
    progress("starting the offline engines")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(OmniLLM, str(model), **engine_args)
        plain = LLM(model=str(model), **engine_args)
    with starting.result() as omni:
        inside = _llm_in_this_process(model, engine_args)
        backends = [
            OfflineBackend(OURS, lambda batch: omni.generate(batch, [params], use_tqdm=False)),
            OfflineBackend(PLAIN, lambda batch: plain.generate(batch, params, use_tqdm=False)),
            OfflineBackend(INSIDE, lambda batch: inside.generate(batch, params, use_tqdm=False)),
        ]
        for number in range(1 + rounds):
            progress(f"offline: round {number} of {rounds}" if number else "offline: warming up")
            for backend in backends:
                backend.run(prompts)
    if any(backend.token_ids != backends[0].token_ids for backend in backends):
        sys.exit("not comparable: different tokens")
    rates = {backend.name: percentile(backend.rates[1:], 50) for backend in backends}
    for name, rate in rates.items():
        others: dict[str, Cell] = dict.fromkeys(list(COLUMNS)[1:], "")
        row: dict[str, Cell] = {"part": f"offline{suffix}", "concurrency": BATCH, "backend": name, "requests/s": rate}
        report.rows.append(row | others)
    report.ratios[f"offline{suffix}"] = rates[OURS] / rates[PLAIN]
    report.ratios[f"offline{suffix}_to_in_process"] = rates[OURS] / rates[INSIDE]


def _llm_in_this_process(model: Path, engine_args: dict[str, Any]) -> LLM:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read while the engine is constructed
    try:
        return LLM(model=str(model), **engine_args)
    finally:
        del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]


def main() -> None:
    parser = make_parser(__doc__)
    parts = ["chat", "vllm", "speech", "images", "offline"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts[:-1], help="default: all but offline")
    parser.add_argument("--sizes", nargs="+", choices=["default", "large"], default=["default"])
    concurrency = "requests at once (default 1 8 64, 1 8 with --quick; of vllm 1 16 64)"
    parser.add_argument("--concurrency", type=int, nargs="+", help=concurrency)
    parser.add_argument("--rounds", type=int, help="default 5; 1 with --quick, of vllm and offline 2")
    group = parser.add_argument_group("vllm, offline")
    group.add_argument("--model", type=Path, help="a text model; default: tiny ones with random weights")
    group.add_argument("--eager", action="store_true", help="both without compilation")
    which = "of both (default: as each comes)"
    group.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction, help=which)
    args = parse(parser)
    concurrencies, rounds = ([1, 8], 1) if args.quick else ([1, 8, 64], 5)
    plan = Plan(
        args.concurrency or concurrencies, args.rounds or rounds, *((8, 12, 2.0) if args.quick else (24, 40, 10.0))
    )
    text_rounds = args.rounds or (2 if args.quick else 5)
    text_plan = Plan(args.concurrency or [1, 16, 64], text_rounds, min_requests=16, text_tokens=64, speech_seconds=0.0)
    chosen: dict[str, Any] = {"enforce_eager": True} if args.eager else {}
    if args.async_scheduling is not None:
        chosen["async_scheduling"] = args.async_scheduling
    settings = {"quick": str(args.quick), "speech": f"{plan.speech_seconds:g} s", "rounds": plan.rounds}
    report = Report("serve", {**settings, **{name: str(value) for name, value in chosen.items()}})
    for size in args.sizes:
        if {"chat", "speech"} & set(args.parts):
            measure_speaking_model(size, args.parts, plan, report)
        if {"vllm", "offline"} & set(args.parts):
            suffix = "" if size == "default" else f"_{size}"
            with ExitStack() as stack:
                model = args.model or stack.enter_context(tiny_checkpoint("qwen3", size))
                if "vllm" in args.parts:
                    measure_text_model(suffix, model, TEXT_ARGS | chosen, text_plan, report)
                if "offline" in args.parts:
                    measure_offline(suffix, model, TEXT_ARGS | chosen, 2 * text_rounds, report)
    if "images" in args.parts:
        measure_images(plan, report)
    report.notes += [
        "throughput: requests/s of the server to those of the direct call, or of vLLM's server; higher is better",
        "ttfa_added_ms, ttft_added_ms: median of the server less that of the other; lower is better",
        "CPU s/request: of all processes of the server",
        "other ratios: ours to plain vLLM's, of the medians; offline: higher is better, all tokens were equal",
    ]
    report.finish(args.output)


if __name__ == "__main__":
    main()
