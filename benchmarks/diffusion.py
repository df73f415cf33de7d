# SPDX-License-Identifier: Apache-2.0
"""Pictures: `OmniLLM` against the bare diffusers pipeline with the same weights, in one run, round by round.

    python benchmarks/diffusion.py [--models NAME ...] [--sizes default large] [--steps N] [--height N --width N]
                                   [--starts N] [--output FILE.json] [--quick]

One picture at a time: the bare call, ours, ours while somebody looks on, and ours with a preview at every step. Then 16
pictures: sixteen bare calls, one bare call with a batch of 16, and 16 requests to us at once. Then callers who leave
while their picture is being painted. Everybody computes on as many threads as OMP_NUM_THREADS says (default 1), and all
pictures are compared with those of the bare calls. Weights are random. In the default size of the checkpoints overhead
decides; in the large one computing does.

How fast a process computes depends on where its memory happens to lie, by a tenth and more. So all contestants start
several times, and a ratio is the median of those of the starts.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers.utils import logging as diffusers_logging
from painters import BarePainter, OmniPainter, Order, check_pictures, make_prompts
from report import Report, make_parser, percentile, progress
from transformers.utils import logging
from walkouts import Gallery, Walkout

from vllm_omni import AsyncOmniLLM, OmniLLM
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

T = TypeVar("T")
CROWD = 16
BARE, OURS, WATCHED, PREVIEWED = "diffusers", "OmniLLM", "OmniLLM, watched", "OmniLLM, previews"
ONE_BY_ONE, BATCH, AT_ONCE = "diffusers, one by one", "diffusers, one batch", "OmniLLM, at once"
MODELS: dict[str, dict[str, Any]] = {
    "z_image": {"guidance_scale": 4.0, "negative_prompt": "blur"},
    "flux": {"guidance_scale": 3.5},
    "stable_diffusion_3": {"guidance_scale": 4.0, "negative_prompt": "blur"},
}
"""Names of tiny checkpoints, with arguments of their pipelines."""


@dataclass(frozen=True)
class Plan:
    """How much is measured with checkpoints of one size."""

    order: Order
    single_rounds: int
    crowd_rounds: int
    walkouts: int


@dataclass
class Tally:
    """What one contestant did.

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

    def run(self, paint: Callable[..., T], *args: Any) -> T:
        started = time.perf_counter()
        made = paint(*args)
        self.seconds.append(time.perf_counter() - started)
        return made


@dataclass
class Results:
    """Of one checkpoint. `difference`: the largest one from what the bare calls painted."""

    tallies: dict[str, Tally]
    walkouts: list[Walkout]
    difference: float


def play(model: str, size: str, plan: Plan, starts: int) -> list[Results]:
    """One start after the other, each in a process of its own. Raises as `play_once`."""
    played = []
    for number in range(starts):
        label = f"{model} {size}, start {number + 1} of {starts}"
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            played.append(process.submit(play_once, model, size, plan, label).result())
    return played


def play_once(model: str, size: str, plan: Plan, label: str) -> Results:
    """
    Raises:
        ValueError: We painted something else than the bare pipeline.
    """
    set_up()
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_checkpoint(model, Path(folder) / model, size=size)
        bare = BarePainter(path, plan.order)
        progress(f"{label}: starting")
        with OmniLLM(str(path), dtype="float32", max_batch_size=CROWD) as llm:
            ours = OmniPainter(llm, plan.order)
            progress(f"{label}: one at a time")
            singles, difference = paint_singles(bare, ours, plan.single_rounds)
            progress(f"{label}: {CROWD} pictures")
            crowds, crowd_difference = paint_crowds(bare, ours, plan.crowd_rounds)
        progress(f"{label}: callers who leave")
        with AsyncOmniLLM(str(path), dtype="float32", log_stats=True) as llm:
            walkouts = Gallery(llm, plan.order).walk_out(plan.walkouts, seed=0)
    return Results(singles | crowds, walkouts, max(difference, crowd_difference))


def paint_singles(bare: BarePainter, ours: OmniPainter, rounds: int) -> tuple[dict[str, Tally], float]:
    """The same picture by everybody, and another one in the next round. The first round warms up."""
    tallies = {name: Tally(1) for name in (BARE, OURS, WATCHED, PREVIEWED)}
    difference = 0.0
    for prompt in make_prompts(1 + rounds):
        expected = tallies[BARE].run(bare.paint, [prompt])
        alone = tallies[OURS].run(ours.paint, [prompt])
        watched = tallies[WATCHED].run(ours.sit, prompt, 0)
        previewed = tallies[PREVIEWED].run(ours.sit, prompt, 1)
        tallies[PREVIEWED].first_previews.append(previewed.first_preview)
        by_name = {OURS: alone, WATCHED: [watched.picture], PREVIEWED: [previewed.picture]}
        difference = max(difference, *(check_pictures(name, got, expected) for name, got in by_name.items()))
    for tally in tallies.values():
        del tally.seconds[:1], tally.first_previews[:1]
    return tallies, difference


def paint_crowds(bare: BarePainter, ours: OmniPainter, rounds: int) -> tuple[dict[str, Tally], float]:
    """The same 16 pictures by everybody, each round. The bare batch has been warmed up by the one at a time."""
    tallies = {name: Tally(CROWD) for name in (ONE_BY_ONE, BATCH, AT_ONCE)}
    prompts = make_prompts(CROWD)
    difference = 0.0
    for _ in range(rounds):
        expected = tallies[ONE_BY_ONE].run(bare.paint_one_by_one, prompts)
        by_name = {
            BATCH: tallies[BATCH].run(bare.paint, prompts),
            AT_ONCE: tallies[AT_ONCE].run(ours.paint, prompts),
        }
        difference = max(difference, *(check_pictures(name, got, expected) for name, got in by_name.items()))
    return tallies, difference


def set_up() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def ratios(played: Sequence[Results]) -> dict[str, float]:
    each = [ratios_of(results) for results in played]
    found = {name: percentile([one[name] for one in each], 50) for name in each[0]}
    return found | {"abort_steps": max(one["abort_steps"] for one in each)}


def ratios_of(results: Results) -> dict[str, float]:
    medians = {name: tally.median for name, tally in results.tallies.items()}
    return {
        "overhead": medians[OURS] / medians[BARE] - 1,
        "overhead_ms": 1000 * (medians[OURS] - medians[BARE]),
        "batch_16": medians[BATCH] / medians[AT_ONCE],
        "one_by_one": medians[ONE_BY_ONE] / medians[AT_ONCE],
        "first_preview": percentile(results.tallies[PREVIEWED].first_previews, 50) / medians[PREVIEWED],
        "preview_cost": medians[PREVIEWED] / medians[WATCHED] - 1,
        "abort_steps": max(walkout.steps_after for walkout in results.walkouts),
        "abort_free_ms": 1000 * percentile([walkout.free_s for walkout in results.walkouts], 50),
    }


def add_results(model: str, size: str, played: Sequence[Results], report: Report) -> None:
    for name in played[0].tallies:
        tallies = [results.tallies[name] for results in played]
        seconds = [second for tally in tallies for second in tally.seconds]
        previews = [second for tally in tallies for second in tally.first_previews]
        report.rows.append(
            {
                "model": model,
                "size": size,
                "who": name,
                "images": tallies[0].images,
                "s (median)": percentile(seconds, 50),
                "least": min(seconds),
                "images/s": tallies[0].images / percentile(seconds, 50),
                "first preview s": percentile(previews, 50) if previews else "",
            }
        )
    found = ratios(played)
    report.ratios |= {f"{model}_{size}_{name}": value for name, value in found.items()}
    allowed = [30 * results.tallies[BARE].median + 5 for results in played]  # ms: 3 % and 5 ms
    within = "within" if found["overhead_ms"] <= percentile(allowed, 50) else "NOT within"
    batches = ", ".join(f"{ratios_of(results)['batch_16']:.2f}" for results in played)
    report.notes.append(
        f"{model} {size}: one picture {within} 3% + 5 ms of diffusers; batch_16 of each start: {batches}; "
        f"largest difference between pictures {max(results.difference for results in played):.1e}"
    )


def add_worst(report: Report) -> None:
    """The three figures that were asked for, each the worst of all checkpoints."""
    for name, worst in (("overhead", max), ("batch_16", min), ("abort_steps", max)):
        report.ratios[name] = worst(value for key, value in report.ratios.items() if key.endswith(f"_{name}"))
    report.notes.append("higher is better: batch_16, one_by_one; lower is better: all other ratios")
    report.notes.append(
        "abort_steps: denoising steps begun or completed after those that the caller saw before leaving"
    )


def make_plan(args: Any, model: str, size: str) -> Plan:
    large = size == "large"
    side = 64 if not large else 128 if args.quick else 256
    order = Order(args.height or side, args.width or side, args.steps, arguments=MODELS[model])
    if large:
        return Plan(order, *((3, 1, 3) if args.quick else (6, 2, 4)))
    return Plan(order, *((12, 3, 6) if args.quick else (20, 4, 8)))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="default: all; one of them if quick")
    parser.add_argument("--sizes", nargs="+", choices=["default", "large"], help="default: both; not large if quick")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps (default 8)")
    for side in ("height", "width"):
        parser.add_argument(f"--{side}", type=int, help="pixels (default 64; for the large size 256, or 128 if quick)")
    parser.add_argument("--starts", type=int, help="of all contestants (default 3; 1 if quick)")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    starts = args.starts or (1 if args.quick else 3)
    report = Report("diffusion", {"quick": str(args.quick), "starts": str(starts)})
    for model in args.models or list(MODELS)[: 1 if args.quick else None]:
        for size in args.sizes or ["default", "large"][: 1 if args.quick else None]:
            plan = make_plan(args, model, size)
            add_results(model, size, play(model, size, plan, starts), report)
            order = plan.order
            report.settings[f"{size} pictures"] = f"{order.width}x{order.height}, {order.num_inference_steps} steps"
    add_worst(report)
    report.finish(args.output)


if __name__ == "__main__":
    main()
