# SPDX-License-Identifier: Apache-2.0
"""A denoiser in several processes: each image is that of plain diffusers, and a process that fails fails the stage.

`test_parallel_denoiser.py` runs these tests.
"""

import datetime
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import psutil
import pytest
import torch
from diffusers.models.transformers import FluxTransformer2DModel

from tests.diffusion.tiny_calls import SMALLEST, images_for
from tests.executor.test_diffusers_executor import Harness
from vllm_omni.diffusion import parallel_denoiser
from vllm_omni.diffusion.parallel_denoiser import FollowerError, pack, unpack
from vllm_omni.errors import StageConfigError
from vllm_omni.testing.diffusers_oracle import DiffusersOracle

CPU = torch.device("cpu")
IMPORTS = ["vllm_omni.diffusion.parallel_denoiser", "diffusers.pipelines.auto_pipeline", "transformers.models.auto"]
"""Of a process of the denoiser: most of the time that it takes to start."""
GUIDED = {"negative_prompt": "grey and quiet", "guidance_scale": 3.0}


class ParallelHarness(Harness):
    """
    Attributes:
        oracle: The plain pipeline.
        rows: How many rows rank 0 itself has computed in each call.
    """

    def __init__(self, name: str, model: Path, **config: Any) -> None:
        super().__init__(model, **config)
        self.oracle = DiffusersOracle(model)
        self._name = name
        self.rows: list[int] = []
        self.group = self.executor._worker._ranks._group
        compute = self.group.call

        def record(name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
            leading = next(value for value in (*args, *kwargs.values()) if isinstance(value, (list, torch.Tensor)))
            self.rows.append(len(leading))
            return compute(name, args, kwargs)

        self.group.call = record

    def clear(self) -> None:
        super().clear()
        self.rows = []

    @property
    def follower_ids(self) -> list[int]:
        return [follower.process.pid for follower in self.executor._worker._ranks._followers]

    def check(self, *changes: dict[str, Any]) -> None:
        """Concurrent requests, each with its changes, have the images of the plain pipeline."""
        calls = [{**SMALLEST[self._name], **change} for change in changes]
        images = images_for(self._name)
        for number, call in enumerate(calls):
            image = {"image": images[0]} if images else {}
            self.add_job(f"image {number}", {"prompt": "a red cat, " * (number + 1), **call, **image}, seed=number)
        self.run()
        for number, call in enumerate(calls):
            expected = self.oracle.generate("a red cat, " * (number + 1), seed=number, images=images, **call)
            end = self.ends[f"image {number}"]
            assert end.error is None, end.traceback
            torch.testing.assert_close(end.output, expected, atol=1e-4, rtol=0)


@contextmanager
def started(name: str, model: Path, **config: Any) -> Iterator[ParallelHarness]:
    harness = ParallelHarness(name, model, **config)
    pids = harness.follower_ids
    try:
        with torch.no_grad():
            yield harness
    finally:
        harness.executor.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.fixture(scope="session", autouse=True)
def quick_processes() -> Iterator[None]:
    """Processes of denoisers are forks of one that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    with mock.patch.object(multiprocessing, "get_context", lambda method: context):
        yield


@pytest.fixture(scope="class")
def halves(tiny_diffusion: Callable[[str], Path]) -> Iterator[ParallelHarness]:
    """A pipeline that computes both halves of guidance as one batch, shared by two processes."""
    with started("z_image", tiny_diffusion("z_image"), data_parallel_size=2) as harness:
        yield harness


@pytest.fixture
def shared(halves: ParallelHarness) -> ParallelHarness:
    halves.clear()
    return halves


@pytest.fixture(scope="class")
def tokens(tiny_diffusion: Callable[[str], Path]) -> Iterator[ParallelHarness]:
    """A pipeline whose denoiser's tokens are shared by two processes."""
    with started("flux", tiny_diffusion("flux"), ulysses_degree=2) as harness:
        yield harness


@pytest.fixture
def split(tokens: ParallelHarness) -> ParallelHarness:
    tokens.clear()
    return tokens


class TestRows:
    def test_the_halves_of_guidance_are_computed_in_two_processes(self, shared: ParallelHarness) -> None:
        shared.check({**GUIDED, "num_inference_steps": 3})
        assert shared.rows == [1, 1, 1]

    def test_a_call_with_one_row_is_computed_here(self, shared: ParallelHarness) -> None:
        shared.check({"guidance_scale": 0.0})
        assert shared.rows == [1, 1]

    def test_concurrent_requests_of_several_sizes_share_the_processes(self, shared: ParallelHarness) -> None:
        wide = {"width": 96, "num_inference_steps": 3}
        shared.check(GUIDED, {**GUIDED, "num_inference_steps": 4}, {**GUIDED, **wide}, {"guidance_scale": 0.0})
        assert max(shared.rows) == 2, "four rows of two requests"

    def test_an_aborted_request_leaves_nothing_behind(self, shared: ParallelHarness) -> None:
        shared.add("leaves", **GUIDED)
        while not shared.steps_of("leaves"):
            shared.step()
        shared.executor.abort("leaves")
        shared.check(GUIDED)

    def test_an_error_of_the_other_process_is_the_requests_alone(self, shared: ParallelHarness) -> None:
        """Its half of the batch, the caption without guidance, has features of another size."""
        shared.add("bad", **GUIDED)
        while not shared.steps_of("bad"):
            shared.step()
        (running,) = shared.executor.runner.running
        *_, captions = running.waiting.args
        captions[1] = captions[1][:, :5]
        shared.run()
        assert "rank 1 of the denoiser: RuntimeError" in str(shared.ends["bad"].error)
        shared.check(GUIDED)

    def test_adapters_are_refused(self, shared: ParallelHarness) -> None:
        with pytest.raises(ValueError, match=r"'ink': this stage takes none: its denoiser runs on several devices"):
            shared.executor.runner._adapters.activate("ink", "ink.safetensors", 1.0)


class TestTokens:
    def test_images_of_several_sizes(self, split: ParallelHarness) -> None:
        """Two requests are one batch; the third has an odd number of tokens of the prompt."""
        split.check({}, {}, {"height": 48, "max_sequence_length": 31})
        assert max(split.rows) == 2

    @pytest.mark.parametrize(("side", "words"), [(16, "Cannot shard tensor"), (48, "allgather: invalid tensor size")])
    def test_a_size_that_cannot_be_shared_fails_alone(self, split: ParallelHarness, side: int, words: str) -> None:
        """One token for two processes, and nine, which gloo cannot gather."""
        split.add_job("square", {"prompt": "a", "height": side, "width": side, "num_inference_steps": 2})
        split.run()
        assert words in str(split.ends["square"].error)
        split.check({})


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("stable_diffusion_3", {"data_parallel_size": 2}),
        ("qwen_image", {"data_parallel_size": 2}),
        ("kandinsky5", {"data_parallel_size": 3}),
        ("flux", {"data_parallel_size": 2, "ulysses_degree": 2}),
        ("flux2_klein", {"ulysses_degree": 2}),
        ("qwen_image", {"ulysses_degree": 2}),
        ("qwen_image_edit", {"ulysses_degree": 2}),
        ("wan", {"ulysses_degree": 2}),
        ("wan_i2v", {"ulysses_degree": 2}),
    ],
)
def test_other_pipelines(name: str, config: dict[str, int], tiny_diffusion: Callable[[str], Path]) -> None:
    with started(name, tiny_diffusion(name), **config) as harness:
        harness.check({}, {}, {"num_inference_steps": 3})
        assert harness.rows


class TestFailures:
    """Of processes: each test breaks its own."""

    @pytest.fixture
    def failures(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Grows when a stage would end its process."""
        failures: list[str] = []
        start = Harness.__init__.__globals__["DiffusersPipelineExecutor"].start
        monkeypatch.setattr(
            "vllm_omni.executor.diffusers_executor.DiffusersPipelineExecutor.start",
            lambda executor: start(executor, lambda: failures.append("a worker ended")),
        )
        return failures

    @pytest.mark.parametrize(
        ("config", "breaks"),
        [({}, "receive"), ({}, "send"), ({}, "number"), ({"data_parallel_size": 3}, "receive")],
    )
    def test_an_exchange_that_fails_ends_the_stage(
        self, tiny_diffusion: Callable[[str], Path], failures: list[str], config: dict[str, int], breaks: str
    ) -> None:
        """The other ranks would take the next call for this one, or wait for ever."""
        with started("z_image", tiny_diffusion("z_image"), **{"data_parallel_size": 2, **config}) as harness:
            ranks = harness.executor._worker._ranks
            harness.add("image", **GUIDED)
            while not harness.steps_of("image"):
                harness.step()

            def fail(*args: Any, **kwargs: Any) -> None:
                raise torch.OutOfMemoryError("no memory for the output")

            words = "an exchange with a rank of the denoiser failed: no memory for the output"
            if breaks == "number":
                words = "rank 1 of the denoiser is at another call"
                receive = ranks._followers[0].receive
                ranks._followers[0].receive = lambda: msgspec.structs.replace(receive(), number=0)
            else:
                setattr(harness.group, breaks, fail)
            for message in (words, "the denoiser's processes have ended"):
                with pytest.raises(FollowerError, match=message):
                    harness.run()
        assert failures == ["a worker ended"]

    def test_a_killed_process_ends_the_stage(self, tiny_diffusion: Callable[[str], Path], failures: list[str]) -> None:
        with started("z_image", tiny_diffusion("z_image"), data_parallel_size=2) as harness:
            harness.add("image", **GUIDED)
            while not harness.steps_of("image"):
                harness.step()
            os.kill(harness.follower_ids[0], signal.SIGKILL)
            with pytest.raises(FollowerError, match="rank 1 of the denoiser has ended"):
                harness.run()
        assert failures == ["a worker ended"]

    def test_a_rank_that_fails_alone_ends_the_stage(
        self, tiny_diffusion: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other one waits for it, in the middle of the call."""
        monkeypatch.setattr(parallel_denoiser, "AGREE", datetime.timedelta(seconds=1))
        with started("flux", tiny_diffusion("flux"), ulysses_degree=2) as harness:

            def fail(*args: Any, **kwargs: Any) -> None:
                raise torch.OutOfMemoryError("out of memory")

            harness.group._forwards["transformer"] = fail
            harness.add("image", max_sequence_length=64)
            with pytest.raises(FollowerError, match="one rank of a denoiser failed: OutOfMemoryError: out of memory"):
                harness.run()


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("z_image", {"ulysses_degree": 2}, ["ulysses_degree", "transformer (ZImageTransformer2DModel)", "WanTrans"]),
        ("flux", {"ring_degree": 2}, ["ring_degree", "on a CPU", "use ulysses_degree"]),
        ("flux", {"data_parallel_size": 2, "part": ["vae"]}, ["runs no denoiser"]),
        ("wan", {"ulysses_degree": 3}, ["ulysses_degree: 3 devices cannot share 2 attention heads"]),
        ("flux", {"ulysses_degree": 2, "attention_backend": "_native_math"}, ["attention_backend", "_native_math"]),
    ],
)
def test_unsupported_settings_are_refused_when_the_stage_starts(
    name: str, config: dict[str, Any], words: list[str], tiny_diffusion: Callable[[str], Path]
) -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(StageConfigError) as caught:
        Harness(tiny_diffusion(name), **config)
    assert all(word in str(caught.value) for word in words), caught.value
    assert set(psutil.Process().children(recursive=True)) <= {*before, *_resource_trackers()}


def _resource_trackers() -> list[psutil.Process]:
    """Of multiprocessing, one for each process that starts others."""
    children = psutil.Process().children()
    return [child for child in children if any("resource_tracker" in word for word in child.cmdline())]


class TestMessages:
    @pytest.mark.parametrize("device", [CPU, torch.device("meta")], ids=["its device", "another device"])
    @pytest.mark.parametrize(
        "value",
        [
            torch.arange(6.0).reshape(2, 3).t(),
            torch.tensor(3),
            torch.tensor([7]).expand(1),
            torch.tensor([True, False]),
            torch.full((2,), 1 + 2j),
            torch.zeros(0, 3, dtype=torch.bfloat16),
            torch.ones(3, dtype=torch.bfloat16)[1:],
            [torch.ones(3, dtype=torch.int8), torch.ones(2, dtype=torch.float64), {0: torch.ones(1)}],
            {"shapes": [[(1, 4, 4)]], "dtype": torch.float16, "none": None, "size": torch.Size([2])},
        ],
    )
    def test_values_arrive_as_they_were_sent(self, value: Any, device: torch.device) -> None:
        packed, buffer = pack(value, device)
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=type(packed))
        sizes: list[int] = []

        def receive(size: int) -> torch.Tensor:
            sizes.append(size)
            return buffer

        received = unpack(message, receive)
        if isinstance(value, dict):
            assert received == value
        else:
            torch.testing.assert_close(received, value)
        assert sizes == [len(buffer)]

    def test_an_object_with_a_state_is_refused(self) -> None:
        class Cache:
            pass

        with pytest.raises(TypeError, match="cannot share a Cache"):
            pack(({"kv_cache": Cache()},), CPU)

    def test_a_class_with_a_plan_is_known(self) -> None:
        """The name of diffusers' attribute."""
        assert FluxTransformer2DModel._cp_plan
