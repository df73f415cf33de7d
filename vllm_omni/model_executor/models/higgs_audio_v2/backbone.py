# SPDX-License-Identifier: Apache-2.0
"""Higgs Audio v2's backbone: Llama with a second network in each layer for rows of sound, and a head per codebook.

A step reads the row of the step before, the sum of its codes' embeddings, and predicts one code of each codebook (see
`delay_pattern`). The first one is the token that vLLM samples; `HiggsAudioFeedback` samples the others when it is fed
back.

Reference: `HiggsAudioV2ForConditionalGeneration` of HF transformers. This file knows no engine.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaMLP, LlamaModel
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.feedback import FedBack, FedBackRows, RequestInput
from vllm_omni.model_executor.layers.delay_pattern import DelayedFrames, DelayPattern
from vllm_omni.model_executor.layers.talker import EncodingTalker, WholePromptFeedback
from vllm_omni.model_executor.models.higgs_audio_v2.codec import HiggsAudioEncoder
from vllm_omni.model_executor.models.higgs_audio_v2.tokenizer import find_codec, read_codec_config
from vllm_omni.model_executor.sound_cache import SoundCache

_HEADS = "audio_lm_head.weight"


class DualLayer(LlamaDecoderLayer):
    """Rows of sound have norms and a network of their own; attention is common. Both networks run for every row of a
    step with rows of text."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config: Any = vllm_config.model_config.hf_config
        self.audio_mlp = LlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            quant_config=vllm_config.quant_config,
            bias=config.mlp_bias,
            prefix=f"{prefix}.audio_mlp",
        )
        self.audio_input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.audio_post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(  # type: ignore[override]
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        is_sound: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            is_sound: `[N, 1]` bool; None: all rows are.
        """
        residual = hidden_states if residual is None else residual + hidden_states
        normed = self.audio_input_layernorm(residual)
        if is_sound is not None:
            normed = torch.where(is_sound, normed, self.input_layernorm(residual))
        residual = residual + self.self_attn(positions=positions, hidden_states=normed)
        hidden_states = self.audio_mlp(self.audio_post_attention_layernorm(residual))
        if is_sound is not None:
            text = self.mlp(self.post_attention_layernorm(residual))
            hidden_states = torch.where(is_sound, hidden_states, text)
        return hidden_states, residual


@support_torch_compile
class DualModel(LlamaModel):
    """
    Attributes:
        is_sound: `[max_num_batched_tokens]` bool, by row of a step; written before each forward.
    """

    is_sound: torch.Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=DualLayer)
        max_rows = vllm_config.scheduler_config.max_num_batched_tokens
        self.register_buffer("is_sound", torch.zeros(max_rows, dtype=torch.bool), persistent=False)
        # A compiled model and a CUDA graph cannot branch, and a GPU would have to be waited for.
        self._can_branch = current_platform.is_cpu() and vllm_config.model_config.enforce_eager

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        is_sound = self.is_sound[: positions.shape[0]]
        mask = None if self._can_branch and is_sound.all() else is_sound[:, None]
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, is_sound=mask)


class OmniHiggsAudio(EncodingTalker):
    """
    Attributes:
        model: Llama's layers, with the embedding of text.
        embed_audio_tokens: Has the rows of each codebook, one after the other.
        audio_lm_head: Predicts the codes of all codebooks, those of the first one included.
        codec: Encodes the sound of a prompt.
        secondary_weights: For vLLM's loader: the codec has a checkpoint of its own.
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.embed_audio_tokens.embed_audio_tokens.": "embed_audio_tokens.",
            "text_lm_head.": None,
            "audio_decoder_proj.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config: Any = model_config.hf_config
        self.config = config
        self.max_model_len = model_config.max_model_len
        self.model = DualModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        num_rows = config.num_codebooks * config.codebook_size
        self.embed_audio_tokens = VocabParallelEmbedding(num_rows, config.hidden_size)
        self.audio_lm_head = nn.Linear(config.hidden_size, num_rows, bias=False).requires_grad_(False)
        head_config = copy.copy(config)
        head_config.vocab_size = config.codebook_size
        is_no_code = torch.arange(config.vocab_size) >= config.codebook_size
        self.add_codec_head(vllm_config, head_config, prefix, is_no_code)
        self.register_buffer("offsets", torch.arange(config.num_codebooks) * config.codebook_size, persistent=False)
        self.offsets: torch.Tensor
        self.pattern = DelayPattern(config.num_codebooks, config.audio_stream_bos_id, config.audio_stream_eos_id)
        self.codec = HiggsAudioEncoder(read_codec_config(model_config.model))
        self.secondary_weights = [DefaultModelLoader.Source(find_codec(model_config.model), None, prefix="codec.")]

    def make_feedback_strategy(self, max_batch_size: int) -> "HiggsAudioFeedback":
        frames = DelayedFrames(self.audio_lm_head, self.pattern, max_batch_size, self.max_model_len)
        return HiggsAudioFeedback(self, frames)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits of first codes, padded to the vocabulary of text, which vLLM's sampler counts with."""
        logits = super().compute_logits(hidden_states)
        padding = self.config.vocab_size - self.config.codebook_size
        return None if logits is None else F.pad(logits, (0, padding), value=float("-inf"))

    def embed_frames(self, codes: torch.Tensor) -> torch.Tensor:
        """`[N, num_codebooks]` -> `[N, hidden]`."""
        return self.embed_audio_tokens(codes + self.offsets).sum(1)

    def is_sound(self, text_ids: torch.Tensor) -> torch.Tensor:
        """`[rows]` bool."""
        return (text_ids == self.config.audio_token_id) | (text_ids == self.config.audio_delay_token_id)

    def embed_prompt(self, sounds: SoundCache, text_ids: torch.Tensor, sound: torch.Tensor) -> torch.Tensor:
        """
        Args:
            sounds: Has the encoded references.
            text_ids: `[rows]`, on the model's device.
            sound: That of a `HiggsAudioPromptProcessor`, on the CPU.

        Returns:
            `[rows, hidden]`.
        """
        embeds = self.model.embed_input_ids(text_ids)
        if len(sound):
            (codes,) = sounds.encode(sound, text_ids.device, self.codec)
            embeds[self.is_sound(text_ids)] = self.embed_frames(self.pattern.delay(codes))
        return embeds

    def split_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Gives the first codebook's head to vLLM's sampler, too."""
        for name, tensor in weights:
            yield name, tensor
            if name == _HEADS:
                yield "codec_head.weight", tensor[: self.config.codebook_size]


class HiggsAudioFeedback(WholePromptFeedback):
    """Emits `codes`, int64 `[num_codebooks]` for each row: delayed, with the rows of start ids and of end ids. A
    request ends with the latter. All codes are sampled with the request's temperature, `top_p` and `top_k`, which is at
    most 50 for those of later codebooks."""

    _frames: DelayedFrames

    def __init__(self, model: OmniHiggsAudio, frames: DelayedFrames) -> None:
        super().__init__(frames)
        self._model = model
        self._prompt_masks: dict[int, torch.Tensor] = {}
        self.row_mask: torch.Tensor = model.model.is_sound

    def begin(self, slot: int, request: RequestInput) -> None:
        """Reads the information of a `HiggsAudioPromptProcessor`."""
        text_ids = request.information["text_ids"].to(self.row_mask.device)
        embeds = self._model.embed_prompt(self.sound_cache, text_ids, request.information["sound"])
        self.set_input(slot, embeds, request.params)
        self._prompt_masks[slot] = self._model.is_sound(text_ids)

    def end(self, slot: int) -> None:
        super().end(slot)
        self._prompt_masks.pop(slot, None)

    def prompt_mask(self, slot: int, start: int, stop: int) -> torch.Tensor:
        return self._prompt_masks[slot][start:stop]

    def feed_back(self, rows: FedBackRows) -> FedBack:
        return self._as_rows(self._frames.make(rows))

    def replay(self, rows: FedBackRows) -> FedBack:
        return self._as_rows(self._frames.read(rows))

    def _as_rows(self, codes: torch.Tensor) -> FedBack:
        is_last = (codes == self._model.pattern.end_id).all(1)
        return FedBack(self._model.embed_frames(codes), {"codes": codes}, is_last)
