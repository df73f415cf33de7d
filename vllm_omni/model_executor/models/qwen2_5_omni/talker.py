# SPDX-License-Identifier: Apache-2.0
"""The talker: makes speech of the thinker's reply, one codec token per step.

A step reads the sum of the token before it and of the next row of the thinker's reply, projected into the talker's
space; `TalkerFeedback` computes it.
Reference: `Qwen2_5OmniTalkerForConditionalGeneration` of HF transformers.
"""

import copy
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.qwen2 import Qwen2Model
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix

from vllm_omni.model_executor.feedback import FedBack, FedBackRows, FeedbackStrategy, RequestInput
from vllm_omni.model_executor.layers.talker import TextFeedback
from vllm_omni.model_executor.models.qwen2_5_omni.speakers import load_speakers
from vllm_omni.model_executor.models.qwen2_5_omni.stage_input_processors import PROMPT_ROWS, SPEAKER
from vllm_omni.model_executor.models.qwen_omni.stage_input_processors import REPLY_ROWS
from vllm_omni.model_executor.models.qwen_omni.talker import QwenOmniTalker


class OmniQwen2_5OmniTalker(QwenOmniTalker):
    """Predicts codec tokens."""

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"talker.": "", "thinker.": None, "token2wav.": None})

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config: Any = model_config.hf_config
        self.config = config
        self.speakers = load_speakers(model_config.model, model_config.revision)
        self.model = _make_backbone(vllm_config, maybe_prefix(prefix, "model"))
        # The thinker's width, not that of the layers.
        self.model.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.embedding_size)
        self.thinker_to_talker_proj = nn.Linear(config.embedding_size, config.hidden_size).requires_grad_(False)
        suppressed = torch.arange(config.vocab_size) == config.tts_codec_start_token_id
        self.add_codec_head(vllm_config, config, prefix, suppressed)
        self.text_token_ids = [
            config.tts_text_end_token_id,
            config.tts_text_pad_token_id,
            *(speaker.bos_token_id for speaker in self.speakers.values()),
        ]
        self.text_embeds: torch.Tensor  # the thinker's, of `text_token_ids`
        self.register_buffer(
            "text_embeds", torch.zeros(len(self.text_token_ids), config.embedding_size), persistent=False
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Projected codec tokens, without the text that goes with them."""
        return self.thinker_to_talker_proj(self.model.embed_input_ids(input_ids))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded, text_embeds = self.load_with_thinker_embeds(weights, self.text_token_ids)
        self.text_embeds.copy_(text_embeds)
        return loaded

    def make_feedback_strategy(self, max_batch_size: int) -> FeedbackStrategy:
        end, pad, *voices = self.text_embeds.unbind(0)
        config = self.config
        codec_ids = torch.arange(config.vocab_size, device=self.text_embeds.device)
        return TalkerFeedback(
            projection=self.thinker_to_talker_proj,
            codec_embeds=self.model.embed_input_ids(codec_ids),
            prompt_codec_ids=(config.tts_codec_pad_token_id, config.tts_codec_start_token_id),
            text_end=end,
            text_pad=pad,
            voices=dict(zip(self.speakers, voices, strict=True)),
            max_batch_size=max_batch_size,
        )


def _make_backbone(vllm_config: VllmConfig, prefix: str) -> Qwen2Model:
    """Qwen2's layers, made of Llama's: vLLM's Qwen2 does not read `head_dim`, which a talker's configuration has."""
    layer_config: Any = copy.copy(vllm_config.model_config.hf_config)
    layer_config.qkv_bias = True  # Llama's layers then have biases where Qwen2's do

    def make_layer(prefix: str, **kwargs: Any) -> nn.Module:
        return LlamaDecoderLayer(vllm_config, prefix, layer_config)

    return Qwen2Model(vllm_config=vllm_config, prefix=prefix, decoder_layer_type=make_layer)  # type: ignore[arg-type]


class TalkerFeedback(TextFeedback):
    """The reference projects the sum of a token's embedding and a row of text. A projection of a sum is the sum of
    projections, so every codec token is projected once, when the weights are loaded, every row of text once, when it
    arrives, and a step is two look-ups and an addition, for all requests at once.

    A request's information: `prompt_rows` `[P, thinker_hidden]`, `reply_rows` `[at least 1, thinker_hidden]`, and
    `speaker`, a voice's name in lower case. Its prompt is two rows longer than the thinker's: the voice, and the first
    row of the reply."""

    text_key: ClassVar[str] = REPLY_ROWS

    def __init__(
        self,
        projection: nn.Linear,
        codec_embeds: torch.Tensor,
        prompt_codec_ids: tuple[int, int],
        text_end: torch.Tensor,
        text_pad: torch.Tensor,
        voices: dict[str, torch.Tensor],
        max_batch_size: int,
    ) -> None:
        """
        Args:
            projection: From the thinker's width to the talker's.
            codec_embeds: `[codec vocabulary, thinker_hidden]`.
            prompt_codec_ids: Tokens that are added to the last two rows of the prompt.
            text_end, text_pad: `[thinker_hidden]`, what follows the reply.
            voices: `[thinker_hidden]` by name.
        """
        end, pad = projection(torch.stack((text_end, text_pad)))
        super().__init__(end[None], pad, max_batch_size)
        self._projection = projection
        self._codec = functional.linear(codec_embeds, projection.weight)  # [codec vocabulary, hidden]; no bias here
        self._prompt_codec = self._codec[list(prompt_codec_ids)]
        self._voices = voices

    def begin(self, slot: int, request: RequestInput) -> None:
        information = request.information
        first, later = self._to_device(information[REPLY_ROWS]).tensor_split((1,))
        voice = self._voices[information[SPEAKER]][None]
        prompt = self._projection(torch.cat((self._to_device(information[PROMPT_ROWS]), voice, first)))
        prompt[-2:] += self._prompt_codec
        self.set_input(slot, prompt, self._projection(later), request.is_complete)

    def embed_text(self, text: torch.Tensor) -> torch.Tensor:
        return self._projection(self._to_device(text))

    def feed_back(self, rows: FedBackRows) -> FedBack:
        return FedBack(embeds=self._codec[rows.token_ids] + self._text.read(rows.slots, rows.frames), outputs={})

    def replay(self, rows: FedBackRows) -> FedBack:
        return self.feed_back(rows)

    def save_hidden_states(self, slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """The next input depends on tokens only."""

    def _to_device(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self._codec, non_blocking=True)
