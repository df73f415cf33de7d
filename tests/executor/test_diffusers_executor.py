# SPDX-License-Identifier: Apache-2.0
"""Jobs of a real, tiny pipeline that compute together: each gets its own picture, whatever happens to the others."""

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImageImg2ImgPipeline
from PIL import Image

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.job import DiffusionJob, JobEnd, Progress
from vllm_omni.diffusion.pipeline_call import PipelineCall
from vllm_omni.executor.diffusers_executor import DiffusersPipelineExecutor
from vllm_omni.testing.diffusers_oracle import DiffusersOracle
from vllm_omni.testing.media import make_image

SIZE = {"height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 64}


@pytest.fixture(scope="module")
def model(tiny_diffusion: Callable[[str], Path]) -> Path:
    return tiny_diffusion("z_image")


@pytest.fixture(scope="module")
def oracle(model: Path) -> DiffusersOracle:
    return DiffusersOracle(model)


class Studio:
    """An executor, and what has come out of it.

    Attributes:
        batches: How many jobs computed in each step.
    """

    def __init__(self, model: Path, **config: Any) -> None:
        self.executor = DiffusersPipelineExecutor(str(model), DiTConfig(**config))
        self.executor.start()
        self.pipe = self.executor._runner._pipe
        self.progress: list[tuple[str, Progress]] = []
        self.clear()

    def clear(self) -> None:
        self.batches: list[int] = []
        self.ends: dict[str, JobEnd] = {}
        self.progress.clear()

    def add(self, name: str, seed: int = 0, pipeline_class: type | None = None, **arguments: Any) -> None:
        job = DiffusionJob(
            request_id=name,
            index=0,
            pipeline_class=pipeline_class or type(self.pipe),
            arguments={"prompt": f"a painting of {name}", **SIZE, **arguments},
            seed=seed,
            on_progress=lambda progress: self.progress.append((name, progress)),
        )
        self.executor.add(job)

    def step(self) -> None:
        ends, num_computed = self.executor.step()
        self.batches.append(num_computed)
        self.ends |= {end.job.request_id: end for end in ends}

    def run(self) -> None:
        while self.executor.has_work:
            self.step()

    def steps_of(self, name: str) -> list[int]:
        return [progress.step for owner, progress in self.progress if owner == name]


@pytest.fixture(scope="module")
def open_studio(model: Path) -> Studio:
    return Studio(model)


@pytest.fixture
def studio(open_studio: Studio) -> Iterator[Studio]:
    open_studio.clear()
    yield open_studio
    assert not open_studio.executor.has_work


def check_picture(studio: Studio, oracle: DiffusersOracle, name: str, seed: int = 0, **arguments: Any) -> None:
    end = studio.ends[name]
    assert end.error is None
    expected = oracle.generate(f"a painting of {name}", seed=seed, **{**SIZE, **arguments})
    torch.testing.assert_close(end.output, expected, atol=1e-4, rtol=0)


def test_jobs_compute_together_and_each_gets_its_own_picture(studio: Studio, oracle: DiffusersOracle):
    for seed, name in enumerate(("a cat", "two dogs in the rain", "it")):
        studio.add(name, seed)
    studio.run()
    assert set(studio.batches) == {3}
    for seed, name in enumerate(("a cat", "two dogs in the rain", "it")):
        check_picture(studio, oracle, name, seed)


def test_a_job_joins_the_others_at_their_next_step(studio: Studio, oracle: DiffusersOracle):
    studio.add("first", num_inference_steps=6)
    while not studio.steps_of("first"):
        studio.step()
    studio.add("second", 1, num_inference_steps=2)
    studio.run()
    assert max(studio.batches) == 2
    assert studio.steps_of("first") == list(range(6)) and studio.steps_of("second") == [0, 1]
    check_picture(studio, oracle, "first", num_inference_steps=6)
    check_picture(studio, oracle, "second", 1, num_inference_steps=2)


def test_a_job_that_comes_late_catches_up_before_the_others_go_on(studio: Studio):
    for seed in range(2):
        studio.add(f"early {seed}", seed)
    studio.step()
    studio.add("late", 2)
    studio.run()
    num_steps = SIZE["num_inference_steps"]
    assert studio.batches.count(3) >= num_steps, "all of its steps are made together with the others'"


def test_each_job_has_its_own_steps_guidance_and_size(studio: Studio, oracle: DiffusersOracle):
    wishes = {
        "plain": {"guidance_scale": 0.0},
        "guided": {"guidance_scale": 4.0, "negative_prompt": "grey"},
        "wide": {"width": 64, "num_inference_steps": 2},
    }
    for name, arguments in wishes.items():
        studio.add(name, 7, **arguments)
    studio.run()
    for name, arguments in wishes.items():
        check_picture(studio, oracle, name, 7, **arguments)


def test_no_more_jobs_run_than_may(model: Path):
    studio = Studio(model, max_batch_size=2)
    for seed in range(5):
        studio.add(f"picture {seed}", seed)
    studio.run()
    assert max(studio.batches) == 2 and len(studio.ends) == 5


def test_an_aborted_job_leaves_the_batch_and_the_others_go_on(studio: Studio, oracle: DiffusersOracle):
    for seed, name in enumerate(("stays", "leaves")):
        studio.add(name, seed)
    while not studio.steps_of("leaves"):
        studio.step()
    studio.executor.abort("leaves")
    studio.batches.clear()
    studio.run()
    assert studio.steps_of("leaves") == [0], "it must not do another step"
    assert set(studio.batches) == {1} and set(studio.ends) == {"stays"}
    check_picture(studio, oracle, "stays")


def test_a_job_that_waits_can_be_aborted(studio: Studio):
    studio.add("never")
    studio.executor.abort("never")
    assert not studio.executor.has_work


def test_only_the_job_that_fails_fails(studio: Studio, oracle: DiffusersOracle, monkeypatch: pytest.MonkeyPatch):
    for seed, name in enumerate(("good", "bad", "fine")):
        studio.add(name, seed)
    while not studio.steps_of("bad"):
        studio.step()
    running = next(running for running in studio.executor._runner.running if running.job.request_id == "bad")
    assert running.waiting is not None
    running.waiting.args[0][0].fill_(float("nan"))  # its latents, as the transformer is about to get them
    transformer = studio.pipe.transformer.forward
    compute = transformer._function

    def refuse_nan(x: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if any(picture.isnan().any() for picture in x):
            raise RuntimeError("not a number")
        return compute(x, *args, **kwargs)

    for running in studio.executor._runner.running:
        monkeypatch.setattr(running, "waiting", _with_function(running.waiting, refuse_nan))
    studio.run()
    assert "not a number" in str(studio.ends["bad"].error) and not studio.ends["bad"].is_invalid
    check_picture(studio, oracle, "good", 0)
    check_picture(studio, oracle, "fine", 2)


def _with_function(call: Any, function: Callable[..., Any]) -> Any:
    return type(call)(function, call.args, call.kwargs, call.rows, call.layout)


def refuse_above(studio: Studio, most: int, error: Exception) -> list[int]:
    """Has the transformer raise on more than so many pictures; how many it was called with each time."""
    compute, sizes = studio.pipe.transformer.forward, []

    def refuse(x: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(x) // 2)  # with guidance each picture is there twice
        if sizes[-1] > most:
            raise error
        return compute(x, *args, **kwargs)

    studio.pipe.transformer.forward = refuse
    return sizes


def check_pictures(studio: Studio, oracle: DiffusersOracle, number: int) -> None:
    """So many jobs begin at once, and each gets its own picture."""
    names = [f"picture {seed}" for seed in range(number)]
    for seed, name in enumerate(names):
        studio.add(name, seed)
    studio.run()
    for seed, name in enumerate(names):
        check_picture(studio, oracle, name, seed)


def test_a_batch_too_large_for_the_memory_is_computed_in_halves(model: Path, oracle: DiffusersOracle):
    studio = Studio(model)
    sizes = refuse_above(studio, 2, torch.OutOfMemoryError("out of memory"))
    check_pictures(studio, oracle, 4)
    assert sizes.count(4) == 1, "a size that did not fit must not be tried at every step"


def test_calls_that_cannot_be_joined_are_computed_one_by_one_from_then_on(model: Path, oracle: DiffusersOracle):
    studio = Studio(model)
    sizes = refuse_above(studio, 1, RuntimeError("sizes of tensors must match"))
    check_pictures(studio, oracle, 3)
    assert len([size for size in sizes if size > 1]) == 2, "three, and the half with two"


def test_a_job_too_large_for_the_memory_fails_and_the_next_one_works(model: Path, oracle: DiffusersOracle):
    studio = Studio(model)
    compute = studio.pipe.vae.decode

    def small_memory(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if latents.shape[-1] > 4:
            raise torch.OutOfMemoryError("out of memory")
        return compute(latents, *args, **kwargs)

    studio.pipe.vae.decode = small_memory
    studio.add("large", width=64)
    studio.add("small")
    studio.run()
    assert isinstance(studio.ends["large"].error, torch.OutOfMemoryError)
    check_picture(studio, oracle, "small")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"height": 40}, "height 40: this pipeline makes multiples of 16; the nearest are 32 and 48"),
        ({"width": 8}, "width 8: this pipeline makes multiples of 16; the nearest is 16"),
        ({"height": 1 << 12, "width": 1 << 12}, "16777216 pixels; this stage makes at most 4194304 (max_pixels)"),
    ],
)
def test_what_the_pipeline_cannot_make_is_refused_before_it_computes(studio: Studio, arguments: Any, words: str):
    studio.add("refused", **arguments)
    studio.run()
    assert studio.ends["refused"].is_invalid
    assert words in str(studio.ends["refused"].error)
    assert not studio.progress


def test_the_pipelines_own_size_has_to_fit_as_well(model: Path):
    studio = Studio(model, max_pixels=512 * 512)
    studio.add("default", height=None, width=None)  # 1024 x 1024
    studio.run()
    assert studio.ends["default"].is_invalid and "max_pixels" in str(studio.ends["default"].error)


def test_a_picture_gets_the_size_of_what_is_made_of_it(studio: Studio, oracle: DiffusersOracle):
    """Also where diffusers would fail on it."""
    picture = make_image(seed=2).resize((70, 52))
    changes = {"image": picture, "strength": 0.7}
    studio.add("asked", 1, ZImageImg2ImgPipeline, **changes, width=64)
    studio.add("own size", 1, ZImageImg2ImgPipeline, **changes, height=None, width=None)
    studio.run()
    fitted = picture.resize((64, 32), Image.Resampling.LANCZOS)
    for name in ("asked", "own size"):
        wishes = {**SIZE, "strength": 0.7, "height": 32, "width": 64}
        expected = oracle.generate(f"a painting of {name}", seed=1, images=[fitted], **wishes)
        torch.testing.assert_close(studio.ends[name].output, expected, atol=1e-4, rtol=0)


class GradModes:
    """Whether gradients are on where a pipeline computes something itself: at its steps, and when it encodes a picture.

    Attributes:
        of: By request, in order.
        encoded: What the VAE's encoder made.
    """

    def __init__(self, studio: Studio, patch: pytest.MonkeyPatch) -> None:
        self.of: dict[str, list[bool]] = defaultdict(list)
        self.encoded: list[torch.Tensor] = []
        self._encode = studio.pipe.vae.encode
        patch.setattr(studio.pipe.vae, "encode", self._watch)
        studio.progress = self  # type: ignore[assignment]

    def append(self, progress: tuple[str, Progress]) -> None:
        self.of[progress[0]].append(torch.is_grad_enabled())

    def _watch(self, *args: Any, **kwargs: Any) -> Any:
        encoded = self._encode(*args, **kwargs)
        self.encoded.append(encoded.latent_dist.mean)
        return encoded


@pytest.fixture
def grad_modes(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Studio, GradModes]]:
    """In a thread whose gradients are on."""
    studio = Studio(model)
    with torch.enable_grad():
        yield studio, GradModes(studio, monkeypatch)


def add_change(studio: Studio, name: str, num_inference_steps: int) -> None:
    image = make_image(seed=2).resize((32, 32))
    arguments = {"image": image, "strength": 0.9, "num_inference_steps": num_inference_steps}
    studio.add(name, 1, ZImageImg2ImgPipeline, **arguments)


def test_a_job_that_ends_leaves_gradients_off_in_the_others(grad_modes: tuple[Studio, GradModes]):
    studio, modes = grad_modes
    add_change(studio, "short", 3)
    add_change(studio, "long", 9)
    studio.run()
    assert len(modes.of["long"]) > len(modes.of["short"]) > 0
    assert not any(modes.of["short"] + modes.of["long"])
    assert torch.is_grad_enabled(), "the thread's mode is not theirs"


def test_a_job_that_is_aborted_lets_no_other_keep_a_graph(grad_modes: tuple[Studio, GradModes]):
    """The one that goes on encodes its picture afterwards, outside of any network call."""
    studio, modes = grad_modes
    add_change(studio, "leaves", 3)
    add_change(studio, "stays", 3)
    studio.executor.abort("leaves")
    studio.run()
    assert len(modes.encoded) == 1 and not modes.encoded[0].requires_grad


def test_the_weights_keep_their_dtype_when_another_class_runs_them(model: Path):
    studio = Studio(model, dtype="bfloat16")
    studio.add("changed", 1, ZImageImg2ImgPipeline, image=make_image(seed=2).resize((32, 32)), strength=0.7)
    studio.run()
    assert studio.ends["changed"].error is None
    assert {parameter.dtype for parameter in studio.pipe.transformer.parameters()} == {torch.bfloat16}


def test_what_the_pipeline_refuses_before_its_first_step_is_the_requests_fault(model: Path):
    studio = Studio(model)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("too small a picture")

    studio.pipe.vae.encode = refuse  # after the prompt has been encoded
    studio.add("small", 1, ZImageImg2ImgPipeline, image=make_image(seed=2).resize((32, 32)), strength=0.7)
    studio.run()
    assert studio.ends["small"].is_invalid and "too small" in str(studio.ends["small"].error)


def test_nothing_of_a_job_that_ended_is_kept(studio: Studio):
    """Also before Python looks for cycles: on a device that would be memory that the next job has not got."""
    calls = []
    init = PipelineCall.__init__

    def remember(call: PipelineCall, *args: Any) -> None:
        init(call, *args)
        calls.append(weakref.ref(call.pipe))

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PipelineCall, "__init__", remember)
            studio.add("good")
            studio.add("invalid", height=40)
            studio.add("aborted")
            studio.executor.abort("aborted")
            studio.run()
            studio.clear()
        assert len(calls) == 3 and [call() for call in calls] == [None] * 3
    finally:
        gc.enable()


def test_a_cache_means_one_job_at_a_time(tiny_diffusion: Callable[[str], Path]):
    model = tiny_diffusion("flux")
    studio = Studio(model, cache_backend="first_block_cache", cache_config={"threshold": 0.1})
    for seed in range(2):
        studio.add(f"picture {seed}", seed)
    studio.run()
    assert set(studio.batches) == {1}
    together = [studio.ends[f"picture {seed}"].output for seed in range(2)]
    studio.add("picture 1", 1)
    studio.run()
    torch.testing.assert_close(together[1], studio.ends["picture 1"].output)
