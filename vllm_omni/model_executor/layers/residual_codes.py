# SPDX-License-Identifier: Apache-2.0
"""The residual codes of a frame: how they are sampled, and whole frames as CUDA graphs.

One graph for each padded batch size, with sampling and without, captured on first use: one launch instead of some
hundreds. It runs the same code as without graphs, on inputs at fixed addresses. This file knows no model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from vllm.sampling_params import SamplingParams, SamplingType

from vllm_omni.model_executor.feedback_buffers import with_room_for


class ResidualFilter(NamedTuple):
    """Limits what the residual codes of a request are sampled from, as HF's logits warpers in this order.

    Attributes:
        top_k: At most `MAX_TOP_K`.
    """

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0

    @classmethod
    def from_params(cls, params: SamplingParams) -> "ResidualFilter":
        """Takes the filter of the request's first codes, with at most `MAX_TOP_K`."""
        top_k = min(params.top_k, MAX_TOP_K) if params.top_k > 0 else MAX_TOP_K
        return cls(params.temperature, top_k, params.top_p)


MAX_TOP_K = 50
"""Residual codes are never sampled from more than the 50 likeliest: the default of all references."""

GREEDY = ResidualFilter(top_p=0.0)


@dataclass(frozen=True, slots=True)
class ResidualSampling:
    """How to sample the residual codes of one frame; greedy requests can be in the same batch.

    Attributes:
        filters: `[B, 3]` float32, a `ResidualFilter` for each request; `top_p` 0 takes the likeliest code.
        noise: `[B, num_codes - 1, MAX_TOP_K]` float32, exponentially distributed.
    """

    filters: torch.Tensor
    noise: torch.Tensor

    def sample(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """`[B, vocab]` logits -> `[B]` ids: top-k, then top-p, then the exponential race."""
        temperature, top_k, top_p = self.filters.split(1, dim=-1)
        size = min(MAX_TOP_K, logits.shape[-1])
        values, ids = (logits.float() / temperature).topk(size, dim=-1)  # descending
        ranks = torch.arange(size, dtype=torch.float32, device=logits.device)
        probs = values.masked_fill(ranks >= top_k, float("-inf")).softmax(-1)
        before = probs.cumsum(-1) - probs  # mass of the likelier codes
        outside = before >= top_p
        outside[:, 0] = False
        choice = (probs.masked_fill(outside, 0.0) / self.noise[:, step, :size]).argmax(-1, keepdim=True)
        return ids.gather(-1, choice).squeeze(-1)

    def sample_all(self, logits: torch.Tensor) -> torch.Tensor:
        """`[B, num_codes - 1, vocab]` logits -> `[B, num_codes - 1]` ids, each as `sample`."""
        num_steps = logits.shape[1]
        flat = ResidualSampling(self.filters.repeat_interleave(num_steps, 0), self.noise.flatten(0, 1)[:, None])
        return flat.sample(logits.flatten(0, 1), 0).unflatten(0, (-1, num_steps))


_RESIDUAL_SEED = 0x5EED0FC0DE


class ResidualSampler:
    """How each slot's residual codes are sampled: greedily for a greedy request, by a generator for one with a seed."""

    def __init__(self, num_steps: int, num_slots: int, device: torch.device) -> None:
        """
        Args:
            num_steps: Residual codes of a frame.
        """
        self._shape = (num_steps, MAX_TOP_K)
        self._filters = torch.ones(num_slots, len(GREEDY), dtype=torch.float32, device=device)
        self._sampled: set[int] = set()
        self._generators: dict[int, torch.Generator] = {}

    def begin(self, slot: int, params: SamplingParams, residual: ResidualFilter) -> None:
        self.end(slot)  # of a request that did not begin, because something later raised
        self._filters = with_room_for(self._filters, slot)
        is_greedy = params.sampling_type == SamplingType.GREEDY
        self._filters[slot] = torch.tensor(GREEDY if is_greedy else residual)
        if not is_greedy:
            self._sampled.add(slot)
        if params.sampling_type == SamplingType.RANDOM_SEED:
            assert params.seed is not None
            # Not the seed itself: vLLM's sampler draws the first code from a generator with it.
            generator = torch.Generator(self._filters.device).manual_seed(params.seed ^ _RESIDUAL_SEED)
            self._generators[slot] = generator

    def end(self, slot: int) -> None:
        self._sampled.discard(slot)
        self._generators.pop(slot, None)

    def draw(self, slots: torch.Tensor) -> ResidualSampling | None:
        """Draws the noise of one frame for each of `[N]` slots; None while all requests are greedy."""
        if not self._sampled:
            return None
        noise = self._filters.new_empty(slots.shape[0], *self._shape).exponential_()
        if self._generators:
            for row, slot in zip(noise, slots.tolist(), strict=True):
                if slot in self._generators:
                    row.exponential_(generator=self._generators[slot])
        return ResidualSampling(filters=self._filters[slots], noise=noise)


class Frame(NamedTuple):
    """The residual part of one frame of `B` requests.

    Attributes:
        codes: `[B, num_codes - 1]` int64.
        embeds: `[B, input_size]`, the sum of the embeddings of these codes.
    """

    codes: torch.Tensor
    embeds: torch.Tensor


MakeFrame = Callable[[torch.Tensor, torch.Tensor, ResidualSampling | None], Frame]


class Graph(Protocol):
    """Recorded work that can be repeated on the same memory."""

    def replay(self) -> None: ...


def capture_cuda_graph(work: Callable[[], Frame]) -> tuple[Graph, Frame]:
    """Runs the work and records it. Each replay writes into the frame that is returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # so that nothing is set up, chosen or allocated for the first time in the recording
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process may use the device meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        frame = work()
    return graph, frame


class FrameGraphs:
    """Replaces a `MakeFrame`. Rows that pad a batch hold values of an earlier one: rows do not affect each other."""

    def __init__(
        self,
        make_frame: MakeFrame,
        max_batch_size: int,
        like: torch.Tensor,
        noise_shape: tuple[int, int],
        capture: Callable[[Callable[[], Frame]], tuple[Graph, Frame]] = capture_cuda_graph,
    ) -> None:
        """
        Args:
            like: `[input_size]` on the device, in the dtype of the inputs.
            noise_shape: Of one request's `ResidualSampling.noise`.
            capture: Another one for tests without a GPU.
        """
        self._make_frame = make_frame
        self._capture = capture
        self._hidden = like.new_zeros(max_batch_size, like.shape[0])
        self._first_embeds = torch.zeros_like(self._hidden)
        self._sampling = ResidualSampling(
            filters=torch.ones(max_batch_size, len(GREEDY), dtype=torch.float32, device=like.device),
            noise=torch.ones(max_batch_size, *noise_shape, dtype=torch.float32, device=like.device),
        )
        self._graphs: dict[tuple[int, bool], tuple[Graph, Frame]] = {}

    def __call__(self, hidden: torch.Tensor, first_embeds: torch.Tensor, sampling: ResidualSampling | None) -> Frame:
        """Makes a frame as `MakeFrame`; later calls do not change what it returns."""
        batch_size = hidden.shape[0]
        self._hidden[:batch_size] = hidden
        self._first_embeds[:batch_size] = first_embeds
        if sampling is not None:
            self._sampling.filters[:batch_size] = sampling.filters
            self._sampling.noise[:batch_size] = sampling.noise
        key = (self._padded(batch_size), sampling is not None)
        if key not in self._graphs:
            self._graphs[key] = self._record(*key)
        graph, frame = self._graphs[key]
        graph.replay()
        return Frame(frame.codes[:batch_size].clone(), frame.embeds[:batch_size].clone())

    def _padded(self, batch_size: int) -> int:
        """The next power of two, limited by the size of the buffers."""
        return min(1 << (batch_size - 1).bit_length(), self._hidden.shape[0])

    def _record(self, size: int, is_sampled: bool) -> tuple[Graph, Frame]:
        sampling = ResidualSampling(self._sampling.filters[:size], self._sampling.noise[:size]) if is_sampled else None
        return self._capture(lambda: self._make_frame(self._hidden[:size], self._first_embeds[:size], sampling))
