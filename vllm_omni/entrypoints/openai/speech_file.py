# SPDX-License-Identifier: Apache-2.0
"""The file of speech of one request, encoded while the final stage makes its audio."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from http import HTTPStatus

import numpy as np
import torch

from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.entrypoints.openai.audio_formats import (
    AUDIO_FORMATS,
    DEFAULT_SAMPLE_RATE,
    AudioEncoder,
    BrokenAudioError,
    count_channels,
    first_clip,
)
from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError
from vllm_omni.entrypoints.openai.speech_request import SpeechSettings
from vllm_omni.events import ARSegmentEvent, CompletedEvent, OmniEvent
from vllm_omni.outputs import OmniRequestOutput

logger = logging.getLogger("vllm.omni.server")


class SpeechFile:
    """
    Attributes:
        is_streamed: The file is sent while it is encoded. Audio of a diffusion stage comes as a whole.
        output: The pipeline's, after the last event of a request.
        seconds: Of the sound that was encoded.
    """

    output: OmniRequestOutput

    def __init__(
        self, stage: OmniStageConfig, request: SpeechSettings, speed: float, *, stream: bool, is_joined: bool = False
    ) -> None:
        """
        Args:
            stage: The final stage that makes the audio.
            request: Has the file's format, sample rate and volume.
            speed: Factor of the audio's speed.
            is_joined: It has the sounds of several requests, one after the other, and is never whole.
        """
        self.is_streamed = stream and stage.kind.streams_output
        self._stage = stage
        self._request = request
        self._speed = speed
        self._is_whole = not (self.is_streamed or is_joined)
        self._has_samples = False  # Of the request whose events come.
        self._encoder: AudioEncoder | None = None
        self.seconds = 0.0

    @property
    def media_type(self) -> str:
        return AUDIO_FORMATS[self._request.response_format]

    @property
    def sample_rate(self) -> int:
        """Known with the file's first bytes, as `num_channels`."""
        assert self._encoder is not None
        return self._encoder.sample_rate

    @property
    def num_channels(self) -> int:
        assert self._encoder is not None
        return self._encoder.num_channels

    async def parts(self, events: AsyncGenerator[OmniEvent, None]) -> AsyncGenerator[bytes, None]:
        """The file's bytes as they are encoded; no part is empty.

        Raises:
            OmniError, OmniHTTPError: It failed.
        """
        async with aclosing(events):
            async for event in events:
                if data := await self.add(event):
                    yield data
            if rest := await self.finish():
                yield rest

    async def add(self, event: OmniEvent) -> bytes:
        """The bytes that are ready with an event of a request; may be empty. Raises as `parts`."""
        samples, rate = self._samples(event)
        data = b""
        if samples.size:
            self._has_samples = True
            data = await self._encode(samples, rate)
            self.seconds += samples.shape[-1] / rate / self._speed
        if isinstance(event, CompletedEvent):
            if not self._has_samples:
                raise OmniHTTPError("the model made no audio for this input", HTTPStatus.INTERNAL_SERVER_ERROR)
            (self.output,), self._has_samples = event.outputs, False
        return data

    async def finish(self) -> bytes:
        """The rest of the file; may be empty."""
        assert self._encoder is not None
        return await self._encoder.finish_async()

    async def whole(self, events: AsyncGenerator[OmniEvent, None]) -> bytes:
        """The file, when it is complete. Raises as `parts`."""
        async with aclosing(self.parts(events)) as parts:
            return b"".join([part async for part in parts])

    def _samples(self, event: OmniEvent) -> tuple[np.ndarray, int]:
        """The samples of an event, float32 `[n]` or `[channels, n]`, and their sample rate."""
        tensors: Mapping[str, torch.Tensor] = {}
        rate = self._stage.sample_rate
        if isinstance(event, ARSegmentEvent) and event.stage_id == self._stage.stage_id:
            tensors = event.multimodal_output
        elif isinstance(event, CompletedEvent) and not self._has_samples:  # Nothing was streamed: it has all samples.
            (output,) = event.outputs
            tensors, rate = output.multimodal_output, output.sample_rate
        return first_clip(tensors.get("audio", torch.empty(0))), rate or DEFAULT_SAMPLE_RATE

    async def _encode(self, samples: np.ndarray, rate: int) -> bytes:
        try:
            if self._encoder is None:
                self._encoder = AudioEncoder(
                    self._request.response_format,
                    rate,
                    self._speed,
                    num_channels=count_channels(samples),
                    is_whole=self._is_whole,
                    file_rate=self._request.sample_rate,
                    volume=self._request.volume_multiplier,
                )
            return await self._encoder.encode_async(samples)
        except BrokenAudioError as error:
            logger.error("a stage made broken audio: %s", error)
            raise OmniHTTPError("the model made broken audio", HTTPStatus.INTERNAL_SERVER_ERROR) from error
