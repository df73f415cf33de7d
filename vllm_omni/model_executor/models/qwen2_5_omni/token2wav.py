# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni's vocoder: turns the codes of whole requests, or of windows of them, into waveforms, in one step.

A request that comes whole equals the reference's, for equal noise, whatever else is in the batch.

This file knows no talker and no engine.
"""

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

import torch
from torch import nn
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.platforms import current_platform

from vllm_omni.model_executor.models.qwen2_5_omni.speakers import load_speakers
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav_bigvgan import BigVGAN
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav_dit import DiTSolver
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav_stream import StreamState, Window, WindowPlanner

MAX_BATCH_FRAMES = 16384
"""Frames of the spectrogram in one batch: bounds the memory of the widest activation."""

ACTIVATION_COPIES = 12
"""Tensors of the size of the waveform times its channels that are needed at the same time, an upper estimate."""

MAX_BATCH_FRAMES_CPU = 1024
"""A CPU gains from a batch only until its activations leave the caches."""

STATE = "state"
"""Where a request's `StreamState` lies in what the runner keeps for it."""


class OmniQwen2_5OmniToken2Wav(nn.Module):
    """Makes waves of codes; see `SupportsOneStepGeneration`."""

    is_attention_free: ClassVar[Literal[True]] = True

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"token2wav.": "token2wav.", "thinker.": None, "talker.": None}
    )

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

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Lets vLLM's loader skip files that hold only other stages' weights."""
        return not name.startswith("token2wav.")

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

    def activation_bytes(self, num_rows: int) -> int:
        """See `SupportsActivationEstimate`. The last level of BigVGAN is the widest; the solver takes less."""
        bigvgan = self.token2wav.code2wav_bigvgan_model.config
        frames = min(num_rows * self.token2wav.code2wav_dit_model.repeats, MAX_BATCH_FRAMES)
        channels = bigvgan.upsample_initial_channel // 2 ** len(bigvgan.upsample_rates)
        return ACTIVATION_COPIES * frames * math.prod(bigvgan.upsample_rates) * channels * torch.float32.itemsize

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Required by vLLM of every model, never called: the input is not in the ids."""
        raise NotImplementedError("the vocoder reads its codes from additional_information")

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
                `speaker`, its name in lower case; `seed`, int, absent for noise that nothing repeats; `is_last`, no
                window follows; `stream`, a dict that lives as long as the request.

        Returns:
            One dict for each request: `audio`, float32 `[samples]` in [-1, 1] (24 kHz in the published checkpoint),
            what this window adds; empty where there is nothing yet.
        """
        infos = runtime_additional_information
        windows = [self.planner.open(info, info["stream"].get(STATE)) for info in infos]
        nothing = torch.empty(0, device=self.solver.device)
        closed: list[tuple[torch.Tensor, StreamState]] = [(nothing, window.state) for window in windows]
        ready = [index for index, window in enumerate(windows) if window.num_final_frames]
        for batch in self._split(windows, ready):
            for index, result in zip(batch, self._decode([windows[i] for i in batch]), strict=True):
                closed[index] = result
        for info, (_, state) in zip(infos, closed, strict=True):
            info["stream"][STATE] = state  # Not before everything is computed: a step that fails can run again.
        return [{"audio": audio} for audio, _ in closed]

    def _split(self, windows: list[Window], indices: list[int]) -> Iterator[list[int]]:
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

    def _decode(self, windows: list[Window]) -> list[tuple[torch.Tensor, StreamState]]:
        mels, past = self.solver.solve([window.dit_input for window in windows])
        waves = self.bigvgan.decode([window.choose_frames(mel) for window, mel in zip(windows, mels, strict=True)])
        return [self.planner.close(*parts) for parts in zip(windows, mels, past, waves, strict=True)]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Required by vLLM of every model that generates, never called: nothing is sampled."""
        raise NotImplementedError("the vocoder samples no tokens")

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        _ = self.solver, self.planner  # What is computed once for a checkpoint.
        return loaded
