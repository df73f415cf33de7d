# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS's talker and code predictor: make speech of a text, one frame of codes per step.

A step reads the frame of the step before and the next row of the text. Only a frame's first code comes from the talker:
`Qwen3TTSFeedback` computes the others when the first one is fed back. The encoders of reference sounds are parts of
the talker, too.

Reference: `Qwen3TTSForConditionalGeneration` of the authors' `qwen-tts`. This file knows no engine.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.qwen3 import Qwen3Model
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.platforms import current_platform

from vllm_omni.model_executor.feedback import RequestInput
from vllm_omni.model_executor.layers.depth_decoder import DepthDecoder
from vllm_omni.model_executor.layers.frame_loop import FrameLoop
from vllm_omni.model_executor.layers.mimi import MimiEncoder
from vllm_omni.model_executor.layers.residual_codes import ResidualFilter
from vllm_omni.model_executor.layers.talker import EncodingTalker, FrameFeedback, find_specials
from vllm_omni.model_executor.models.qwen3_tts.configuration import Qwen3TTSTokenizerConfig
from vllm_omni.model_executor.models.qwen3_tts.prompt import REFERENCE, SPEAKER
from vllm_omni.model_executor.models.qwen3_tts.speaker_encoder import SpeakerEncoder
from vllm_omni.model_executor.sound_cache import SoundCache

_CODEC_FOLDER = "speech_tokenizer"


class TextProjection(nn.Module):
    """`[n, text_hidden]` -> `[n, hidden]`."""

    def __init__(self, text_hidden: int, hidden: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(text_hidden, text_hidden)
        self.linear_fc2 = nn.Linear(text_hidden, hidden)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1(rows)))


class OmniQwen3TTSTalker(EncodingTalker):
    """
    Attributes:
        speaker_encoder, codec_encoder: Only of a checkpoint that clones: sounds to embeddings of speakers, to frames.
        secondary_weights: For vLLM's loader: the codec is a checkpoint in a folder of this one.
    """

    encoder_name = "codec_encoder"
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.model.text_embedding.": "text_embedding.",
            "talker.code_predictor.small_to_mtp_projection.": "code_predictor.input_projection.",
            "talker.": "",
            "codec.encoder.": "codec_encoder.",
            "codec.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config: Any = model_config.hf_config
        talker, predictor = config.talker_config, config.talker_config.code_predictor_config
        self.config = config
        self.max_model_len = model_config.max_model_len
        self.model = Qwen3Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.add_codec_head(vllm_config, talker, prefix, find_specials(talker.vocab_size, talker.codec_eos_token_id))
        self.text_embedding = VocabParallelEmbedding(talker.text_vocab_size, talker.text_hidden_size)
        self.text_projection = TextProjection(talker.text_hidden_size, talker.hidden_size).requires_grad_(False)
        self.code_predictor = DepthDecoder(
            predictor,
            num_codes=talker.num_code_groups,
            max_batch_size=vllm_config.scheduler_config.max_num_seqs,
            input_size=None if predictor.hidden_size == talker.hidden_size else talker.hidden_size,
            projection_bias=True,
            use_graphs=current_platform.is_cuda() and not model_config.enforce_eager,
        )
        self.secondary_weights: list[DefaultModelLoader.Source] = []
        if config.tts_model_type == "base":
            self._add_encoders(model_config.model, model_config.revision)

    def _add_encoders(self, model: str, revision: str | None) -> None:
        codec: Any = Qwen3TTSTokenizerConfig.from_pretrained(
            model, subfolder=_CODEC_FOLDER, revision=revision or "main"
        )
        self.speaker_encoder = SpeakerEncoder(self.config.speaker_encoder_config)
        self.codec_encoder = MimiEncoder(codec.encoder_config, codec.encoder_valid_num_quantizers)
        self.secondary_weights.append(DefaultModelLoader.Source(model, revision, _CODEC_FOLDER, prefix="codec."))

    def make_feedback_strategy(self, max_batch_size: int) -> "Qwen3TTSFeedback":
        frames = FrameLoop(self.code_predictor, max_batch_size, self.max_model_len)
        return Qwen3TTSFeedback(self, frames, max_batch_size)

    def embed_text(self, text_ids: torch.Tensor) -> torch.Tensor:
        """`[n]` on any device -> `[n, hidden]`."""
        return self.text_projection(self.text_embedding(text_ids.to(self.suppressed.device)))

    def embed_prompt(
        self, sounds: SoundCache, rows: torch.Tensor, ref_audio: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            sounds: Has the encoded references.
            rows, ref_audio: The information of a `Qwen3TTSPromptProcessor`.

        Returns:
            `[rows, hidden]`, and the reference's frames, int64 `[frames, num_code_groups]`, if the speech continues it.
        """
        has_frames = bool((rows[:, 1] == REFERENCE).any())  # before `rows` is on the device
        device = self.suppressed.device
        text_ids, codes = rows.to(device).unbind(1)
        embeds = self.embed_text(text_ids)
        has_code = codes >= 0
        embeds[has_code] += self.embed_input_ids(codes[has_code])
        frames = codes.new_empty(0, self.code_predictor.num_codes)
        if len(ref_audio):
            encoders = (self.speaker_encoder, self.codec_encoder) if has_frames else (self.speaker_encoder,)
            speaker, *encoded = sounds.encode(ref_audio, device, *encoders)
            embeds[codes == SPEAKER] += speaker.to(embeds)
            if has_frames:
                (frames,) = encoded
                residual = self.code_predictor.embed_codes(frames[:, 1:])
                embeds[codes == REFERENCE] += self.embed_input_ids(frames[:, 0]) + residual
        return embeds, frames


class Qwen3TTSFeedback(FrameFeedback):
    """Emits `ref_codes`, the frames of the reference, before the others. Residual codes are sampled with the request's
    temperature, `top_p` and `top_k`, if it is below 50. The text ends with an id of its own."""

    text_key: ClassVar[str] = "text_ids"

    def __init__(self, model: OmniQwen3TTSTalker, frames: FrameLoop, max_batch_size: int) -> None:
        pad = model.embed_text(torch.tensor([model.config.tts_pad_token_id]))
        super().__init__(model.model.embed_tokens, frames, pad[:0], pad[0], max_batch_size)
        self._model = model
        self._sounds = self.sound_cache = SoundCache()
        self._references: dict[int, torch.Tensor] = {}

    def begin(self, slot: int, request: RequestInput) -> None:
        """Reads the information of a `Qwen3TTSPromptProcessor`."""
        text_ids = request.information.pop(self.text_key)
        prompt, self._references[slot] = self._model.embed_prompt(self._sounds, **request.information)
        self.set_input(slot, prompt, self.embed_text(text_ids), request.is_complete)
        self._frames.begin(slot, request.params, ResidualFilter.from_params(request.params))

    def embed_text(self, text: torch.Tensor) -> torch.Tensor:
        return self._model.embed_text(text)

    def end(self, slot: int) -> None:
        super().end(slot)
        self._references.pop(slot, None)

    def first_outputs(self, slot: int) -> dict[str, torch.Tensor]:
        reference = self._references[slot]
        return {"ref_codes": reference} if len(reference) else {}
