# SPDX-License-Identifier: Apache-2.0
"""Graphs of frames, with recordings that run their work again: which are made, and what they read and return."""

from collections.abc import Callable

import torch

from vllm_omni.model_executor.layers.residual_codes import Frame, FrameGraphs, ResidualSampling

MAX_BATCH, HIDDEN, NOISE = 6, 4, (2, 3)


class Recording:
    """Does on replay what a CUDA graph does: the same work on the same memory, results included."""

    def __init__(self, work: Callable[[], Frame]) -> None:
        self.work = work
        self.frame = work()

    def replay(self) -> None:
        made = self.work()
        for target, source in zip(self.frame, made, strict=True):
            target.copy_(source)


def make_frame(hidden: torch.Tensor, first_embeds: torch.Tensor, sampling: ResidualSampling | None) -> Frame:
    codes = hidden.sum(1)
    if sampling is not None:
        codes = codes + sampling.filters.sum(1) + sampling.noise.sum((1, 2))
    return Frame(codes[:, None].long(), hidden + 2 * first_embeds)


class Setting:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.graphs = FrameGraphs(make_frame, MAX_BATCH, torch.zeros(HIDDEN), NOISE, self._capture)

    def _capture(self, work: Callable[[], Frame]) -> tuple[Recording, Frame]:
        recording = Recording(work)
        self.sizes.append(len(recording.frame.embeds))
        return recording, recording.frame


def inputs(batch_size: int, sampled: bool) -> tuple[torch.Tensor, torch.Tensor, ResidualSampling | None]:
    sampling = ResidualSampling(torch.rand(batch_size, 3), 10 * torch.rand(batch_size, *NOISE)) if sampled else None
    return 10 * torch.randn(batch_size, HIDDEN), torch.randn(batch_size, HIDDEN), sampling


def test_frames_with_graphs_equal_those_without() -> None:
    torch.manual_seed(0)
    setting, made = Setting(), []
    for batch_size in (3, 1, 6, 3, 2, 4, 5, 1):
        for sampled in (False, True):
            given = inputs(batch_size, sampled)
            made.append((setting.graphs(*given), make_frame(*given)))
    for ours, expected in made:  # after all have run: nothing that was returned has changed
        assert torch.equal(ours.codes, expected.codes)
        assert torch.equal(ours.embeds, expected.embeds)


def test_batches_are_padded_so_that_there_are_few_graphs() -> None:
    setting = Setting()
    for _ in range(2):
        for batch_size in range(1, MAX_BATCH + 1):
            setting.graphs(*inputs(batch_size, sampled=False))
    assert setting.sizes == [1, 2, 4, MAX_BATCH]
    setting.graphs(*inputs(3, sampled=True))
    assert setting.sizes[4:] == [4]
