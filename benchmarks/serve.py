# SPDX-License-Identifier: Apache-2.0
"""The HTTP server against `AsyncOmniLLM` called directly, and against plain vLLM's server, in one run.

    python benchmarks/serve.py [--parts chat vllm speech images] [--sizes default large] [--concurrency 1 8 64]
                               [--rounds N] [--output FILE.json] [--quick]

All load comes from vLLM's load generator (`vllm bench serve --omni`), in this process: random prompts, greedy, of
equal length. `chat`: speech and text through the server, and through `AsyncOmniLLM` in this process, which the
generator calls as one more backend. `vllm`: a text model through our server and through plain vLLM's. `speech`,
`images`: the server alone. Backends take turns, round by round; an idle one costs no time. Figures are the median of
the rounds. Weights are random.
"""

import io
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends import REPETITION_PENALTY
from report import Report, make_parser, progress
from transformers import AutoProcessor
from transformers.utils import logging
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput

from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.cli.bench import run_bench_serve
from vllm_omni.entrypoints.cli.bench_requests import BACKENDS, Backend, OmniRequestFuncOutput
from vllm_omni.events import ARSegmentEvent, ErrorEvent
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

SAMPLE_RATE, CODES_PER_SECOND = 24_000, 12.5
START_TIMEOUT_S, STOP_TIMEOUT_S = 300.0, 60.0
MAX_NUM_SEQS = 64
TEXT_REQUESTS = 8
"""Requests for text alone to one with speech: they are so much shorter."""
VLLM_ARGS = {
    "dtype": "float32", "max_model_len": 2048, "max_num_seqs": MAX_NUM_SEQS, "kv_cache_memory_bytes": 256 << 20,
}  # fmt: skip
VLLM_FLAGS = [*(f"--{name.replace('_', '-')}={value}" for name, value in VLLM_ARGS.items()), "--enforce-eager"]
COLUMNS = {
    "requests/s": "request_throughput",
    "TTFT p50 ms": "median_ttft_ms",
    "TTFA p50 ms": "median_ttfa_ms",
    "RTF p50": "median_rtf",
    "E2EL p50 ms": "median_e2el_ms",
    "E2EL p99 ms": "p99_e2el_ms",
    "failed": "failed",
}
"""Headings, and the keys of `vllm bench serve --save-result`."""


@dataclass(frozen=True)
class Plan:
    concurrencies: list[int]
    rounds: int
    min_requests: int
    text_tokens: int
    speech_seconds: float

    @property
    def talker_params(self) -> dict[str, Any]:
        """The last token of a Qwen3-Omni talker makes no frame."""
        tokens = round(CODES_PER_SECOND * self.speech_seconds) + 1
        length = {"min_tokens": tokens, "max_tokens": tokens, "detokenize": False}
        return {"temperature": 0.0, "repetition_penalty": REPETITION_PENALTY, **length}


@dataclass(frozen=True)
class Target:
    """Where load goes.

    Attributes:
        name: In the table.
        backend: As of `vllm bench serve --backend`.
    """

    name: str
    backend: str
    url: str
    model: Path

    def run(self, plan: Plan, concurrency: int, body: dict[str, Any]) -> dict[str, Any]:
        """The result of `vllm bench serve`. Its tables are not shown."""
        sampling = ["--temperature=0"] if "chat" in self.backend or self.backend == "direct" else []
        num_requests = max(plan.min_requests, 2 * concurrency)
        if self.backend == "openai-chat":  # short requests: a round shall not be one pause of a process
            num_requests *= TEXT_REQUESTS
        with redirect_stdout(io.StringIO()):
            return run_bench_serve(
                [
                    f"--backend={self.backend}", f"--base-url={self.url}", "--endpoint=" + _endpoint(self.backend),
                    f"--model={self.model}", "--dataset-name=random", "--input-len=32",
                    f"--output-len={plan.text_tokens}", f"--num-prompts={num_requests}",
                    f"--max-concurrency={concurrency}", "--disable-tqdm", f"--extra-body={json.dumps(body)}",
                    "--ignore-eos" if self.backend == "openai-chat" else "--percentile-metrics=ttft,e2el", *sampling,
                ]
            )  # fmt: skip


def _endpoint(backend: str) -> str:
    return BACKENDS[backend].endpoint if backend in BACKENDS else "/v1/chat/completions"


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


@dataclass(frozen=True)
class Server:
    """A server that is ready, in a process of its own, which may have children."""

    url: str
    pid: int


@contextmanager
def start_server(command: list[str], folder: Path) -> Iterator[str]:
    """The URL of a server. Raises as `run_server`."""
    with run_server(command, folder) as server:
        yield server.url


@contextmanager
def run_server(command: list[str], folder: Path) -> Iterator[Server]:
    """
    Raises:
        RuntimeError: It ended, or was not ready in time; with its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / f"{port}.log"
    with log.open("wb") as output:
        command = [*command, "--host=127.0.0.1", f"--port={port}"]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.2)
        yield Server(url, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return response.status == 200
    except OSError:  # URLError, and a refused connection
        return False


def omni_server(model: Path, *flags: str) -> list[str]:
    return [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--omni", *flags]


def plain_server(model: Path, *flags: str) -> list[str]:
    # The script of vLLM's CPU build does not start without --omni.
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", *flags]


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


def measure_speaking_model(size: str, parts: list[str], plan: Plan, report: Report) -> None:
    suffix = "" if size == "default" else f"_{size}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_tiny_checkpoint("qwen3_omni_moe", folder / "model", size=size)
        progress(f"{size}: starting the server and the pipeline")
        url = stack.enter_context(start_server(omni_server(model, *VLLM_FLAGS), folder))
        if "chat" in parts:
            # The server counts what it does, by default: so the pipeline does, too.
            llm = stack.enter_context(AsyncOmniLLM(str(model), enforce_eager=True, log_stats=True, **VLLM_ARGS))
            BACKENDS["direct"] = Backend(DirectBackend(llm, model).request, "/v1/chat/completions", has_text=True)
            targets = [Target("server", "openai-chat-omni", url, model), Target("direct", "direct", url, model)]
            body = {"modalities": ["text", "audio"], "sampling_params_list": [None, plan.talker_params, None]}
            measure(f"chat{suffix}", targets, plan, body, report)
        if "speech" in parts:
            target = Target("server", "openai-audio-speech", url, model)
            measure(
                f"speech{suffix}", [target], plan, {"sampling_params_list": [None, plan.talker_params, None]}, report
            )


def measure_text_model(size: str, plan: Plan, report: Report) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_tiny_checkpoint("qwen3", folder / "model", size=size)
        progress(f"{size}: starting our server and vLLM's")
        commands = {"server": omni_server(model, *VLLM_FLAGS), "vLLM": plain_server(model, *VLLM_FLAGS)}
        targets = [
            Target(name, "openai-chat", stack.enter_context(start_server(command, folder)), model)
            for name, command in commands.items()
        ]
        measure("vllm" if size == "default" else f"vllm_{size}", targets, plan, {}, report)


def measure_images(plan: Plan, report: Report) -> None:
    with tempfile.TemporaryDirectory() as name:
        model = write_tiny_checkpoint("z_image", Path(name) / "model")
        progress("images: starting the server")
        with start_server(omni_server(model, "--dtype=float32"), Path(name)) as url:
            body = {"size": "32x32", "num_inference_steps": 2}
            measure("images", [Target("server", "openai-images", url, model)], plan, body, report)


def main() -> None:
    parser = make_parser(__doc__)
    parts = ["chat", "vllm", "speech", "images"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="default: all")
    parser.add_argument("--sizes", nargs="+", choices=["default", "large"], default=["default"])
    parser.add_argument(
        "--concurrency", type=int, nargs="+", help="requests at once (default 1 8 64; 1 8 with --quick)"
    )
    parser.add_argument("--rounds", type=int, help="default 5; 1 with --quick")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    concurrencies, rounds = ([1, 8], 1) if args.quick else ([1, 8, 64], 5)
    plan = Plan(
        args.concurrency or concurrencies, args.rounds or rounds, *((8, 12, 2.0) if args.quick else (24, 40, 10.0))
    )
    report = Report("serve", {"quick": str(args.quick), "speech": f"{plan.speech_seconds:g} s", "rounds": plan.rounds})
    for size in args.sizes:
        if {"chat", "speech"} & set(args.parts):
            measure_speaking_model(size, args.parts, plan, report)
        if "vllm" in args.parts:
            measure_text_model(size, plan, report)
    if "images" in args.parts:
        measure_images(plan, report)
    report.notes += [
        "throughput: requests/s of the server to those of the direct call, or of vLLM's server; higher is better",
        "ttfa_added_ms, ttft_added_ms: median of the server less that of the other; lower is better",
    ]
    report.finish(args.output)


if __name__ == "__main__":
    main()
