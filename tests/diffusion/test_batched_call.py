# SPDX-License-Identifier: Apache-2.0
"""Which calls are joined, and that each gets what it would have got alone."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput

from tests.simulated_device import DEVICE, SimulatedDevice
from vllm_omni.diffusion.batched_call import (
    ArgumentChangedError,
    CannotSplitError,
    ModuleCall,
    RowParallelFunction,
    SharedTensors,
    compute,
    find_differing,
    find_joinable,
)


def describe(function, *args: Any, **kwargs: Any) -> ModuleCall:
    return ModuleCall.describe(function, args, kwargs, SharedTensors())


def check_joined(function, *arguments: dict[str, Any]) -> None:
    """The calls can be joined, and their outputs are those that they have alone."""
    calls = [describe(function, **kwargs) for kwargs in arguments]
    assert all(find_joinable(calls[0], calls))
    for joined, call in zip(compute(calls), calls, strict=True):
        torch.testing.assert_close(joined, function(**call.kwargs))


def check_apart(function, *arguments: dict[str, Any]) -> None:
    calls = [describe(function, **kwargs) for kwargs in arguments]
    for index, call in enumerate(calls):
        assert find_joinable(call, calls) == [other == index for other in range(len(calls))]


def denoise(hidden_states, timestep=None, img_ids=None, guidance=None, return_dict=False, kwargs=None):
    """Like a transformer: one row for each image, and shared positions."""
    output = hidden_states * 2
    if timestep is not None:
        output = output + timestep.reshape(-1, 1, 1)
    if img_ids is not None:
        output = output + img_ids.sum(-1)[None, :, None]
    return (output,)


def test_rows_are_joined_and_split():
    check_joined(denoise, *({"hidden_states": torch.randn(1, 4, 8), "timestep": torch.rand(1)} for _ in range(3)))


def test_two_rows_of_one_call_stay_together():
    check_joined(denoise, *({"hidden_states": torch.randn(2, 4, 8), "timestep": torch.rand(2)} for _ in range(3)))


def test_a_time_without_rows_is_that_of_each_row():
    check_joined(denoise, *({"hidden_states": torch.randn(2, 4, 8), "timestep": torch.tensor(t)} for t in (0.1, 0.7)))


def test_positions_are_shared_only_where_they_are_equal():
    positions = torch.arange(12.0).reshape(4, 3)
    calls = [{"hidden_states": torch.randn(1, 4, 8), "img_ids": positions.clone()} for _ in range(2)]
    check_joined(denoise, *calls)
    calls[1]["img_ids"] = positions + 1
    check_apart(denoise, *calls)


class Job:
    """A call of a pipeline: it gives tensors without rows to its network, step by step."""

    def __init__(self) -> None:
        self.tensors = SharedTensors()

    def call(self, *shared: torch.Tensor) -> ModuleCall:
        hidden_states = torch.ones(1, 4, 8, device=shared[0].device)
        kwargs = {f"shared{index}": tensor for index, tensor in enumerate(shared)}
        return ModuleCall.describe(denoise, (hidden_states,), kwargs, self.tensors)


def positions() -> torch.Tensor:
    """A new tensor, with the same in it as all others."""
    return torch.arange(12.0).reshape(4, 3)


class TestSharedTensors:
    """Tensors with the same bits are equal: for a network they are the same."""

    @pytest.mark.parametrize(
        ("one", "other", "are_equal"),
        [
            (positions(), positions(), True),
            (positions(), positions().t().contiguous().t(), True),
            (positions(), positions().double(), False),
            (positions(), positions().view(torch.int32), False),
            (torch.zeros(4), -torch.zeros(4), False),
            (torch.full((4,), torch.nan), torch.full((4,), torch.nan), True),
            (positions(), positions().nextafter(torch.tensor(torch.inf)), False),
            (torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16), True),
            (torch.tensor([True, False]), torch.tensor([True, True]), False),
            (torch.full((4,), 1 + 2j), torch.full((4,), 1 + 2j), True),
            (torch.full((4,), 1 + 2j), torch.full((4,), 1 - 2j).conj(), True),
            (torch.empty(0, 3), torch.empty(0, 3), True),
        ],
    )
    def test_bits_are_compared(self, one: torch.Tensor, other: torch.Tensor, are_equal: bool):
        assert find_joinable(Job().call(one), [Job().call(other)]) == [are_equal]
        assert find_joinable(Job().call(other), [Job().call(one)]) == [are_equal]

    def test_a_conjugated_view_differs_from_its_base(self):
        job, numbers = Job(), torch.full((4,), 1 + 2j)
        assert find_joinable(job.call(numbers), [job.call(numbers.conj())]) == [False]

    def test_a_change_in_place_is_seen(self):
        jobs, tensors = [Job(), Job()], [positions(), positions()]
        calls = [job.call(tensor) for job, tensor in zip(jobs, tensors, strict=True)]
        assert find_joinable(calls[0], calls[1:]) == [True]
        tensors[0][1] += 1
        calls = [job.call(tensor) for job, tensor in zip(jobs, tensors, strict=True)]
        assert find_joinable(calls[0], calls[1:]) == [False]
        tensors[1][1] += 1
        calls = [job.call(tensor) for job, tensor in zip(jobs, tensors, strict=True)]
        assert find_joinable(calls[0], calls[1:]) == [True]

    def test_reused_memory_is_not_mistaken_for_the_old_tensor(self):
        """More new tensors than are kept; torch gives the memory of those that are gone to the next ones."""
        first, second = Job(), Job()
        for step in range(200):
            values = {first: float(step), second: step // 2 * 2.0}
            calls = [job.call(torch.full((64,), value)) for job, value in values.items()]
            assert find_joinable(calls[0], calls[1:]) == [step % 2 == 0]

    def test_all_tensors_of_a_call_have_to_be_equal(self):
        others = [Job().call(positions(), positions() + add) for add in (0, 1, 0)]
        assert find_joinable(Job().call(positions(), positions()), others) == [True, False, True]

    def test_one_wait_for_all_comparisons(self, device: SimulatedDevice):
        """Not at every step: neither for tensors that a pipeline gives again, nor for new views of them."""
        jobs = [Job() for _ in range(4)]
        kept = [positions().to(DEVICE) for _ in jobs]
        different = [torch.full((5,), float(index)).to(DEVICE) for index in range(4)]
        jobs[0].call(kept[0])
        assert device.num_waits == 0, "a single call is not compared"
        for _ in range(5):
            calls = [job.call(tensor[:3], tensor) for job, tensor in zip(jobs, kept, strict=True)]
            assert find_joinable(calls[0], calls) == [True] * 4
        assert device.num_waits == 1
        for _ in range(5):
            calls = [job.call(tensor) for job, tensor in zip(jobs, different, strict=True)]
            assert find_joinable(calls[0], calls) == [True, False, False, False]
        assert device.num_waits == 2

    def test_a_tensor_shared_by_two_jobs_is_not_compared(self, device: SimulatedDevice):
        table = positions().to(DEVICE)
        assert find_joinable(Job().call(table[1:]), [Job().call(table[1:])]) == [True]
        assert device.num_waits == 0

    def test_new_tensors_at_every_step_are_one_wait_a_step(self, device: SimulatedDevice):
        jobs = [Job() for _ in range(4)]
        for _ in range(5):
            calls = [job.call(positions().to(DEVICE), positions().to(DEVICE)) for job in jobs]
            assert find_joinable(calls[0], calls) == [True] * 4
        assert device.num_waits == 5


@pytest.mark.parametrize("case", ["rows", "masked"])
def test_joined_on_a_device(case: str, device: SimulatedDevice):
    """Padding and masks are made where the sequences are."""

    def make(length: int) -> dict[str, torch.Tensor]:
        hidden = torch.full((1, 4, 8), float(length)).to(DEVICE)
        if case == "rows":
            return {"hidden_states": hidden, "timestep": torch.tensor(0.5 * length, device=DEVICE)}
        return {"hidden_states": hidden, "encoder_hidden_states": torch.ones(1, length, 8).to(DEVICE)} | {
            "encoder_hidden_states_mask": None if length == 3 else torch.ones(1, length, device=DEVICE).long()
        }

    check_joined(denoise if case == "rows" else attend, *(make(length) for length in (3, 5)))


@pytest.mark.parametrize(
    "other",
    [
        {"hidden_states": torch.randn(1, 9, 8)},
        {"hidden_states": torch.randn(1, 4, 8, dtype=torch.float64)},
        {"hidden_states": torch.randn(2, 4, 8)},
        {"hidden_states": torch.randn(1, 4, 8), "guidance": 2.0},
        {"hidden_states": torch.randn(1, 4, 8), "return_dict": 1},
        {"hidden_states": torch.randn(1, 4, 8), "kwargs": {"scale": 1.0}},
        {"hidden_states": torch.randn(1, 4, 8), "kwargs": {"cache": object()}},
        {"hidden_states": torch.randn(1, 4, 8), "kwargs": {"cache": object()}},
    ],
)
def test_calls_that_differ_are_not_joined(other: dict[str, Any]):
    check_apart(denoise, {"hidden_states": torch.randn(1, 4, 8)}, other)


def test_calls_of_two_functions_are_not_joined():
    x = torch.randn(1, 4, 8)
    assert describe(denoise, x).layout != describe(lambda hidden_states: hidden_states, x).layout


def denoise_lists(x: list[torch.Tensor], t: torch.Tensor, captions: list[torch.Tensor]) -> tuple[list[torch.Tensor]]:
    """Like a transformer that takes lists, with captions of any length."""
    return ([image + time * caption.mean() for image, time, caption in zip(x, t, captions, strict=True)],)


def test_lists_are_joined_whatever_the_length_of_the_captions():
    calls = [
        {"x": [torch.randn(16, 1, 4, 4)], "t": torch.rand(1), "captions": [torch.randn(length, 8)]}
        for length in (3, 7, 1)
    ]
    check_joined(denoise_lists, *calls)


def test_images_of_two_sizes_are_not_joined():
    check_apart(
        denoise_lists,
        *(
            {"x": [torch.randn(16, 1, size, size)], "t": torch.rand(1), "captions": [torch.randn(3, 8)]}
            for size in (4, 8)
        ),
    )


def test_images_of_as_many_pixels_but_another_shape_are_not_joined():
    """A network may take the shapes of all from the first."""
    latents = torch.randn(1, 8, 64)
    check_apart(denoise, *({"hidden_states": latents, "kwargs": [[(1, *shape)]]} for shape in ((2, 4), (4, 2))))
    check_joined(denoise, *({"hidden_states": torch.randn(1, 8, 64), "kwargs": [[(1, 2, 4)]]} for _ in range(2)))


def test_a_list_of_batches_is_not_a_batch():
    def add(hidden_states, residuals):
        return hidden_states + sum(residuals)

    check_joined(
        add, *({"hidden_states": torch.randn(2, 8), "residuals": list(torch.randn(2, 2, 8))} for _ in range(2))
    )


def attend(hidden_states, encoder_hidden_states, encoder_hidden_states_mask=None):
    """Like a transformer that reads a prompt of any length under a mask."""
    mask = encoder_hidden_states_mask
    if mask is None:
        mask = torch.ones(encoder_hidden_states.shape[:2], device=encoder_hidden_states.device)
    text = (encoder_hidden_states * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
    return (hidden_states + text,)


def test_masked_prompts_are_padded():
    calls = [
        {
            "hidden_states": torch.randn(1, 4, 8),
            "encoder_hidden_states": torch.randn(1, length, 8),
            "encoder_hidden_states_mask": mask,
        }
        for length, mask in ((3, None), (5, torch.tensor([[1, 1, 1, 0, 0]])), (5, None))
    ]
    check_joined(attend, *calls)


def test_prompts_without_a_mask_are_not_padded():
    def read(hidden_states, prompt):
        return hidden_states + prompt.sum(1, keepdim=True)

    check_apart(
        read, *({"hidden_states": torch.randn(1, 4, 8), "prompt": torch.randn(1, length, 8)} for length in (3, 5))
    )


class Layer:
    def __init__(self, mode: str | None) -> None:
        self.mode = mode
        self.keys: list[torch.Tensor] = []


class Cache:
    """As pipelines pass it to their networks, which may write to it."""

    def __init__(self, mode: str | None = None) -> None:
        self.layers = [Layer(mode), Layer(mode)]


def denoise_with_cache(hidden_states, cache, other=None):
    for layer in cache.layers:
        if layer.mode == "write":
            layer.keys.append(hidden_states)
    return (hidden_states * 2,)


def with_caches(*caches: Any, **others: Any) -> list[dict[str, Any]]:
    return [{"hidden_states": torch.randn(1, 4, 8), "cache": cache, **others} for cache in caches]


def test_caches_that_nothing_is_in_are_equal():
    check_joined(denoise_with_cache, *with_caches(Cache(), Cache(), Cache()))
    check_apart(denoise_with_cache, *with_caches(Cache(), Cache("write")))


def test_caches_with_tensors_and_objects_that_may_be_anything_are_not():
    caches = [Cache(), Cache()]
    for cache in caches:
        cache.layers[0].keys.append(torch.ones(1))
    check_apart(denoise_with_cache, *with_caches(*caches))
    for make in (lambda: lambda: None, lambda: random.Random(0), torch.nn.Identity, endless_cache):
        check_apart(denoise_with_cache, *(with_caches(Cache(), other=[make()])[0] for _ in range(2)))


def endless_cache() -> Cache:
    cache = Cache()
    cache.layers.append(cache)  # type: ignore[arg-type]
    return cache


def test_a_cache_that_is_written_to_is_not_shared():
    calls = [describe(denoise_with_cache, **kwargs) for kwargs in with_caches(Cache("write"), Cache("write"))]
    with pytest.raises(ArgumentChangedError):
        compute(calls)
    assert calls[0].kwargs["cache"].layers[0].keys == []
    for call in calls:
        compute([call])
        assert call.kwargs["cache"].layers[0].keys == [call.kwargs["hidden_states"]]


def write_to(hidden_states, other, written="hidden_states"):
    """A network that computes in place."""
    {"hidden_states": hidden_states, "other": other}[written].mul_(2)
    return hidden_states + other.sum()


@pytest.mark.parametrize("written", ["hidden_states", "other"])
def test_a_tensor_that_is_written_to_is_found_and_has_not_changed(written: str):
    """Alone, the pipeline would find the change in its own tensor."""
    arguments = [{"hidden_states": torch.ones(1, 4), "other": torch.ones(3), "written": written} for _ in range(2)]
    calls = [describe(write_to, **kwargs) for kwargs in arguments]
    with pytest.raises(ArgumentChangedError):
        compute(calls, copies_shared=True)
    for kwargs, call in zip(arguments, calls, strict=True):
        assert (kwargs["hidden_states"] == 1).all() and (kwargs["other"] == 1).all()
        compute([call])
        assert (kwargs[written] == 2).all()


def test_the_values_that_differ_between_calls_are_found():
    """By position, over all values with rows: tensors, times, lists, masks that only some calls have."""

    def call(state: float, time: float, caption: int, length: int | None):
        mask = None if length is None else torch.ones(1, length, dtype=torch.bool)
        return describe(
            denoise,
            torch.full((1, 4, 8), state),
            timestep=torch.tensor(time),
            img_ids=torch.ones(3, 3),
            encoder_hidden_states=torch.zeros(1, length or 2, 5),
            encoder_hidden_states_mask=mask,
            kwargs={"shapes": [(1, 4)], "residuals": (torch.full((1, 2), float(caption)),)},
        )

    plain = call(0.0, 0.5, 1, 2)
    for other, expected in (
        (call(0.0, 0.5, 1, 2), set()),
        (call(1.0, 0.5, 1, 2), {0}),
        (call(-0.0, 0.7, 1, 2), {0, 1}),
        (call(0.0, 0.5, 1, 3), {2, 3}),
        (call(0.0, 0.5, 1, None), {3}),
        (call(0.0, 0.5, 2, 2), {4}),
    ):
        assert plain.layout == other.layout
        assert find_differing([plain, plain, other], set()) == find_differing([other, plain], set()) == expected
        assert find_differing([plain, other], expected) == set()
    captions = [describe(denoise, [torch.ones(3, 4)], [torch.ones(length, 2)]) for length in (5, 7)]
    assert find_differing(captions, set()) == {1}


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("num_calls", [2, 3])
def test_batches_in_a_list_are_split_also_if_there_is_one_for_each_row(kind: type, num_calls: int):
    """As those of a ControlNet, whose number depends on its layers."""

    def control(x):
        return kind([x + index for index in range(4)]), x

    arguments = [{"x": torch.randn(2, 3)} for _ in range(num_calls)]
    check_joined(control, *arguments)
    check_shares(control, 2, [num_calls, num_calls], *arguments)


def test_a_list_of_images_is_split_by_its_items_whatever_size_they_have():
    def double(x: list[torch.Tensor]) -> list[torch.Tensor]:
        return [2 * image for image in x]

    arguments = [{"x": [torch.randn(4, 2), torch.randn(4, 2)]} for _ in range(2)]  # four rows in all
    check_joined(double, *arguments)
    check_shares(double, 2, [2, 2], *arguments)


@dataclass
class OutputWithCache(ModelOutput):
    """As of transformers 5.24."""

    last_hidden_state: Any = None
    cache: Any = None
    hidden_states: Any = None


@pytest.mark.parametrize(("kind", "cache"), [(BaseModelOutputWithPast, "past_key_values"), (OutputWithCache, "cache")])
def test_the_output_of_an_encoder_is_split_and_its_cache_is_left_out(kind: Any, cache: str):
    def encode(input_ids):
        states = input_ids[..., None].float()
        return kind(last_hidden_state=states, hidden_states=(states, states + 1), **{cache: object()})

    first, second = compute([describe(encode, input_ids=torch.tensor([[i, 2]])) for i in (1, 5)])
    assert first.last_hidden_state.flatten().tolist() == [1, 2]
    assert [states.flatten().tolist() for states in second.hidden_states] == [[5, 2], [6, 3]]
    assert getattr(second, cache) is None


def test_a_single_call_s_output_is_unchanged():
    output = object()
    assert compute([describe(lambda x: output, torch.randn(1))]) == [output]


@pytest.mark.parametrize("output", [object(), torch.randn(5), torch.tensor(1.0), [1, 2, 3]])
def test_an_output_that_cannot_be_split_raises(output: Any):
    calls = [describe(lambda x: (output,), torch.randn(1, 3))] * 2
    with pytest.raises(CannotSplitError):
        compute(calls)


class Shares(RowParallelFunction):
    """Computes shares one after the other.

    Attributes:
        leading: The first argument of each share.
    """

    def __init__(self, function: Any, num_shares: int) -> None:
        self.num_shares = num_shares
        self.leading: list[Any] = []
        self._function = function

    def compute_shares(self, shares: Any) -> list[Any]:
        self.leading = [next(iter((*args, *kwargs.values()))) for args, kwargs in shares]
        return [self._function(*args, **kwargs) for args, kwargs in shares]


def check_shares(function: Any, num_shares: int, sizes: list[int], *arguments: dict[str, Any]) -> None:
    """Shares of so many rows are computed, and each call gets what it gets alone."""
    shares = Shares(function, num_shares)
    calls = [describe(shares, **kwargs) for kwargs in arguments]
    for output, kwargs in zip(compute(calls), arguments, strict=True):
        torch.testing.assert_close(output, function(**kwargs))
    assert [len(leading) for leading in shares.leading] == sizes


@pytest.mark.parametrize(
    ("num_shares", "num_rows", "num_calls", "sizes"),
    [
        (2, 2, 1, [1, 1]),
        (2, 1, 1, [1]),
        (3, 2, 1, [1, 1]),
        (2, 1, 3, [1, 2]),
        (2, 2, 2, [2, 2]),
        (4, 2, 3, [1, 2, 1, 2]),
    ],
)
def test_rows_are_shared_evenly(num_shares: int, num_rows: int, num_calls: int, sizes: list[int]) -> None:
    shared = torch.arange(12.0).reshape(4, 3)
    calls = [
        {
            "hidden_states": torch.randn(num_rows, 4, 8),
            "timestep": torch.rand(num_rows),
            "img_ids": shared,
        }
        for _ in range(num_calls)
    ]
    check_shares(denoise, num_shares, sizes, *calls)


def test_a_time_without_rows_is_that_of_each_share() -> None:
    calls = [{"hidden_states": torch.randn(2, 4, 8), "timestep": torch.tensor(time)} for time in (0.1, 0.7)]
    check_shares(denoise, 2, [1, 1], calls[0])
    check_shares(denoise, 2, [2, 2], *calls)


def test_shared_values_with_as_many_entries_as_there_are_rows_are_not_split() -> None:
    """Two calls of one row: the positions of two tokens are for both."""

    def add(hidden_states: torch.Tensor, img_ids: torch.Tensor) -> torch.Tensor:
        return hidden_states + img_ids.sum(0)[None, None]

    calls = [{"hidden_states": torch.randn(1, 4, 3), "img_ids": torch.ones(2, 3)} for _ in range(2)]
    check_shares(add, 2, [1, 1], *calls)


def test_masks_and_nested_values_are_shared_with_their_rows() -> None:
    def read(hidden_states, encoder_hidden_states, encoder_hidden_states_mask, shapes, kwargs):
        mask = encoder_hidden_states_mask
        weights = 1.0 if mask is None else mask[..., None].float()
        text = (encoder_hidden_states * weights).sum(1, keepdim=True)
        areas = torch.tensor([float(shape[0][1] * shape[0][2]) for shape in shapes])
        return {"sample": hidden_states + text + areas[:, None, None], "scale": kwargs["scale"][0] * areas}

    calls = [
        {
            "hidden_states": torch.randn(2, 4, 8),
            "encoder_hidden_states": torch.randn(2, length, 8),
            "encoder_hidden_states_mask": None if length == 5 else torch.ones(2, length, dtype=torch.long),
            "shapes": [[(1, 4, 4)], [(1, 4, 4)]],
            "kwargs": {"scale": (torch.rand(2),)},
        }
        for length in (5, 3)
    ]
    check_shares(read, 3, [1, 1, 2], *calls)
    check_shares(read, 2, [1, 1], calls[0])


def test_images_in_lists_are_shared() -> None:
    def double(x: list[torch.Tensor], caption: list[torch.Tensor]) -> tuple[list[torch.Tensor]]:
        return ([2 * image + text.sum() for image, text in zip(x, caption, strict=True)],)

    calls = [
        {"x": [torch.randn(3, 4, 4), torch.randn(3, 4, 4)], "caption": [torch.randn(length), torch.randn(2)]}
        for length in (5, 3)
    ]
    check_shares(double, 2, [2, 2], *calls)


def test_an_output_of_a_share_without_rows_raises() -> None:
    with pytest.raises(CannotSplitError, match="a float in the output of a share"):
        compute([describe(Shares(lambda x: 1.0, 2), torch.randn(2, 3))])
