# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni's vocoder: turns the codes of whole requests, or of windows of them, into waveforms, in one step.

The waveform of a whole request equals the reference's, for equal noise, whatever else is in the batch.

This file knows no talker and no engine.
"""

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_omni.model_executor.layers.vocoder import Vocoder
from vllm_omni.model_executor.models.qwen2_5_omni.speakers import load_speakers
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav_bigvgan import BigVGAN
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav_dit import DiTSolver
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav_windows import CodeWindow, VocoderState, WindowPlanner

MAX_BATCH_FRAMES = 16384
"""Frames of the spectrogram in one batch: bounds the memory of the widest activation."""

ACTIVATION_COPIES = 12
"""Tensors of the size of the waveform times its channels that are needed at the same time, an upper estimate."""

MAX_BATCH_FRAMES_CPU = 240
"""Two first windows of the stage configuration, which take five sixths of the time of one after the other. A batch of
more is hardly faster on a CPU, and the first of them has to wait."""

STATE = "vocoder"
"""Key of the `VocoderState` in the request's `state`."""


class OmniQwen2_5OmniToken2Wav(Vocoder):
    checkpoint_prefix: ClassVar[str] = "token2wav."

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config = cast(Qwen2_5OmniToken2WavConfig, model_config.hf_config)
        # As in the reference, whatever the other stages' dtype: the solver adds small differences 36 times.
        self.token2wav = Qwen2_5OmniToken2WavModel._from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.speakers = load_speakers(model_config.model, model_config.revision)
        self.max_batch_frames = MAX_BATCH_FRAMES_CPU if current_platform.is_cpu() else MAX_BATCH_FRAMES

    @cached_property
    def solver(self) -> DiTSolver:
        return DiTSolver(self.token2wav.code2wav_dit_model, self.speakers)

    @cached_property
    def bigvgan(self) -> BigVGAN:
        return BigVGAN(self.token2wav.code2wav_bigvgan_model)

    @cached_property
    def planner(self) -> WindowPlanner:
        dit = self.token2wav.code2wav_dit_model
        samples_per_frame = self.bigvgan.samples_per_frame
        return WindowPlanner(dit.repeats, dit.mel_dim, dit.block_size, samples_per_frame, self.solver.device)

    @property
    def batch_rows(self) -> int:
        """See `SupportsBatchSize`."""
        return self.max_batch_frames // self.token2wav.code2wav_dit_model.repeats

    def activation_bytes(self, num_rows: int) -> int:
        """See `SupportsActivationEstimate`. The last level of BigVGAN is the widest; the solver takes less."""
        bigvgan = self.token2wav.code2wav_bigvgan_model.config
        frames = min(num_rows * self.token2wav.code2wav_dit_model.repeats, MAX_BATCH_FRAMES)
        channels = bigvgan.upsample_initial_channel // 2 ** len(bigvgan.upsample_rates)
        return ACTIVATION_COPIES * frames * math.prod(bigvgan.upsample_rates) * channels * torch.float32.itemsize

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        runtime_additional_information: list[dict[str, Any]],
        **kwargs: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """
        Args:
            input_ids, positions: Not read; the ids are placeholders, one for each code.
            runtime_additional_information: One dict for each request: `codes`, int64 `[T]`, new ones only;
                `speaker`, its name in lower case; `seed`, int, absent for random noise; `is_last`, no window follows;
                `state`, the request's state.

        Returns:
            One dict for each request: `audio`, float32 `[samples]` in [-1, 1] (24 kHz in the published checkpoint),
            what this window adds; empty where there is nothing yet.
        """
        infos = runtime_additional_information
        windows = [self.planner.start(info, info["state"].get(STATE)) for info in infos]
        nothing = torch.empty(0, device=self.solver.device)
        finished: list[tuple[torch.Tensor, VocoderState]] = [(nothing, window.state) for window in windows]
        ready = [index for index, window in enumerate(windows) if window.num_final_frames]
        for batch in self._split(windows, ready):
            for index, result in zip(batch, self._decode([windows[i] for i in batch]), strict=True):
                finished[index] = result
        for info, (_, state) in zip(infos, finished, strict=True):
            info["state"][STATE] = state  # After everything is computed: a step that fails can run again.
        return [{"audio": audio} for audio, _ in finished]

    def _split(self, windows: list[CodeWindow], indices: list[int]) -> Iterator[list[int]]:
        """Batches of at most `max_batch_frames`, or of one window."""
        batch: list[int] = []
        frames = 0
        for index in indices:
            size = windows[index].state.noise.shape[0]
            if batch and frames + size > self.max_batch_frames:
                yield batch
                batch, frames = [], 0
            batch.append(index)
            frames += size
        if batch:
            yield batch

    def _decode(self, windows: list[CodeWindow]) -> list[tuple[torch.Tensor, VocoderState]]:
        mels, past = self.solver.solve([window.dit_input for window in windows])
        waves = self.bigvgan.decode([window.choose_frames(mel) for window, mel in zip(windows, mels, strict=True)])
        return [self.planner.finish(*parts) for parts in zip(windows, mels, past, waves, strict=True)]

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = super().load_weights(weights)
        _ = self.solver, self.planner  # Computed once for a checkpoint.
        return loaded
