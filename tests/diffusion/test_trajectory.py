# SPDX-License-Identifier: Apache-2.0
"""The steps that a request gets are those of diffusers' own loop, and a trainer finds the same log-probabilities."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    LCMScheduler,
)
from torch.distributions import Normal

from tests.diffusion.tiny_pipelines import build
from vllm_omni import OmniLLM, OmniRequestOutput
from vllm_omni.diffusion.trajectory import StepHook, TrajectoryRecorder, hook_steps
from vllm_omni.errors import InvalidRequestError
from vllm_omni.outputs import Trajectory

SETTINGS: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 4}
RECORDED = {**SETTINGS, "output_format": "np", "return_trajectory": True}
PROMPTS = ["a red cat", "the wind in a tree at night, " * 3, "it"]
TRAJECTORY_BYTES = 2 * 4 * 16 * 4 * 4 * 4
"""Latents and noise of four steps, in float32."""
ATOL = 1e-5


@pytest.fixture(scope="module")
def model(tiny_diffusion: Callable[[str], Path]) -> Path:
    return tiny_diffusion("z_image")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[OmniLLM]:
    limit = {"max_trajectory_bytes": 3 * TRAJECTORY_BYTES - 1}
    with OmniLLM(str(model), dtype="float32", batch_wait_ms=200.0, **limit) as llm:
        yield llm


@pytest.fixture(scope="module")
def pipe(model: Path) -> DiffusionPipeline:
    pipe = DiffusionPipeline.from_pretrained(model, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run_diffusers(
    pipe: DiffusionPipeline, prompt: str, seed: int, stochastic: bool = False, **settings: Any
) -> tuple[list[dict[str, Any]], Any]:
    """Arguments and results of the scheduler's steps in diffusers' loop, and its image.

    Their noise is of the call's generator, which this pipeline does not pass on.
    """
    generator, steps = torch.Generator().manual_seed(seed), []
    scheduler = copy.deepcopy(pipe.scheduler)
    scheduler.register_to_config(stochastic_sampling=stochastic)

    @functools.wraps(scheduler.step)
    def step(model_output: Any, timestep: Any, sample: Any, **kwargs: Any) -> Any:
        result = type(scheduler).step(scheduler, model_output, timestep, sample, generator=generator, **kwargs)
        steps.append({"model_output": model_output, "timestep": timestep, "sample": sample, "result": result[0]})
        return result

    scheduler.step = step
    call = copy.copy(pipe)
    call.scheduler = scheduler
    with torch.no_grad():
        image = call(prompt, generator=generator, output_type="np", **{**SETTINGS, **settings}).images[0]
    return steps, image


def generate(llm: OmniLLM, prompt: str, params: dict[str, Any]) -> OmniRequestOutput:
    (output,) = llm.generate([prompt], [params], use_tqdm=False)
    return output


def assert_equal(trajectory: Trajectory, steps: list[dict[str, Any]]) -> None:
    latents = [*(step["sample"] for step in steps), steps[-1]["result"]]
    torch.testing.assert_close(trajectory.latents, torch.cat(latents), atol=ATOL, rtol=0)
    torch.testing.assert_close(trajectory.timesteps, torch.tensor([float(step["timestep"]) for step in steps]))


def trainer_log_probs(trajectory: Trajectory, steps: list[dict[str, Any]]) -> torch.Tensor:
    """As the docstring of `Trajectory` says; of all steps but the last, which is determined."""
    sigmas = (trajectory.timesteps / 1000)[:-1, None, None, None]
    std = trajectory.std[:-1, None, None, None]
    predicted = torch.cat([step["model_output"] for step in steps])[:-1]
    mean = (1 - std) * (trajectory.latents[:-2] - sigmas * predicted)
    return Normal(mean, std).log_prob(trajectory.latents[1:-1]).mean((1, 2, 3))


@pytest.mark.parametrize("together", [False, True])
def test_stochastic_steps_are_those_of_diffusers(llm: OmniLLM, pipe: DiffusionPipeline, together: bool) -> None:
    params = [RECORDED | {"seed": seed, "stochastic_sampling": True} for seed in range(len(PROMPTS))]
    params[2]["num_inference_steps"] = 6
    params[1]["guidance_scale"] = 2.0
    with ThreadPoolExecutor(len(PROMPTS) if together else 1) as threads:
        outputs = list(threads.map(functools.partial(generate, llm), PROMPTS, params))
    for seed, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        names = ("num_inference_steps", "guidance_scale")
        settings = {name: params[seed][name] for name in names if name in params[seed]}
        steps, image = run_diffusers(pipe, prompt, seed, stochastic=True, **settings)
        (trajectory,) = output.trajectories
        assert_equal(trajectory, steps)
        torch.testing.assert_close(torch.tensor(output.images[0]), torch.tensor(image), atol=1e-4, rtol=0)
        torch.testing.assert_close(trajectory.std[:-1], trajectory.timesteps[1:] / 1000)
        assert trajectory.std[-1] == trajectory.log_probs[-1] == 0
        expected = trainer_log_probs(trajectory, steps)
        torch.testing.assert_close(trajectory.log_probs[:-1], expected, atol=ATOL, rtol=0)
        noise = torch.Generator().manual_seed(seed)
        assert torch.equal(torch.randn(trajectory.latents[0].shape, generator=noise), trajectory.latents[0])
        for drawn in trajectory.noise:
            assert torch.equal(torch.randn(drawn.shape, generator=noise), drawn)


def test_steps_without_noise_are_those_of_diffusers(llm: OmniLLM, pipe: DiffusionPipeline) -> None:
    output = generate(llm, PROMPTS[0], RECORDED | {"seed": [5, 7], "num_outputs_per_prompt": 2})
    assert len(output.images) == len(output.trajectories) == 2
    for seed, trajectory in zip((5, 7), output.trajectories, strict=True):
        assert_equal(trajectory, run_diffusers(pipe, PROMPTS[0], seed)[0])
        assert not trajectory.noise.any() and not trajectory.std.any() and not trajectory.log_probs.any()


def test_noise_of_a_step_is_of_the_seed(llm: OmniLLM) -> None:
    """Recorded or not; and a request that has no trajectory asks for none."""
    params = {**SETTINGS, "output_format": "np", "seed": 3, "stochastic_sampling": True}
    first, again = generate(llm, PROMPTS[0], params), generate(llm, PROMPTS[0], params)
    recorded = generate(llm, PROMPTS[0], params | {"return_trajectory": True})
    other = generate(llm, PROMPTS[0], params | {"seed": 4})
    assert first.trajectories == [] and list(first.multimodal_output) == ["image"]
    assert (first.images[0] == again.images[0]).all() and (first.images[0] == recorded.images[0]).all()
    assert (first.images[0] != other.images[0]).any()
    plain = generate(llm, PROMPTS[0], params | {"stochastic_sampling": False})
    assert (plain.images[0] == generate(llm, PROMPTS[0], params | {"stochastic_sampling": None}).images[0]).all()
    assert (plain.images[0] != first.images[0]).any()


def test_latents_that_are_the_output_end_the_trajectory(llm: OmniLLM) -> None:
    output = generate(llm, PROMPTS[0], RECORDED | {"seed": 3, "output_format": "latent"})
    assert torch.equal(output.trajectories[0].latents[-1], output.images[0])


def test_its_memory_is_bounded(llm: OmniLLM) -> None:
    """Of all outputs of a request: three of them do not fit."""
    (trajectory,) = generate(llm, PROMPTS[0], RECORDED).trajectories
    assert 2 * trajectory.noise.nbytes == TRAJECTORY_BYTES
    words = rf"takes {TRAJECTORY_BYTES} bytes; this stage has {TRAJECTORY_BYTES - 1} for it \(max_trajectory_bytes"
    with pytest.raises(InvalidRequestError, match=words):
        generate(llm, PROMPTS[0], RECORDED | {"num_outputs_per_prompt": 3})


@pytest.fixture(scope="module")
def ddim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OmniLLM, DiffusionPipeline]]:
    pipe = build("StableDiffusionPipeline")
    folder = tmp_path_factory.mktemp("ddim")
    pipe.save_pretrained(folder)
    with OmniLLM(str(folder), dtype="float32") as llm:
        yield llm, pipe


def test_steps_of_ddim(ddim: tuple[OmniLLM, DiffusionPipeline]) -> None:
    """The pipeline looks at the step's signature, to pass its own generator and `eta`."""
    llm, pipe = ddim
    latents: list[torch.Tensor] = []

    def keep(_pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        latents.append(tensors["latents"])
        return {}

    generator = torch.Generator().manual_seed(3)
    pipe(PROMPTS[0], eta=0.7, generator=generator, output_type="np", callback_on_step_end=keep, **SETTINGS)
    output = generate(llm, PROMPTS[0], RECORDED | {"seed": 3, "extra_args": {"eta": 0.7}})
    (trajectory,) = output.trajectories
    torch.testing.assert_close(trajectory.latents[1:], torch.cat(latents), atol=ATOL, rtol=0)
    assert (trajectory.std > 0).all() and trajectory.noise.any()


def test_what_has_no_trajectory_is_refused(ddim: tuple[OmniLLM, DiffusionPipeline]) -> None:
    with pytest.raises(InvalidRequestError, match="DDIMScheduler has no stochastic_sampling; remove it"):
        generate(ddim[0], PROMPTS[0], SETTINGS | {"stochastic_sampling": True})


SHAPE = (1, 3, 4, 4)


def ancestral_std(scheduler: Any, index: int) -> float:
    before, after = scheduler.sigmas[index], scheduler.sigmas[index + 1]
    return float((after**2 * (before**2 - after**2) / before**2) ** 0.5)


def ddim_std(scheduler: Any, index: int) -> float:
    timestep = scheduler.timesteps[index]
    before = timestep - scheduler.config.num_train_timesteps // scheduler.num_inference_steps
    return 0.5 * float(scheduler._get_variance(timestep, before)) ** 0.5


def ddpm_std(scheduler: Any, index: int) -> float:
    timestep = scheduler.timesteps[index]
    return float(scheduler._get_variance(timestep)) ** 0.5 if timestep > 0 else 0.0


def lcm_std(scheduler: Any, index: int) -> float:
    if index + 1 == len(scheduler.timesteps):
        return 0.0
    return float(1 - scheduler.alphas_cumprod[scheduler.timesteps[index + 1]]) ** 0.5


def dpm_std(scheduler: Any, index: int) -> float:
    """Of SDE-DPM-Solver++, whose second steps read the prediction of the one before."""
    (alpha, sigma), (alpha_before, sigma_before) = (
        scheduler._sigma_to_alpha_sigma_t(scheduler.sigmas[at]) for at in (index + 1, index)
    )
    if sigma == 0:
        return 0.0
    step = (alpha / sigma).log() - (alpha_before / sigma_before).log()
    return float(sigma * (1 - (-2 * step).exp()) ** 0.5)


SCHEDULERS: dict[str, tuple[Any, dict[str, Any], Callable[[Any, int], float]]] = {
    "flow": (FlowMatchEulerDiscreteScheduler(stochastic_sampling=True), {}, lambda it, i: float(it.sigmas[i + 1])),
    "ancestral": (EulerAncestralDiscreteScheduler(), {}, ancestral_std),
    "ddim": (DDIMScheduler(), {"eta": 0.5}, ddim_std),
    "ddpm": (DDPMScheduler(), {}, ddpm_std),
    "lcm": (LCMScheduler(), {}, lcm_std),
    "dpm": (DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++"), {}, dpm_std),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_deviations_are_those_of_the_schedule(name: str) -> None:
    scheduler, arguments, std_of = copy.deepcopy(SCHEDULERS[name])
    scheduler.set_timesteps(5)
    expected = [std_of(scheduler, index) for index in range(5)]
    plain, generator = copy.deepcopy(scheduler), torch.Generator().manual_seed(0)
    recorder = TrajectoryRecorder(torch.Generator().manual_seed(1), scheduler, 1 << 20)
    hook_steps(scheduler, recorder)
    sample = torch.randn(SHAPE, generator=generator)
    other, noise = sample, torch.Generator().manual_seed(1)
    for timestep in scheduler.timesteps:
        predicted = torch.randn(SHAPE, generator=generator)
        sample = scheduler.step(predicted, timestep, sample, **arguments).prev_sample
        other = plain.step(predicted, timestep, other, generator=noise, **arguments).prev_sample
        assert torch.equal(sample, other)
    trajectory = recorder.trajectory()
    torch.testing.assert_close(trajectory.std, torch.tensor(expected), atol=1e-6, rtol=1e-5)
    assert torch.equal(trajectory.latents[-1], sample[0])
    for row in range(5):
        std = trajectory.std[row]
        log_prob = Normal(0.0, std).log_prob(std * trajectory.noise[row]).mean() if std > 0 else torch.zeros(())
        torch.testing.assert_close(trajectory.log_probs[row], log_prob, atol=ATOL, rtol=0)


def test_a_copy_of_the_scheduler_steps_by_itself() -> None:
    """Pipelines that make sound beside a video copy theirs. Noise is of one generator, and is not recorded twice."""
    scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    scheduler.set_timesteps(3)
    recorder = TrajectoryRecorder(torch.Generator().manual_seed(1), scheduler, 1 << 20)
    hook_steps(scheduler, recorder)
    copied = copy.deepcopy(scheduler)
    noise = torch.Generator().manual_seed(1)
    for index, timestep in enumerate(scheduler.timesteps[:2]):
        zeros = torch.zeros(SHAPE)
        for one in (scheduler, copied):
            made = one.step(zeros, timestep, zeros, return_dict=False)[0]
            torch.testing.assert_close(made, scheduler.sigmas[index + 1] * torch.randn(SHAPE, generator=noise))
    assert len(recorder.trajectory().noise) == 2
    made = type(scheduler).from_config(scheduler.config)
    made.set_timesteps(3)
    assert made.step(zeros, made.timesteps[0], zeros, return_dict=False)[0].std() > 0


def test_a_learned_deviation_is_refused() -> None:
    scheduler = DDPMScheduler(variance_type="learned_range")
    scheduler.set_timesteps(5)
    hook_steps(scheduler, TrajectoryRecorder(torch.Generator(), scheduler, 1 << 20))
    with pytest.raises(ValueError, match="DDPMScheduler gets the deviation of the noise from the network"):
        scheduler.step(torch.zeros(1, 6, 4, 4), scheduler.timesteps[0], torch.zeros(SHAPE))


def test_each_scheduler_of_diffusers_can_be_hooked() -> None:
    """Its signature, which pipelines look at, stays the same."""
    names = [name for name in dir(diffusers) if name.endswith("Scheduler") and not name.startswith("Flax")]
    found = 0
    for name in names:
        cls = getattr(diffusers, name)
        if isinstance(cls, type) and hasattr(cls, "step") and not getattr(cls, "_backends", None):
            scheduler = cls.__new__(cls)
            hook_steps(scheduler, StepHook(torch.Generator()))
            assert inspect.signature(scheduler.step) == inspect.signature(cls.step.__get__(scheduler)), name
            assert isinstance(scheduler, cls) and type(scheduler).__name__ == name
            assert type(scheduler) == cls  # noqa: E721  # As `BriaPipeline` compares them.
            found += 1
    assert found > 20
