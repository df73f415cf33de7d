# SPDX-License-Identifier: Apache-2.0
"""The residual codes of a frame: how they are sampled, and whole frames as CUDA graphs.

One graph for each padded batch size, with sampling and without, captured on first use: one launch instead of some
hundreds. It runs the same code as without graphs, on inputs at fixed addresses. This file knows no model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

SAMPLING_TOP_K = 50
"""Residual codes are sampled from the 50 likeliest (fixed by the reference, whatever the talker's own top_k)."""

SAMPLING_TOP_P = 0.8
"""Nucleus of the residual codes, fixed by the reference as well."""


@dataclass(frozen=True, slots=True)
class ResidualSampling:
    """How to sample the residual codes of one frame; greedy requests can be in the same batch.

    Attributes:
        top_p: `[B, 1]` float32; 0 takes the likeliest code.
        noise: `[B, num_code_groups - 1, SAMPLING_TOP_K]` float32, exponentially distributed.
    """

    top_p: torch.Tensor
    noise: torch.Tensor

    def sample(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """`[B, vocab]` logits -> `[B]` ids: top-k, then top-p, then the exponential race."""
        top_k = min(SAMPLING_TOP_K, logits.shape[-1])
        values, ids = logits.float().topk(top_k, dim=-1)  # descending
        probs = values.softmax(-1)
        before = probs.cumsum(-1) - probs  # mass of the likelier codes
        outside = before >= self.top_p
        outside[:, 0] = False
        choice = (probs.masked_fill(outside, 0.0) / self.noise[:, step, :top_k]).argmax(-1, keepdim=True)
        return ids.gather(-1, choice).squeeze(-1)


class Frame(NamedTuple):
    """The residual part of one frame of `B` requests.

    Attributes:
        codes: `[B, num_code_groups - 1]` int64.
        embeds: `[B, hidden]`, the sum of the embeddings of these codes.
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
            like: `[hidden]` on the device, in the dtype of the inputs.
            noise_shape: Of one request's `ResidualSampling.noise`.
            capture: Another one for tests without a GPU.
        """
        self._make_frame = make_frame
        self._capture = capture
        self._hidden = like.new_zeros(max_batch_size, like.shape[0])
        self._first_embeds = torch.zeros_like(self._hidden)
        self._sampling = ResidualSampling(
            top_p=torch.zeros(max_batch_size, 1, dtype=torch.float32, device=like.device),
            noise=torch.ones(max_batch_size, *noise_shape, dtype=torch.float32, device=like.device),
        )
        self._graphs: dict[tuple[int, bool], tuple[Graph, Frame]] = {}

    def __call__(self, hidden: torch.Tensor, first_embeds: torch.Tensor, sampling: ResidualSampling | None) -> Frame:
        """As `MakeFrame`; later calls do not change what it returns."""
        batch_size = hidden.shape[0]
        self._hidden[:batch_size] = hidden
        self._first_embeds[:batch_size] = first_embeds
        if sampling is not None:
            self._sampling.top_p[:batch_size] = sampling.top_p
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
        sampling = ResidualSampling(self._sampling.top_p[:size], self._sampling.noise[:size]) if is_sampled else None
        return self._capture(lambda: self._make_frame(self._hidden[:size], self._first_embeds[:size], sampling))
