# SPDX-License-Identifier: Apache-2.0
"""Concurrent jobs of a real, tiny pipeline: each gets its own image, whatever happens to the others."""

import functools
import gc
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ZImageImg2ImgPipeline, ZImagePipeline
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.job import DiffusionJob, JobEnd, Progress
from vllm_omni.diffusion.pipeline_call import PipelineCall
from vllm_omni.executor.diffusers_executor import DiffusersPipelineExecutor
from vllm_omni.testing.diffusers_oracle import DiffusersOracle
from vllm_omni.testing.media import make_image
from vllm_omni.worker.gpu_diffusion_model_runner import as_output, check_size

SIZE = {"height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 64}


@pytest.fixture(scope="module")
def model(tiny_diffusion: Callable[[str], Path]) -> Path:
    return tiny_diffusion("z_image")


@pytest.fixture(scope="module")
def oracle(model: Path) -> DiffusersOracle:
    return DiffusersOracle(model)


class Harness:
    """An executor, and what has come out of it.

    Attributes:
        batches: How many jobs computed in each step.
    """

    def __init__(self, model: Path, **config: Any) -> None:
        self.executor = DiffusersPipelineExecutor(str(model), DiTConfig(**config))
        self.executor.start()
        self.pipe = self.executor.runner._pipe
        self.progress: list[tuple[str, Progress]] = []
        self.clear()

    def clear(self) -> None:
        self.batches: list[int] = []
        self.ends: dict[str, JobEnd] = {}
        self.progress.clear()

    def add(self, name: str, seed: int = 0, pipeline_class: type | None = None, **arguments: Any) -> None:
        self.add_job(name, {"prompt": f"a painting of {name}", **SIZE, **arguments}, seed, pipeline_class)

    def add_job(self, name: str, arguments: dict[str, Any], seed: int = 0, pipeline_class: type | None = None) -> None:
        job = DiffusionJob(
            request_id=name,
            index=0,
            pipeline_class=pipeline_class or type(self.pipe),
            arguments=arguments,
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
def open_harness(model: Path) -> Harness:
    return Harness(model)


@pytest.fixture
def harness(open_harness: Harness) -> Iterator[Harness]:
    open_harness.clear()
    yield open_harness
    assert not open_harness.executor.has_work


def check_image(harness: Harness, oracle: DiffusersOracle, name: str, seed: int = 0, **arguments: Any) -> None:
    end = harness.ends[name]
    assert end.error is None
    expected = oracle.generate(f"a painting of {name}", seed=seed, **{**SIZE, **arguments})
    torch.testing.assert_close(end.output, expected, atol=1e-4, rtol=0)


def test_jobs_are_computed_together_and_each_gets_its_own_image(harness: Harness, oracle: DiffusersOracle):
    for seed, name in enumerate(("a cat", "two dogs in the rain", "it")):
        harness.add(name, seed)
    harness.run()
    assert set(harness.batches) == {3}
    for seed, name in enumerate(("a cat", "two dogs in the rain", "it")):
        check_image(harness, oracle, name, seed)


@pytest.mark.slow
def test_a_pipeline_without_a_callback_reports_its_schedulers_steps(tiny_diffusion: Callable[[str], Path]):
    harness = Harness(tiny_diffusion("hunyuan_video_15"), max_frames=5)
    size = {"height": 32, "width": 32, "num_inference_steps": 3, "num_frames": 5}
    for name in ("a cat", "a dog"):
        harness.add_job(name, arguments={"prompt": name, **size})
    harness.run()
    assert harness.steps_of("a cat") == harness.steps_of("a dog") == [0, 1, 2]
    assert [progress.num_steps for _, progress in harness.progress] == [3] * 6


@pytest.mark.slow
def test_a_longer_video_than_the_stage_allows_is_refused_when_the_pipeline_chooses_it(
    tiny_diffusion: Callable[[str], Path],
):
    harness = Harness(tiny_diffusion("ltx2"), max_frames=33)
    size = {"height": 64, "width": 64, "num_inference_steps": 1, "max_sequence_length": 16}
    harness.add_job("a cat", arguments={"prompt": "a cat", **size})
    harness.run()
    end = harness.ends["a cat"]
    assert end.is_invalid and "would make 121 frames; this stage makes at most 33 (max_frames)" in str(end.error)


def test_a_job_joins_the_others_at_their_next_step(harness: Harness, oracle: DiffusersOracle):
    harness.add("first", num_inference_steps=6)
    while not harness.steps_of("first"):
        harness.step()
    harness.add("second", 1, num_inference_steps=2)
    harness.run()
    assert max(harness.batches) == 2
    assert harness.steps_of("first") == list(range(6)) and harness.steps_of("second") == [0, 1]
    check_image(harness, oracle, "first", num_inference_steps=6)
    check_image(harness, oracle, "second", 1, num_inference_steps=2)


def test_a_late_job_catches_up_before_the_others_continue(harness: Harness):
    for seed in range(2):
        harness.add(f"early {seed}", seed)
    harness.step()
    harness.add("late", 2)
    harness.run()
    num_steps = SIZE["num_inference_steps"]
    assert harness.batches.count(3) >= num_steps, "all of its steps are made together with the others'"


def test_each_job_has_its_own_steps_guidance_and_size(harness: Harness, oracle: DiffusersOracle):
    settings = {
        "plain": {"guidance_scale": 0.0},
        "guided": {"guidance_scale": 4.0, "negative_prompt": "grey"},
        "wide": {"width": 64, "num_inference_steps": 2},
    }
    for name, arguments in settings.items():
        harness.add(name, 7, **arguments)
    harness.run()
    for name, arguments in settings.items():
        check_image(harness, oracle, name, 7, **arguments)


def test_weights_that_are_dropped_give_their_memory_back(model: Path, oracle: DiffusersOracle):
    harness = Harness(model)
    harness.add("a cat")
    harness.run()
    weights = [weakref.ref(tensor) for module in harness.executor.runner.networks for tensor in module.parameters()]
    num_bytes = sum(weight().nbytes for weight in weights)
    assert num_bytes > 100_000
    harness.executor.sleep(2)
    assert harness.executor.is_asleep and not any(weight() is not None for weight in weights)
    harness.executor.sleep(1)
    assert not harness.executor.wake_up() and harness.executor.is_asleep
    harness.executor.load_beside(str(model))()
    assert harness.executor.wake_up() and not harness.executor.is_asleep
    networks = harness.executor.runner.networks
    assert sum(tensor.nbytes for module in networks for tensor in module.parameters()) == num_bytes
    harness.clear()
    harness.add("a cat")
    harness.run()
    check_image(harness, oracle, "a cat")


def test_the_number_of_running_jobs_is_limited(model: Path):
    harness = Harness(model, max_batch_size=2)
    for seed in range(5):
        harness.add(f"image {seed}", seed)
    harness.run()
    assert max(harness.batches) == 2 and len(harness.ends) == 5


def test_an_aborted_job_leaves_the_batch_and_the_others_continue(harness: Harness, oracle: DiffusersOracle):
    for seed, name in enumerate(("stays", "leaves")):
        harness.add(name, seed)
    while not harness.steps_of("leaves"):
        harness.step()
    harness.executor.abort("leaves")
    harness.batches.clear()
    harness.run()
    assert harness.steps_of("leaves") == [0], "no further step"
    assert set(harness.batches) == {1} and set(harness.ends) == {"stays"}
    check_image(harness, oracle, "stays")


def test_a_waiting_job_can_be_aborted(harness: Harness):
    harness.add("never")
    harness.executor.abort("never")
    assert not harness.executor.has_work


def test_only_the_job_that_fails_fails(harness: Harness, oracle: DiffusersOracle, monkeypatch: pytest.MonkeyPatch):
    for seed, name in enumerate(("good", "bad", "fine")):
        harness.add(name, seed)
    while not harness.steps_of("bad"):
        harness.step()
    running = next(running for running in harness.executor.runner.running if running.job.request_id == "bad")
    assert running.waiting is not None
    running.waiting.args[0][0].fill_(float("nan"))  # its latents, as the transformer is about to get them
    transformer = harness.pipe.transformer.forward
    compute = transformer._function

    def refuse_nan(x: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if any(image.isnan().any() for image in x):
            raise RuntimeError("not a number")
        return compute(x, *args, **kwargs)

    for running in harness.executor.runner.running:
        monkeypatch.setattr(running, "waiting", _with_function(running.waiting, refuse_nan))
    harness.run()
    assert "not a number" in str(harness.ends["bad"].error) and not harness.ends["bad"].is_invalid
    check_image(harness, oracle, "good", 0)
    check_image(harness, oracle, "fine", 2)


def _with_function(call: Any, function: Callable[..., Any]) -> Any:
    return type(call)(function, call.args, call.kwargs, call.batch, call.layout)


def refuse_above(harness: Harness, most: int, error: Exception) -> list[int]:
    """Makes the transformer raise on larger batches; returns the sizes of all its batches."""
    compute, sizes = harness.pipe.transformer.forward, []

    def refuse(x: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(x) // 2)  # with guidance a batch has each image twice
        if sizes[-1] > most:
            raise error
        return compute(x, *args, **kwargs)

    harness.pipe.transformer.forward = refuse
    return sizes


def check_pictures(harness: Harness, oracle: DiffusersOracle, number: int) -> None:
    """`count` jobs start at once, and each gets its own image."""
    names = [f"image {seed}" for seed in range(number)]
    for seed, name in enumerate(names):
        harness.add(name, seed)
    harness.run()
    for seed, name in enumerate(names):
        check_image(harness, oracle, name, seed)


def test_a_batch_too_large_for_the_memory_is_computed_in_halves(model: Path, oracle: DiffusersOracle):
    harness = Harness(model)
    sizes = refuse_above(harness, 2, torch.OutOfMemoryError("out of memory"))
    check_pictures(harness, oracle, 4)
    assert sizes.count(4) == 1, "a size that did not fit must not be tried at every step"


def test_after_a_batch_cannot_be_split_calls_are_computed_one_by_one(model: Path, oracle: DiffusersOracle):
    harness = Harness(model)
    sizes = refuse_above(harness, 1, RuntimeError("sizes of tensors must match"))
    check_pictures(harness, oracle, 3)
    assert len([size for size in sizes if size > 1]) == 2, "three, and the half with two"


def mix_captions(harness: Harness) -> list[int]:
    """Makes the transformer read the first request's caption for all; returns the sizes of its batches."""
    compute, sizes = harness.pipe.transformer.forward, []

    def mix(x: list[torch.Tensor], t: Any, cap_feats: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(x) // 2)  # guided and unguided
        return compute(x, t, [cap_feats[row % 2] for row in range(len(x))], *args, **kwargs)

    harness.pipe.transformer.forward = mix
    return sizes


def test_a_network_that_mixes_requests_gets_each_alone(
    model: Path, oracle: DiffusersOracle, caplog: pytest.LogCaptureFixture
):
    """It is found when it first makes a difference, and reported once."""
    harness = Harness(model)
    sizes = mix_captions(harness)
    for seed in range(2):  # equal captions: nothing is wrong yet
        harness.add_job(f"{seed}", {"prompt": "a painting of a cat", **SIZE}, seed)
    harness.run()
    assert max(sizes) == 2 and harness.executor.unbatched == []
    sizes.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            names = [
                f"{animal} {'and its shadow ' * index}" for index, animal in enumerate(("a cat", "a dog", "a fox"))
            ]
            for seed, name in enumerate(names):
                harness.add(name, seed)
            harness.run()
            for seed, name in enumerate(names):
                check_image(harness, oracle, name, seed)
    assert sizes.count(3) == 1 and set(sizes) == {1, 3}
    assert harness.executor.unbatched == ["transformer"]
    assert [record.args for record in caplog.records if "gets no more" in record.msg] == [("transformer",)]


def test_each_layout_is_compared_once(model: Path):
    """Requests are at different steps, so that nothing is equal by chance. A larger size is another layout."""
    harness = Harness(model)
    compute, sizes = harness.pipe.transformer.forward, []

    def count(x: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(x) // 2)
        return compute(x, *args, **kwargs)

    harness.pipe.transformer.forward = count
    for width, expected in ((32, [2, 1, 1, 2, 1, 1, 1]), (32, [2, 2, 1]), (64, [2, 1, 1, 2, 1, 1, 1])):
        sizes.clear()
        for steps, name in ((2, "a cat"), (3, "two dogs")):
            harness.add(name, steps, width=width, num_inference_steps=steps)
        harness.run()
        assert sizes == expected


class Louder:
    """An attention processor."""

    def __init__(self, inner: Any, factor: float) -> None:
        self.inner, self.factor = inner, factor

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.factor * self.inner(*args, **kwargs)


class LouderPipeline(ZImagePipeline):
    """With guidance it replaces an attention processor while it runs, as perturbed-attention guidance does: by another
    for each seed."""

    @functools.wraps(ZImagePipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attention = self.transformer.layers[0].attention
        self.before = attention.processor
        result = super().__call__(*args, **kwargs)
        attention.processor = self.before
        return result

    def prepare_latents(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        latents = super().prepare_latents(*args, **kwargs)
        if self.guidance_scale > 1:
            self.transformer.layers[0].attention.processor = Louder(self.before, 4 + 100 * float(latents.mean()))
        return latents


def test_a_pipeline_that_changes_its_networks_has_them_to_itself(
    model: Path, oracle: DiffusersOracle, caplog: pytest.LogCaptureFixture
):
    harness = Harness(model, pipeline_class=f"{__name__}.LouderPipeline")
    pipe = LouderPipeline(**oracle.pipe.components)
    pipe.set_progress_bar_config(disable=True)
    names = ["a cat", "a dog", "a fox", "a hen", "a pig"]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            harness.add("plain", 9, guidance_scale=0.0)
            for seed, name in enumerate(names):
                harness.add(name, seed)
            harness.run()
            check_image(harness, oracle, "plain", 9, guidance_scale=0.0)
            for seed, name in enumerate(names):
                assert harness.ends[name].error is None, harness.ends[name].traceback
                arguments = {"prompt": f"a painting of {name}", **SIZE, "output_type": "np"}
                expected = torch.from_numpy(pipe(**arguments, generator=torch.Generator().manual_seed(seed)).images[0])
                plain = oracle.generate(f"a painting of {name}", seed=seed, **SIZE)
                torch.testing.assert_close(harness.ends[name].output, expected, atol=1e-4, rtol=0)
                assert (expected - plain).abs().max() > 0.01
    assert harness.executor.unbatched == ["transformer"]
    assert [record.args for record in caplog.records if "one request at a time" in record.msg] == [
        ("LouderPipeline", "transformer")
    ]


@pytest.mark.parametrize("is_aborted", [True, False])
def test_what_a_job_has_changed_is_taken_back_when_it_does_not_end(
    model: Path, oracle: DiffusersOracle, is_aborted: bool, monkeypatch: pytest.MonkeyPatch
):
    """Neither a pipeline that is aborted nor one that raises takes it back."""
    harness = Harness(model, pipeline_class=f"{__name__}.LouderPipeline")
    harness.add("loud", 1)
    harness.add("waits", 2, guidance_scale=0.0)
    for _ in range(3):  # the text encoder twice, and a step
        harness.step()
    assert harness.steps_of("loud") == [0] and harness.steps_of("waits") == []
    if is_aborted:
        harness.executor.abort("loud")
    else:
        monkeypatch.setattr(harness.executor._worker, "_compute", lambda batch: [RuntimeError("broken")])
        harness.step()
        monkeypatch.undo()
        assert "broken" in str(harness.ends["loud"].error)
    harness.run()
    check_image(harness, oracle, "waits", 2, guidance_scale=0.0)


HEARD: dict[str, list[torch.Tensor]] = {}


class ListeningPipeline(ZImagePipeline):
    """Reads by a hook what a layer of its text encoder computes, as JoyImage Edit does, and one of its transformer."""

    @functools.wraps(ZImagePipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        heard: list[torch.Tensor] = []
        HEARD[kwargs["prompt"]] = heard

        def listen(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            heard.append(output[0] if isinstance(output, tuple) else output)

        text_layer = self.text_encoder.layers[-1].register_forward_hook(listen)
        with self.transformer.layers[-1].register_forward_hook(listen):
            result = super().__call__(*args, **kwargs)
        text_layer.remove()
        return result


def test_a_pipeline_that_listens_to_its_networks_hears_its_own_request_only(model: Path, oracle: DiffusersOracle):
    harness = Harness(model, pipeline_class=f"{__name__}.ListeningPipeline")
    names = ["a cat", "a dog", "a fox"]  # prompts of one length
    harness.add("plain", 9, ZImagePipeline)
    harness.add("aborted", 9)
    for seed, name in enumerate(names):
        harness.add(name, seed)
    harness.step()
    harness.executor.abort("aborted")
    harness.run()
    check_image(harness, oracle, "plain", 9)
    heard = {name: HEARD.pop(f"a painting of {name}") for name in names}
    pipe = ListeningPipeline(**oracle.pipe.components)
    pipe.set_progress_bar_config(disable=True)
    for seed, name in enumerate(names):
        check_image(harness, oracle, name, seed)
        pipe(prompt=f"a painting of {name}", **SIZE, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(heard[name], HEARD[f"a painting of {name}"], atol=1e-4, rtol=0)
    networks = (harness.pipe.text_encoder, harness.pipe.transformer)
    parts = [part for network in networks for part in network.modules()]
    places = {hook.__module__ for part in parts for hook in part._forward_hooks.values()}
    assert places == {"transformers.utils.output_capturing"}, "what transformers puts there once stays"
    assert harness.executor.unbatched == []


def test_a_job_too_large_for_the_memory_fails_and_the_next_one_works(model: Path, oracle: DiffusersOracle):
    harness = Harness(model)
    compute = harness.pipe.vae.decode

    def small_memory(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if latents.shape[-1] > 4:
            raise torch.OutOfMemoryError("out of memory")
        return compute(latents, *args, **kwargs)

    harness.pipe.vae.decode = small_memory
    harness.add("large", width=64)
    harness.add("small")
    harness.run()
    assert isinstance(harness.ends["large"].error, torch.OutOfMemoryError)
    check_image(harness, oracle, "small")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"height": 40}, "height 40: this pipeline makes multiples of 16; the nearest are 32 and 48"),
        ({"width": 8}, "width 8: this pipeline makes multiples of 16; the nearest is 16"),
        ({"height": 1 << 12, "width": 1 << 12}, "16777216 pixels; this stage makes at most 4194304 (max_pixels)"),
    ],
)
def test_unsupported_sizes_are_refused_before_any_computation(harness: Harness, arguments: Any, words: str):
    harness.add("refused", **arguments)
    harness.run()
    assert harness.ends["refused"].is_invalid
    assert words in str(harness.ends["refused"].error)
    assert not harness.progress


@pytest.mark.parametrize(
    ("of_processor", "patch"), [(8, {"vae_scale_factor": 8, "patch_size": 2}), (16, {"vae_scale_factor": 8}), (16, {})]
)
def test_the_nearest_size_counts_the_patches_of_the_network(of_processor: int, patch: dict[str, int]) -> None:
    pipe: Any = SimpleNamespace(image_processor=VaeImageProcessor(vae_scale_factor=of_processor), **patch)
    with pytest.raises(ValueError, match="height 8: this pipeline makes multiples of 16; the nearest is 16"):
        check_size(pipe, {"height": 8, "width": 16})
    check_size(pipe, {"height": 16, "width": 16})


def test_a_pipeline_that_cuts_its_video_makes_any_number_of_frames() -> None:
    pipe: Any = type("AllegroPipeline", (), {"vae_scale_factor_temporal": 4})()
    check_size(pipe, {"num_frames": 88})
    with pytest.raises(ValueError, match="num_frames 88: this model makes multiples of 4, and one more"):
        check_size(SimpleNamespace(vae_scale_factor_temporal=4), {"num_frames": 88})  # type: ignore[arg-type]


def test_an_array_of_several_is_one_output() -> None:
    """`Cosmos3OmniPipeline` returns the frames of its one video, `MarigoldIntrinsicsPipeline` several pictures."""
    frames = np.random.default_rng(0).random((5, 4, 4, 3), np.float32)
    assert torch.equal(as_output([frames]), torch.from_numpy(frames))
    assert torch.equal(as_output([[frames]]), torch.from_numpy(frames))
    with pytest.raises(TypeError, match="the pipeline returned list where one array was expected"):
        as_output([[frames, frames]])


def test_the_pipelines_default_size_is_limited_too(model: Path):
    harness = Harness(model, max_pixels=512 * 512)
    harness.add("default", height=None, width=None)  # 1024 x 1024
    harness.run()
    assert harness.ends["default"].is_invalid and "max_pixels" in str(harness.ends["default"].error)


def test_an_input_image_is_resized_to_the_output(harness: Harness, oracle: DiffusersOracle):
    """Also where diffusers would fail on it."""
    image = make_image(seed=2).resize((70, 52))
    changes = {"image": image, "strength": 0.7}
    harness.add("given size", 1, ZImageImg2ImgPipeline, **changes, width=64)
    harness.add("own size", 1, ZImageImg2ImgPipeline, **changes, height=None, width=None)
    harness.run()
    fitted = image.resize((64, 32), Image.Resampling.LANCZOS)
    for name in ("given size", "own size"):
        settings = {**SIZE, "strength": 0.7, "height": 32, "width": 64}
        expected = oracle.generate(f"a painting of {name}", seed=1, images=[fitted], **settings)
        torch.testing.assert_close(harness.ends[name].output, expected, atol=1e-4, rtol=0)


class GradModes:
    """Whether gradients are on where a pipeline computes outside of its modules: at its steps, and when it encodes an
    image.

    Attributes:
        of: By request, in order.
        encoded: What the VAE's encoder made.
    """

    def __init__(self, harness: Harness, patch: pytest.MonkeyPatch) -> None:
        self.of: dict[str, list[bool]] = defaultdict(list)
        self.encoded: list[torch.Tensor] = []
        self._encode = harness.pipe.vae.encode
        patch.setattr(harness.pipe.vae, "encode", self._watch)
        harness.progress = self  # type: ignore[assignment]

    def append(self, progress: tuple[str, Progress]) -> None:
        self.of[progress[0]].append(torch.is_grad_enabled())

    def _watch(self, *args: Any, **kwargs: Any) -> Any:
        encoded = self._encode(*args, **kwargs)
        self.encoded.append(encoded.latent_dist.mean)
        return encoded


@pytest.fixture
def grad_modes(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Harness, GradModes]]:
    """In a thread whose gradients are on."""
    harness = Harness(model)
    with torch.enable_grad():
        yield harness, GradModes(harness, monkeypatch)


def add_change(harness: Harness, name: str, num_inference_steps: int) -> None:
    image = make_image(seed=2).resize((32, 32))
    arguments = {"image": image, "strength": 0.9, "num_inference_steps": num_inference_steps}
    harness.add(name, 1, ZImageImg2ImgPipeline, **arguments)


def test_a_job_that_ends_keeps_gradients_off_in_the_others(grad_modes: tuple[Harness, GradModes]):
    harness, modes = grad_modes
    add_change(harness, "short", 3)
    add_change(harness, "long", 9)
    harness.run()
    assert len(modes.of["long"]) > len(modes.of["short"]) > 0
    assert not any(modes.of["short"] + modes.of["long"])
    assert torch.is_grad_enabled(), "the thread's mode is not theirs"


def test_after_an_abort_no_other_job_builds_a_graph(grad_modes: tuple[Harness, GradModes]):
    """The remaining one encodes its image afterwards, outside of any module call."""
    harness, modes = grad_modes
    add_change(harness, "leaves", 3)
    add_change(harness, "stays", 3)
    harness.executor.abort("leaves")
    harness.run()
    assert len(modes.encoded) == 1 and not modes.encoded[0].requires_grad


def test_the_weights_keep_their_dtype_when_another_class_runs_them(model: Path):
    harness = Harness(model, dtype="bfloat16")
    harness.add("changed", 1, ZImageImg2ImgPipeline, image=make_image(seed=2).resize((32, 32)), strength=0.7)
    harness.run()
    assert harness.ends["changed"].error is None
    assert {parameter.dtype for parameter in harness.pipe.transformer.parameters()} == {torch.bfloat16}


def test_a_value_error_before_the_first_step_is_an_invalid_request(model: Path):
    harness = Harness(model)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("too small an image")

    harness.pipe.vae.encode = refuse  # after the prompt has been encoded
    harness.add("small", 1, ZImageImg2ImgPipeline, image=make_image(seed=2).resize((32, 32)), strength=0.7)
    harness.run()
    assert harness.ends["small"].is_invalid and "too small" in str(harness.ends["small"].error)


def test_nothing_of_a_job_that_ended_is_kept(harness: Harness):
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
            harness.add("good")
            harness.add("invalid", height=40)
            harness.add("aborted")
            harness.executor.abort("aborted")
            harness.run()
            harness.clear()
        assert len(calls) == 3 and [call() for call in calls] == [None] * 3
    finally:
        gc.enable()


def test_with_a_cache_a_short_job_passes_a_long_one_and_each_has_its_own(tiny_diffusion: Callable[[str], Path]):
    model = tiny_diffusion("flux")
    harness = Harness(model, cache_backend="first_block_cache", cache_config={"threshold": 0.1})
    harness.add("long", 0, num_inference_steps=12)
    while len(harness.steps_of("long")) < 3:
        assert harness.executor.has_work
        harness.step()
    harness.add("short", 1)
    harness.run()
    assert set(harness.batches) == {1} and list(harness.ends) == ["short", "long"]
    together = dict(harness.ends)
    harness.add("short", 1)
    harness.run()
    harness.add("long", 0, num_inference_steps=12)
    harness.run()
    for name, end in together.items():
        torch.testing.assert_close(end.output, harness.ends[name].output)
