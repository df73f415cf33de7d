# SPDX-License-Identifier: Apache-2.0
"""How the programs for Pipecat run a pipeline."""

from pipecat.frames.frames import EndFrame, Frame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.workers.runner import WorkerRunner


class Sink(FrameProcessor):
    """Keeps the frames that reach the end of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Frame] = []

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        self.frames.append(frame)
        await self.push_frame(frame, direction)


async def run_pipeline(*services: FrameProcessor, frames: list[Frame]) -> list[Frame]:
    """Sends the frames through the services; returns what comes out."""
    sink = Sink()
    worker = PipelineWorker(Pipeline([*services, sink]))
    await worker.queue_frames([*frames, EndFrame()])
    runner = WorkerRunner()
    await runner.add_workers(worker)
    await runner.run()
    return sink.frames
