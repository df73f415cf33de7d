# SPDX-License-Identifier: Apache-2.0
"""What a call of a pipeline has for itself."""

from typing import Any

from diffusers import DDIMScheduler, DiffusionPipeline

from vllm_omni.diffusion.pipeline_call import PipelineCall


class Inner(DiffusionPipeline):
    def __init__(self, scheduler: DDIMScheduler) -> None:
        super().__init__()
        self.register_modules(scheduler=scheduler)


class Combined(DiffusionPipeline):
    """As Kandinsky's: two pipelines, of which one has its scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.register_modules(scheduler=DDIMScheduler())
        self.prior_pipe, self.decoder_pipe = Inner(DDIMScheduler()), Inner(self.scheduler)


def test_pipelines_in_a_pipeline_have_schedulers_of_their_own_in_each_call():
    original: Any = Combined()
    calls = [PipelineCall(original) for _ in range(2)]
    for number, call in enumerate(calls):
        call.pipe.prior_pipe.scheduler.set_timesteps(2 + number)
        call.pipe.decoder_pipe.scheduler.set_timesteps(5 + number)
    for number, call in enumerate(calls):
        assert len(call.pipe.prior_pipe.scheduler.timesteps) == 2 + number
        assert len(call.pipe.scheduler.timesteps) == 5 + number, "one scheduler, as in the original"
    assert len(original.scheduler.timesteps) == len(original.prior_pipe.scheduler.timesteps) == 1000


def test_the_copies_of_an_ended_call_keep_nothing():
    original: Any = Combined()
    call = PipelineCall(original)
    inner = call.pipe.prior_pipe
    call._greenlet = None  # type: ignore[assignment]
    call.close()
    assert vars(inner) == {} and original.prior_pipe.scheduler is not None
