# SPDX-License-Identifier: Apache-2.0
"""VibeVoice: speech of a script, one frame of sound per step.

Qwen2's layers read a frame and say whether another follows. A diffusion head makes its latents from the state, with
guidance by the state of a sequence that has read the frames without the script; the decoder makes sound of the latents,
and the next step reads the latents and what a semantic encoder hears in the sound (see `VibeVoiceFeedback`).

Reference: `VibeVoiceForConditionalGeneration` of HF transformers. This file knows no engine.
"""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModel
from transformers.models.vibevoice.modeling_vibevoice import (
    VibeVoiceDiffusionHead,
    VibeVoiceForConditionalGeneration,
    VibeVoiceMultiModalProjector,
)
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2 import Qwen2Model
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.feedback import FedBack, FedBackRows, FeedbackStrategy, InputPiece, RequestInput
from vllm_omni.model_executor.feedback_buffers import SlotBuffer, with_room_for
from vllm_omni.model_executor.models.vibevoice.frames import FrameNoise, SlotPaddings
from vllm_omni.model_executor.models.vibevoice.prompt import read_generation_config
from vllm_omni.model_executor.sound_cache import SoundCache

DEFAULT_STEPS = 10
"""Of the solver, the reference's, where the checkpoint has none."""

FRAME_ROWS = 4096
"""Frames of a request for which there is memory from the start: nine minutes of speech."""

_EMBEDDING = "language_model.embed_tokens.weight"


class OmniVibeVoice(nn.Module):
    """
    Attributes:
        audio_tower: Encodes the voices of prompts, and decodes latents.
        head: `[3, hidden]`, the rows of the ids that are ever sampled.
        solver: A scheduler of diffusers.
    """

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"model.": ""})

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config: Any = model_config.hf_config
        text_config = config.text_config
        self.config = config
        self.max_model_len = model_config.max_model_len
        self.language_model = Qwen2Model(
            vllm_config=vllm_config.with_hf_config(text_config, architectures=["Qwen2ForCausalLM"]),
            prefix=maybe_prefix(prefix, "language_model"),
        )
        self.head = nn.Parameter(torch.empty(3, text_config.hidden_size))
        # The reference can sample the beginning of more speech after an end; here the end is the end.
        ids = torch.tensor([config.audio_token_id, config.audio_eos_token_id, config.eos_token_id])
        self.register_buffer("sampled_ids", ids, persistent=False)
        self.sampled_ids: torch.Tensor
        dtype = model_config.dtype  # They would take those of their own configurations.
        self.audio_tower = AutoModel.from_config(config.audio_config).to(dtype)
        self.semantic_tokenizer_encoder = AutoModel.from_config(config.semantic_model_config).to(dtype)
        self.multi_modal_projector = VibeVoiceMultiModalProjector(
            config.audio_config.hidden_size, text_config.hidden_size
        )
        self.semantic_connector = VibeVoiceMultiModalProjector(
            config.semantic_model_config.hidden_size, text_config.hidden_size
        )
        self.diffusion_head = VibeVoiceDiffusionHead(config.diffusion_head_config)
        self.latent_scaling_factor = nn.Parameter(torch.tensor(1.0))
        self.latent_bias_factor = nn.Parameter(torch.tensor(0.0))
        self.eval().requires_grad_(False)
        generation: Any = read_generation_config(model_config.model, model_config.revision)
        self.num_steps = getattr(generation, "num_diffusion_steps", None) or DEFAULT_STEPS
        with torch.device("cpu"):  # It computes with numpy.
            self.solver: Any = VibeVoiceForConditionalGeneration._build_default_noise_scheduler(generation)

    def make_feedback_strategy(self, max_batch_size: int) -> "VibeVoiceFeedback":
        return VibeVoiceFeedback(self, max_batch_size)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | IntermediateTensors:
        return self.language_model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.language_model.embed_input_ids(input_ids)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """`[N, vocab]`; only the next frame and the ends are ever sampled."""
        size = hidden_states.shape[0], self.config.text_config.vocab_size
        logits = hidden_states.new_full(size, float("-inf"))
        logits[:, self.sampled_ids] = F.linear(hidden_states, self.head)
        return logits

    def encode(self, sound: torch.Tensor) -> torch.Tensor:
        """`[samples]` of a voice -> `[frames, latent]`, without the noise of `blur`."""
        padding = -len(sound) % self.config.audio_config.hop_length
        padded = F.pad(sound, (0, padding)).to(self.head.dtype)
        return self.audio_tower.encoder(padded[None, None]).latents[0]

    def embed_voice(self, latents: torch.Tensor) -> torch.Tensor:
        """`[frames, latent]`, with noise -> `[frames, hidden]`."""
        return self.multi_modal_projector((latents + self.latent_bias_factor) * self.latent_scaling_factor)

    def embed_frames(self, latents: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """`[N, latent]`, `[N, semantic]` -> `[N, hidden]`."""
        return self.multi_modal_projector(latents) + self.semantic_connector(features)

    def denoise(self, latents: torch.Tensor, conditions: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """
        Args:
            latents: `[N, latent]`, noise.
            conditions: `[2, N, hidden]`, of the sequences with the script, and of those without.
            scales: `[N, 1]`, of guidance.

        Returns:
            `[N, latent]`.
        """
        self.solver.set_timesteps(num_inference_steps=self.num_steps)
        both = conditions.flatten(0, 1)
        for step in self.solver.timesteps:
            times = latents.new_full((both.shape[0],), float(step))
            guided, unguided = self.diffusion_head(latents.repeat(2, 1), times, condition=both).chunk(2)
            predicted = unguided + scales * (guided - unguided)
            latents = self.solver.step(predicted, step, latents).prev_sample
        return latents

    def decode(self, latents: torch.Tensor, padding: Any) -> torch.Tensor:
        """`[N, latent]` -> `[N, 1, hop]`, the next samples. `padding`: as transformers' `padding_cache`."""
        scaled = latents / self.latent_scaling_factor - self.latent_bias_factor
        return self.audio_tower.decoder(scaled[:, :, None], padding_cache=padding).audio

    def listen(self, sound: torch.Tensor, padding: Any) -> torch.Tensor:
        """`[N, 1, hop]` -> `[N, semantic]`."""
        return self.semantic_tokenizer_encoder(sound, padding_cache=padding).latents[:, 0]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(self._with_head(self.hf_to_vllm_mapper.apply(weights)))

    def _with_head(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Only some rows of the head are used; it can be the embedding."""
        name_of_head = _EMBEDDING if self.config.tie_word_embeddings else "lm_head.weight"
        for name, tensor in weights:
            if name == name_of_head:
                yield "head", tensor[self.sampled_ids.to(tensor.device)]
            if name != "lm_head.weight":
                yield name, tensor


class VibeVoiceFeedback(FeedbackStrategy):
    """Emits `audio`, float32 `[hop]` samples for each row. A request has a generator of its own for noise, from its
    seed."""

    takes_guidance: ClassVar[bool] = True

    def __init__(self, model: OmniVibeVoice, max_batch_size: int) -> None:
        config: Any = model.config
        self._model = model
        self._latent_size = config.audio_config.hidden_size
        self._sounds = self.sound_cache = SoundCache()
        self._prompts: dict[int, torch.Tensor] = {}
        self._noise = FrameNoise(self._latent_size)
        like = model.head
        self._device = like.device
        size = self._latent_size + config.semantic_model_config.hidden_size
        num_rows = min(FRAME_ROWS, model.max_model_len)
        self._frames = SlotBuffer((size,), max_batch_size, num_rows, dtype=like.dtype, device=like.device)
        self._states = like.new_zeros(max_batch_size, 2, like.shape[1])  # with the script, and without
        self._scales = like.new_ones(max_batch_size, 1)
        self._sound = like.new_zeros(max_batch_size, config.audio_config.hop_length)  # of each slot's last frame
        self._paddings = (SlotPaddings(max_batch_size), SlotPaddings(max_batch_size))
        self._speak(like.new_zeros(1, self._latent_size), torch.zeros(1, dtype=torch.int64, device=like.device))

    def begin(self, slot: int, request: RequestInput) -> None:
        """Reads the information of a `VibeVoicePromptProcessor`."""
        self._noise.begin(slot, request.params)
        self._prompts[slot] = self._embed_prompt(slot, **request.information)
        self._frames.reserve(slot, 1)
        self._states = with_room_for(self._states, slot)
        self._sound = with_room_for(self._sound, slot)
        self._scales = with_room_for(self._scales, slot)
        self._scales[slot] = float(request.information["scale"])
        for padding in self._paddings:
            padding.begin(slot)

    def _embed_prompt(
        self, slot: int, text_ids: torch.Tensor, sounds: torch.Tensor, sound_sizes: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """`[rows, hidden]`."""
        text_ids = text_ids.to(self._device)
        embeds = self._model.embed_input_ids(text_ids)
        pieces = sounds.split(sound_sizes.tolist()) if len(sound_sizes) else ()
        if pieces:
            voices = [self._sounds.encode(sound, self._device, self._model.encode)[0] for sound in pieces]
            voices = self._noise.blur(slot, voices, self._model.config.audio_config.vae_std)
            embeds[text_ids == self._model.config.audio_token_id] = self._model.embed_voice(torch.cat(voices))
        return embeds

    def extend(self, pieces: list[InputPiece]) -> None:
        """A prompt is complete when it arrives."""

    def end(self, slot: int) -> None:
        self._prompts.pop(slot, None)
        self._noise.end(slot)
        self._frames.free(slot)

    @property
    def buffer_bytes(self) -> int:
        return self._frames.nbytes + sum(padding.nbytes for padding in self._paddings)

    def prompt_rows(self, slot: int, start: int, stop: int) -> torch.Tensor:
        return self._prompts[slot][start:stop]

    def twin_rows(self, start: int, stop: int) -> torch.Tensor:
        bos = torch.tensor([self._model.config.audio_bos_token_id], device=self._device)
        return self._model.embed_input_ids(bos)[start:stop]

    def first_outputs(self, slot: int) -> dict[str, torch.Tensor]:
        """Speech that ends before its first frame is a sound, too."""
        return {"audio": torch.empty(0, device=self._device)}

    def feed_back(self, rows: FedBackRows) -> FedBack:
        slots, frames = rows.slots.tolist(), rows.frames.tolist()
        noise = self._noise.draw(slots, frames).to(self._states)
        scales, conditions = self._scales[rows.slots], self._states[rows.slots].transpose(0, 1)
        conditions = torch.stack((conditions[0], torch.where(scales == 1, conditions[0], conditions[1])))
        latents = self._model.denoise(noise, conditions, scales)
        sound, features = self._speak(latents, rows.slots)
        made, embeds = torch.cat((latents, features), 1), self._model.embed_frames(latents, features)
        for slot, frame in zip(slots, frames, strict=True):
            self._frames.reserve(slot, frame + 1)
        # Nothing below allocates: a step that raises has left each request as it was.
        for padding in self._paddings:
            padding.keep()
        self._frames.write(rows.slots, rows.frames, made)
        self._sound[rows.slots] = sound
        return FedBack(embeds, {"audio": sound.float()})

    def _speak(self, latents: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples of latents, `[N, hop]`, and what is heard in them, `[N, semantic]`."""
        decoding, listening = (padding.at(slots) for padding in self._paddings)
        sound = self._model.decode(latents, decoding)
        return sound[:, 0], self._model.listen(sound, listening)

    def replay(self, rows: FedBackRows) -> FedBack:
        frames = self._frames.read(rows.slots, rows.frames)
        latents, features = frames.tensor_split((self._latent_size,), 1)
        # Only of the last frame the sound can be missing.
        return FedBack(self._model.embed_frames(latents, features), {"audio": self._sound[rows.slots].float()})

    def save_hidden_states(self, slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        self._states[slots, 0] = hidden_states

    def save_twin_states(self, slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        self._states[slots, 1] = hidden_states
