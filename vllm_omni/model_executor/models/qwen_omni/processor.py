# SPDX-License-Identifier: Apache-2.0
"""Preprocessing of both thinkers' media: a video and the sound that is read with it are one item of the cache.

vLLM's processor caches what it makes of each item, with the tokens that replace it in the prompt. Those of a video that
is read with its sound alternate with the sound's, and the processor takes no such video without its sound.
"""

import dataclasses
import hashlib
from collections.abc import Mapping

from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.multimodal.processing.processor import BaseMultiModalProcessor, MultiModalProcessingResult


class PairsSoundWithVideo(BaseMultiModalProcessor):
    """Precedes vLLM's processor in the bases."""

    def _get_mm_hashes(self, inputs: ProcessorInputs) -> Mapping[str, list[str]]:
        """vLLM's; a video and its sound each have that of both."""
        hashes = super()._get_mm_hashes(inputs)
        videos, sounds = hashes.get("video", []), hashes.get("audio", [])
        if not _reads_sound_in_video(inputs) or len(videos) != len(sounds):  # vLLM refuses other numbers
            return hashes
        pairs = [
            hashlib.sha256(f"{video} {sound}".encode()).hexdigest() for video, sound in zip(videos, sounds, strict=True)
        ]
        return {**hashes, **{kind: [f"{kind}-{pair}" for pair in pairs] for kind in ("video", "audio") if pairs}}

    def _cached_apply_hf_processor(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext
    ) -> MultiModalProcessingResult:
        """Processes without the cache where it has lost one of a pair."""
        if inputs.cache is not None and _reads_sound_in_video(inputs):
            hashes = self._get_mm_hashes(inputs)
            if inputs.cache.is_cached(hashes.get("video", [])) != inputs.cache.is_cached(hashes.get("audio", [])):
                inputs = dataclasses.replace(inputs, cache=None)
        return super()._cached_apply_hf_processor(inputs, timing_ctx)


def _reads_sound_in_video(inputs: ProcessorInputs) -> bool:
    return bool(inputs.hf_processor_mm_kwargs.get("use_audio_in_video"))
