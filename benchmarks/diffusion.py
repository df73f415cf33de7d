# SPDX-License-Identifier: Apache-2.0
"""Images: `OmniLLM` against the plain diffusers pipeline with the same weights, in one run, round by round.

    python benchmarks/diffusion.py [--models NAME ...] [--sizes default large] [--steps N] [--height N --width N]
                                   [--starts N] [--output FILE.json] [--quick] [--parallel | --yielding]

One image at a time: diffusers' call, ours, ours while a client streams, and ours with a preview at every step. Then 16
images: 16 calls of diffusers, one with a batch of 16, and 16 concurrent requests to us. All compute on as many threads
as OMP_NUM_THREADS has (default 1), and all images are compared with those of diffusers. Weights are random. In the
default size of the checkpoints overhead decides, in the large one computing does.

With --parallel only the denoisers are measured, on one image with guidance, two rows: call by call in one process with
one thread and in two with one each (`data_parallel_size: 2`), then in one process with two threads, which would slow
down the others while they are idle.

With --yielding a tiny Wan makes pictures that are requested at random times (Poisson, a fifth of the time) while it
denoises a video of twice the size and 50 steps: in our order of jobs, and in turns, in which no job passes another.
Both make the same latents.

The speed of a process depends on where its memory is, by a tenth and more. So all backends start several times, and a
ratio is the median of those of the starts.
"""

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from diffusers import DiffusionPipeline, WanPipeline
from diffusers.utils import logging as diffusers_logging
from report import Report, make_parser, percentile, progress
from transformers.utils import logging

from vllm_omni import CompletedEvent, ErrorEvent, ImageProgressEvent, OmniLLM
from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.batched_call import ModuleCall, SharedTensors, compute
from vllm_omni.diffusion.job import DiffusionJob, RunningJob
from vllm_omni.diffusion.parallel_denoiser import ParallelDenoisers
from vllm_omni.executor.diffusers_executor import DiffusersPipelineExecutor
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

T = TypeVar("T")
BATCH = 16
ATOL = 1e-4
BASELINE, OURS, STREAMED, PREVIEWED = "diffusers", "OmniLLM", "OmniLLM, streamed", "OmniLLM, previews"
ONE_THREAD, TWO_THREADS, TWO_PROCESSES = "denoiser", "denoiser, two threads", "denoiser, two processes"
IN_TURNS, VIDEO_FRAMES = "jobs in turns", 81
ONE_BY_ONE, ONE_BATCH, CONCURRENT = "diffusers, one by one", "diffusers, one batch", "OmniLLM, concurrent"
MODELS: dict[str, dict[str, Any]] = {
    "z_image": {"guidance_scale": 4.0, "negative_prompt": "blur"},
    "flux": {"guidance_scale": 3.5},
    "stable_diffusion_3": {"guidance_scale": 4.0, "negative_prompt": "blur"},
}
"""Names of tiny checkpoints, with arguments of their pipelines."""
SUBJECTS = ("a harbour", "a desert at noon", "snow on a roof", "an old railway station in the rain", "a kitchen table")


@dataclass(frozen=True)
class Load:
    """What is measured with checkpoints of one size.

    Attributes:
        arguments: Of the pipeline, under the names that diffusers and `DiffusionSamplingParams` both have.
        rounds, batch_rounds: Of one image, and of 16.
    """

    arguments: dict[str, Any]
    rounds: int
    batch_rounds: int


@dataclass
class Measurement:
    """One backend.

    Attributes:
        seconds: Of each round.
        first_previews: Seconds until the first preview of each round.
    """

    images: int
    seconds: list[float] = field(default_factory=list)
    first_previews: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return percentile(self.seconds, 50)

    def run(self, generate: Callable[..., T], *args: Any) -> T:
        started = time.perf_counter()
        result = generate(*args)
        self.seconds.append(time.perf_counter() - started)
        return result


@dataclass
class Results:
    """Of one start. `difference`: the largest one from the images of diffusers."""

    measurements: dict[str, Measurement]
    difference: float

    def ratios(self) -> dict[str, float]:
        medians = {name: measurement.median for name, measurement in self.measurements.items()}
        return {
            "overhead": medians[OURS] / medians[BASELINE] - 1,
            "overhead_ms": 1000 * (medians[OURS] - medians[BASELINE]),
            "batch_16": medians[ONE_BATCH] / medians[CONCURRENT],
            "one_by_one": medians[ONE_BY_ONE] / medians[CONCURRENT],
            "first_preview": percentile(self.measurements[PREVIEWED].first_previews, 50) / medians[PREVIEWED],
            "preview_cost": medians[PREVIEWED] / medians[STREAMED] - 1,
        }


class DiffusersBackend:
    """Calls the diffusers pipeline, as its users do. Images are float32 `[height, width, 3]` in [0, 1]."""

    def __init__(self, path: Path, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._pipe = DiffusionPipeline.from_pretrained(path, dtype=torch.float32)
        self._pipe.set_progress_bar_config(disable=True)

    def generate(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """All in one call."""
        generators = [torch.Generator().manual_seed(0) for _ in prompts]
        # A text, such as the negative prompt, is given for each image: not every pipeline repeats it.
        arguments = {
            name: [value] * len(prompts) if isinstance(value, str) else value for name, value in self._arguments.items()
        }
        return list(self._pipe(list(prompts), generator=generators, output_type="np", **arguments).images)

    def generate_one_by_one(self, prompts: Sequence[str]) -> list[np.ndarray]:
        return [image for prompt in prompts for image in self.generate([prompt])]


class OmniBackend:
    """Sends requests to a pipeline of one diffusion stage."""

    def __init__(self, llm: OmniLLM, arguments: dict[str, Any]) -> None:
        self._llm = llm
        self._params = arguments | {"seed": 0, "output_format": "np"}

    def generate(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """All at once."""
        outputs = self._llm.generate(list(prompts), [self._params], use_tqdm=False)
        return [output.images[0] for output in outputs]

    def stream(self, prompt: str, preview_every: int) -> tuple[np.ndarray, float]:
        """
        Returns:
            The image, and the seconds until the first preview, or of the whole where there was none.

        Raises:
            RequestError: The request failed.
        """
        started = time.perf_counter()
        first_preview = None
        for event in self._llm.generate(prompt, [self._params | {"preview_every": preview_every}], stream=True):
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, ImageProgressEvent) and event.image is not None:
                first_preview = first_preview or time.perf_counter() - started
        assert isinstance(event, CompletedEvent)  # It is the last.
        return event.outputs[0].images[0], first_preview or time.perf_counter() - started


def make_prompts(count: int) -> list[str]:
    return [f"image {number}: {SUBJECTS[number % len(SUBJECTS)]}" for number in range(count)]


def compare(backend: str, images: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """
    Returns:
        The largest difference of all.

    Raises:
        ValueError: There are more or fewer images, or one differs by more than rounding.
    """
    if len(images) != len(expected):
        raise ValueError(f"{backend} made {len(images)} images, not {len(expected)}")
    for number, (image, right) in enumerate(zip(images, expected, strict=True)):
        if image.shape != right.shape or not np.allclose(image, right, rtol=0, atol=ATOL):
            raise ValueError(f"image {number} of {backend} is not that of diffusers")
    return max(float(np.abs(image - right).max()) for image, right in zip(images, expected, strict=True))


def measure(model: str, size: str, load: Load, label: str) -> Results:
    """One start; runs in a process of its own.

    Raises:
        ValueError: Our images are not those of diffusers.
    """
    for module in (logging, diffusers_logging):
        module.set_verbosity_error()
        module.disable_progress_bar()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_checkpoint(model, Path(folder) / model, size=size)
        baseline = DiffusersBackend(path, load.arguments)
        progress(f"{label}: starting")
        with OmniLLM(str(path), dtype="float32", max_batch_size=BATCH, prompt_cache_bytes=0) as llm:
            ours = OmniBackend(llm, load.arguments)
            progress(f"{label}: one image at a time")
            singles = measure_singles(baseline, ours, load.rounds)
            progress(f"{label}: {BATCH} images")
            batches = measure_batches(baseline, ours, load.batch_rounds)
    return Results(singles.measurements | batches.measurements, max(singles.difference, batches.difference))


def measure_singles(baseline: DiffusersBackend, ours: OmniBackend, rounds: int) -> Results:
    """The same image by all backends, and another one in the next round. The first round warms up."""
    measurements = {name: Measurement(1) for name in (BASELINE, OURS, STREAMED, PREVIEWED)}
    difference = 0.0
    for prompt in make_prompts(1 + rounds):
        expected = measurements[BASELINE].run(baseline.generate, [prompt])
        alone = measurements[OURS].run(ours.generate, [prompt])
        streamed, _ = measurements[STREAMED].run(ours.stream, prompt, 0)
        previewed, first_preview = measurements[PREVIEWED].run(ours.stream, prompt, 1)
        measurements[PREVIEWED].first_previews.append(first_preview)
        by_name = {OURS: alone, STREAMED: [streamed], PREVIEWED: [previewed]}
        difference = max(difference, *(compare(name, images, expected) for name, images in by_name.items()))
    for measurement in measurements.values():
        del measurement.seconds[:1], measurement.first_previews[:1]
    return Results(measurements, difference)


def measure_batches(baseline: DiffusersBackend, ours: OmniBackend, rounds: int) -> Results:
    """The same 16 images by all backends, each round."""
    measurements = {name: Measurement(BATCH) for name in (ONE_BY_ONE, ONE_BATCH, CONCURRENT)}
    prompts = make_prompts(BATCH)
    difference = 0.0
    for _ in range(rounds):
        expected = measurements[ONE_BY_ONE].run(baseline.generate_one_by_one, prompts)
        by_name = {
            ONE_BATCH: measurements[ONE_BATCH].run(baseline.generate, prompts),
            CONCURRENT: measurements[CONCURRENT].run(ours.generate, prompts),
        }
        difference = max(difference, *(compare(name, images, expected) for name, images in by_name.items()))
    return Results(measurements, difference)


def measure_denoiser(model: str, size: str, load: Load) -> Results:
    """One start of the two processes; runs in a process of its own.

    Raises:
        ValueError: Two processes do not compute what one does.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_checkpoint(model, Path(folder) / model, size=size)
        backend = DiffusersBackend(path, load.arguments)
        transformer = backend._pipe.transformer
        with torch.no_grad():
            args, kwargs = record_call(backend)
            torch.set_num_threads(2)  # which the processes divide
            config = DiTConfig(dtype="float32", data_parallel_size=2)
            ranks = ParallelDenoisers(str(path), config, None, lambda: None)
            forward = transformer.forward
            try:
                ranks.join({"transformer": transformer}, torch.device("cpu"))
                functions = {ONE_THREAD: forward, TWO_PROCESSES: transformer.forward}
                results = measure_functions(functions, args, kwargs, load.rounds)
            finally:
                ranks.close()
            torch.set_num_threads(2)
            results.measurements |= measure_functions({TWO_THREADS: forward}, args, kwargs, load.rounds).measurements
            return results


def record_call(backend: DiffusersBackend) -> tuple[tuple, dict[str, Any]]:
    """The arguments of the denoiser's last call for one image."""
    transformer, recorded = backend._pipe.transformer, []
    forward = transformer.forward

    def record(*args: Any, **kwargs: Any) -> Any:
        recorded.append((args, kwargs))
        return forward(*args, **kwargs)

    transformer.forward = record
    backend.generate(make_prompts(1))
    del transformer.forward
    return recorded[-1]


def measure_functions(functions: dict[str, Callable], args: tuple, kwargs: dict[str, Any], rounds: int) -> Results:
    """The same call by each, one after the other. The first round warms up."""
    measurements = {name: Measurement(1) for name in functions}
    calls = {name: ModuleCall.describe(call, args, kwargs, SharedTensors()) for name, call in functions.items()}
    difference = 0.0
    for _ in range(1 + 10 * rounds):
        first, *others = ((name, as_images(measurements[name].run(compute, [call])[0])) for name, call in calls.items())
        difference = max([difference, *(compare(name, images, first[1]) for name, images in others)])
    for measurement in measurements.values():
        del measurement.seconds[:1]
    return Results(measurements, difference)


def as_images(output: Any) -> list[np.ndarray]:
    """The rows of a denoiser's output, a tensor or a list in a tuple."""
    return [row.numpy() for row in output[0]]


def report_denoisers(args: Any, report: Report) -> None:
    for model in args.models or ["z_image", "stable_diffusion_3"]:
        for size in args.sizes or ["large"]:
            progress(f"{model} {size}: the denoiser")
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                results = process.submit(measure_denoiser, model, size, make_load(args, model, size)).result()
            add_rows(model, size, [results], report)
            medians = {name: measurement.median for name, measurement in results.measurements.items()}
            for name, baseline in (("one_thread", ONE_THREAD), ("two_threads", TWO_THREADS)):
                report.ratios[f"{model}_{size}_{name}"] = medians[baseline] / medians[TWO_PROCESSES]
            report.notes.append(f"{model} {size}: largest difference between outputs {results.difference:.1e}")
    report.notes.append("ratios: time in one process to that in two; higher is better")


class TurnsExecutor(DiffusersPipelineExecutor):
    """No job passes another: behind those without a step comes the one that has waited longest."""

    def _order(self, running: list[RunningJob]) -> list[RunningJob]:
        return sorted(running, key=lambda job: sys.maxsize if job.has_started else job.num_calls)


@dataclass
class Mixture:
    """One video, and the pictures that were requested meanwhile.

    Attributes:
        pictures: Seconds from the request of each to its end.
        video: Seconds of the video.
        outputs: Latents, by the names of the jobs.
    """

    pictures: list[float]
    video: float
    outputs: dict[str, np.ndarray]


def make_job(name: str, load: Load, num_frames: int, seed: int = 0) -> DiffusionJob:
    return DiffusionJob(
        request_id=name,
        index=0,
        pipeline_class=WanPipeline,
        arguments={"prompt": name, "num_frames": num_frames, **load.arguments},
        seed=seed,
        latents_only=True,
    )


def run_mixture(executor: DiffusersPipelineExecutor, load: Load, video: Load, when: Sequence[float]) -> Mixture:
    """`when`: seconds after the video's, at which pictures are requested."""
    to_come = [(due, make_job(f"picture {number}", load, 1, number)) for number, due in enumerate(when)]
    ended: dict[str, float] = {}
    outputs: dict[str, np.ndarray] = {}
    started = time.monotonic()
    executor.add(make_job("video", video, VIDEO_FRAMES))
    while to_come or executor.has_work:
        while to_come and started + to_come[0][0] <= time.monotonic():
            due, job = to_come.pop(0)
            job.arrival = started + due
            executor.add(job)
        if not executor.has_work:
            time.sleep(max(0.0, started + to_come[0][0] - time.monotonic()))
        for end in executor.step()[0]:
            if end.error is not None:
                raise end.error
            ended[end.job.request_id] = time.monotonic() - started
            outputs[end.job.request_id] = end.output.numpy()
    pictures = [ended[f"picture {number}"] - due for number, due in enumerate(when)]
    return Mixture(pictures, ended["video"], outputs)


def report_yielding(args: Any, report: Report) -> None:
    """
    Raises:
        ValueError: The latents depend on the order of the jobs.
    """
    side = args.height or 64
    load = Load({"height": side, "width": args.width or side, "num_inference_steps": args.steps}, 0, 0)
    longer = Load({**load.arguments, "height": 2 * side, "width": 2 * load.arguments["width"]}, 0, 0)
    longer.arguments["num_inference_steps"] = 50
    rounds = 2 if args.quick else 10
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    mixtures: dict[str, list[Mixture]] = {IN_TURNS: [], OURS: []}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = write_tiny_checkpoint("wan", Path(folder) / "wan")
        executors: dict[str, DiffusersPipelineExecutor] = {}
        for name, kind in ((IN_TURNS, TurnsExecutor), (OURS, DiffusersPipelineExecutor)):
            executors[name] = kind(str(path), DiTConfig(dtype="float32", max_batch_size=BATCH))
            executors[name].start()
            run_mixture(executors[name], load, longer, [0.0])  # warms up
        video = run_mixture(executors[OURS], load, longer, []).video
        picture = run_mixture(executors[OURS], load, longer, [2 * video]).pictures[0]  # behind the video: alone
        dice = random.Random(0)
        for number in range(rounds):
            when, due = [], video / 20
            while due < video * 0.9:
                when.append(due)
                due += dice.expovariate(1 / (5 * picture))
            for name, executor in executors.items():
                progress(f"round {number + 1} of {rounds}: {len(when)} pictures, {name}")
                mixtures[name].append(run_mixture(executor, load, longer, when))
            first, second = (mixtures[name][-1].outputs for name in mixtures)
            compare(OURS, [second[job] for job in first], list(first.values()))
    for name, runs in mixtures.items():
        seconds = [second for run in runs for second in run.pictures]
        report.rows.append(
            {
                "order": name,
                "pictures": len(seconds),
                "picture alone s": picture,
                **{f"p{percent} s": percentile(seconds, percent) for percent in (50, 95, 99)},
                "video alone s": video,
                "video s": percentile([run.video for run in runs], 50),
            }
        )
    turns, ours = report.rows[-2:]
    for ratio, key in (("picture_p50", "p50 s"), ("picture_p99", "p99 s"), ("video", "video s")):
        report.ratios[f"yielding_{ratio}"] = float(ours[key]) / float(turns[key])
    report.notes.append("yielding: ours to that in turns; lower is better, and 1 for the video")


def add_rows(model: str, size: str, starts: Sequence[Results], report: Report) -> None:
    for name in starts[0].measurements:
        measurements = [results.measurements[name] for results in starts]
        seconds = [second for measurement in measurements for second in measurement.seconds]
        previews = [second for measurement in measurements for second in measurement.first_previews]
        report.rows.append(
            {
                "model": f"{model} {size}",
                "backend": name,
                "images": measurements[0].images,
                "s (median)": percentile(seconds, 50),
                "least": min(seconds),
                "images/s": measurements[0].images / percentile(seconds, 50),
                "first preview s": percentile(previews, 50) if previews else "",
            }
        )


def add_results(model: str, size: str, starts: Sequence[Results], report: Report) -> None:
    add_rows(model, size, starts, report)
    ratios = [results.ratios() for results in starts]
    for name in ratios[0]:
        report.ratios[f"{model}_{size}_{name}"] = percentile([one[name] for one in ratios], 50)
    batches = ", ".join(f"{one['batch_16']:.2f}" for one in ratios)
    report.notes.append(
        f"{model} {size}: batch_16 of each start: {batches}; largest difference between images "
        f"{max(results.difference for results in starts):.1e}"
    )


def make_load(args: Any, model: str, size: str) -> Load:
    large = size == "large"
    side = 64 if not large else 128 if args.quick else 256
    arguments = {"height": args.height or side, "width": args.width or side, "num_inference_steps": args.steps}
    rounds = ((3, 1) if args.quick else (6, 2)) if large else ((12, 3) if args.quick else (20, 4))
    return Load(arguments | MODELS[model], *rounds)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="default: all; the first with --quick")
    parser.add_argument("--sizes", nargs="+", choices=["default", "large"], help="default: both; default with --quick")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps (default 8)")
    for side in ("height", "width"):
        parser.add_argument(f"--{side}", type=int, help="pixels (default 64; large size: 256, with --quick 128)")
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--parallel", action="store_true", help="only the denoisers, in one process and in two")
    alone.add_argument("--yielding", action="store_true", help="only pictures while a video is denoised")
    parser.add_argument("--starts", type=int, help="of all backends (default 3; 1 with --quick)")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    starts = args.starts or (1 if args.quick else 3)
    report = Report("diffusion", {"quick": str(args.quick), "starts": starts, "steps": args.steps})
    if args.parallel or args.yielding:
        (report_denoisers if args.parallel else report_yielding)(args, report)
        report.finish(args.output)
        return
    for model in args.models or list(MODELS)[: 1 if args.quick else None]:
        for size in args.sizes or ["default", "large"][: 1 if args.quick else None]:
            load, results = make_load(args, model, size), []
            for number in range(starts):
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    label = f"{model} {size}, start {number + 1} of {starts}"
                    results.append(process.submit(measure, model, size, load, label).result())
            add_results(model, size, results, report)
    report.notes.append("higher is better: batch_16, one_by_one; lower is better: all other ratios")
    report.finish(args.output)


if __name__ == "__main__":
    main()
