# SPDX-License-Identifier: Apache-2.0
"""CSM's backbone and depth decoder: make speech of a text, one frame of codes per step.

A step reads the frame of the step before, as the sum of its codes' embeddings. Only a frame's first code comes from the
backbone: `CsmFeedback` computes the others when the first one is fed back.

Reference: `CsmForConditionalGeneration` of HF transformers. This file knows no engine.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.platforms import current_platform

from vllm_omni.model_executor.feedback import FedBack, FedBackRows, RequestInput
from vllm_omni.model_executor.layers.depth_decoder import DepthDecoder
from vllm_omni.model_executor.layers.frame_loop import FrameLoop
from vllm_omni.model_executor.layers.mimi import MimiEncoder
from vllm_omni.model_executor.layers.talker import EncodingTalker, WholePromptFeedback

_FRAMES = "model.embed_tokens.weight"
_DEPTH_FRAMES = "depth_decoder.embed_tokens.weight"
_DEPTH_HEADS = "depth_decoder.codebooks_head.weight"


class OmniCsm(EncodingTalker):
    """
    Attributes:
        model: Llama's layers; its embedding has `vocab_size` rows for each codebook.
        first_embedding: The depth decoder's rows of first codes.
        codec: Encodes the sounds of prompts.
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "backbone_model.embed_tokens.embed_audio_tokens.": "model.embed_tokens.",
            "backbone_model.": "model.",
            "depth_decoder.model.inputs_embeds_projector.": "depth_decoder.input_projection.",
            "depth_decoder.model.": "depth_decoder.",
            "codec_model.": "codec.",
            "lm_head.": "codec_head.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config: Any = model_config.hf_config
        self.config = config
        self.max_model_len = model_config.max_model_len
        self.model = LlamaModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.model.embed_tokens = VocabParallelEmbedding(config.num_codebooks * config.vocab_size, config.hidden_size)
        self.embed_text_tokens = VocabParallelEmbedding(config.text_vocab_size, config.hidden_size)
        is_no_code = torch.arange(config.vocab_size) >= config.codec_config.codebook_size
        self.add_codec_head(vllm_config, config, prefix, is_no_code)
        depth_config = copy.copy(config.depth_decoder_config)
        depth_config.vocab_size = config.codec_config.codebook_size  # The ids above are no codes.
        self.first_embedding = nn.Embedding(depth_config.vocab_size, config.hidden_size).requires_grad_(False)
        self.depth_decoder = DepthDecoder(
            depth_config,
            num_codes=config.num_codebooks,
            max_batch_size=vllm_config.scheduler_config.max_num_seqs,
            input_size=config.hidden_size,
            has_qk_norm=False,
            use_graphs=current_platform.is_cuda() and not model_config.enforce_eager,
        )
        self.codec = MimiEncoder(config.codec_config)
        self.register_buffer("offsets", torch.arange(config.num_codebooks) * config.vocab_size, persistent=False)
        self.offsets: torch.Tensor

    def make_feedback_strategy(self, max_batch_size: int) -> "CsmFeedback":
        return CsmFeedback(self, FrameLoop(self.depth_decoder, max_batch_size, self.max_model_len))

    def embed_frames(self, codes: torch.Tensor) -> torch.Tensor:
        """`[N, num_codebooks]` -> `[N, hidden]`."""
        return self.model.embed_tokens(codes + self.offsets).sum(1)

    def split_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Splits the depth decoder's weights by codebook. A checkpoint can have one table for the frames' embeddings of
        both decoders."""
        tables: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name in (_FRAMES, _DEPTH_FRAMES):
                tables[name] = tensor
            elif name == _DEPTH_HEADS:  # [num_codebooks - 1, hidden, vocab]
                size = self.config.codec_config.codebook_size
                yield from ((f"depth_decoder.lm_head.{i}", head[:, :size].T) for i, head in enumerate(tensor))
            else:
                yield name, tensor
        if not tables:
            raise ValueError("the checkpoint has no embeddings of codes")
        shared = next(iter(tables.values()))
        yield _FRAMES, tables.get(_FRAMES, shared)
        first, *others = self._by_codebook(tables.get(_DEPTH_FRAMES, shared))
        yield "first_embedding.weight", first
        yield from ((f"depth_decoder.codec_embedding.{i}", table) for i, table in enumerate(others))

    def _by_codebook(self, table: torch.Tensor) -> list[torch.Tensor]:
        """`[num_codebooks * vocab_size, hidden]` -> for each codebook the rows of its codes."""
        tables = table.view(self.config.num_codebooks, self.config.vocab_size, -1)
        return list(tables[:, : self.config.codec_config.codebook_size].unbind(0))


class CsmFeedback(WholePromptFeedback):
    """Emits `codes`, int64 `[num_codebooks]` for each row. A request ends with a frame of zeros (but for its last code,
    as in the reference). Residual codes are sampled with the request's temperature, `top_p` and `top_k`, if it is
    below 50."""

    _frames: FrameLoop

    def __init__(self, model: OmniCsm, frames: FrameLoop) -> None:
        super().__init__(frames)
        self._model = model
        self._config = model.config

    def begin(self, slot: int, request: RequestInput) -> None:
        """Reads the information of a `CsmPromptProcessor`."""
        self.set_input(slot, self._embed_prompt(**request.information), request.params)

    def _embed_prompt(self, text_ids: torch.Tensor, sounds: torch.Tensor, sound_sizes: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]`: a text's ids, and a frame's row at each audio id, and that of zeros after a sound."""
        config, device = self._config, self._model.offsets.device
        text_ids = text_ids.to(device)
        embeds = self._model.embed_text_tokens(text_ids)
        pieces = [sound for sound in sounds.split(sound_sizes.tolist()) if len(sound)]
        if pieces:
            codes = torch.cat([self.sound_cache.encode(sound, device, self._model.codec)[0] for sound in pieces])
            embeds[text_ids == config.audio_token_id] = self._model.embed_frames(codes)
            end = torch.full((1, config.num_codebooks), config.codebook_eos_token_id, device=device)
            embeds[text_ids == config.audio_eos_token_id] = self._model.embed_frames(end)
        return embeds

    def feed_back(self, rows: FedBackRows) -> FedBack:
        codes, _ = self._frames.make(rows, F.embedding(rows.token_ids, self._model.first_embedding.weight))
        return self._as_rows(codes)

    def replay(self, rows: FedBackRows) -> FedBack:
        codes, _ = self._frames.read(rows)
        return self._as_rows(codes)

    def _as_rows(self, codes: torch.Tensor) -> FedBack:
        is_last = (codes[:, :-1] == self._config.codebook_eos_token_id).all(1)
        return FedBack(self._model.embed_frames(codes), {"codes": codes}, is_last)
