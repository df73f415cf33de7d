# SPDX-License-Identifier: Apache-2.0
"""Whole frames of residual codes as CUDA graphs: a launch instead of some hundreds.

One graph for each padded batch size, with sampling and without, captured when it is first needed. It runs the same
code as without graphs, on inputs at fixed addresses. This file does not know how a frame is made.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from vllm_omni.model_executor.models.qwen3_omni_moe.residual_sampling import Frame, ResidualSampling

MakeFrame = Callable[[torch.Tensor, torch.Tensor, ResidualSampling | None], Frame]


class Graph(Protocol):
    """Work that was recorded and can be done again, on the same memory."""

    def replay(self) -> None: ...


def capture_cuda_graph(work: Callable[[], Frame]) -> tuple[Graph, Frame]:
    """Runs the work and records it. What it returned lies where each replay writes."""
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
    """Stands in for what makes frames. Rows that pad a batch hold what an earlier one left: rows do not meet."""

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
        """As `MakeFrame`; what it returns stays as it is."""
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
        """The next power of two, as far as there are buffers."""
        return min(1 << (batch_size - 1).bit_length(), self._hidden.shape[0])

    def _record(self, size: int, is_sampled: bool) -> tuple[Graph, Frame]:
        sampling = ResidualSampling(self._sampling.top_p[:size], self._sampling.noise[:size]) if is_sampled else None
        return self._capture(lambda: self._make_frame(self._hidden[:size], self._first_embeds[:size], sampling))
