# SPDX-License-Identifier: Apache-2.0
"""The talker: makes speech of the thinker's reply, one frame of codes per step.

A step reads the frame of the step before. Only a frame's first code comes from this model: `TalkerFeedback` computes
the residual codes when the first code is fed back.

Reference: `Qwen3OmniMoeTalkerForConditionalGeneration` of HF transformers. This file knows no engine.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams, SamplingType

from vllm_omni.model_executor.feedback import FedBack, FedBackRows
from vllm_omni.model_executor.feedback_buffers import SlotBuffer, with_room_for
from vllm_omni.model_executor.models.qwen3_omni_moe.code_predictor import CodePredictor
from vllm_omni.model_executor.models.qwen3_omni_moe.residual_frames import (
    SAMPLING_TOP_K,
    SAMPLING_TOP_P,
    ResidualSampling,
)
from vllm_omni.model_executor.models.qwen3_omni_moe.talker_prompt import TalkerPromptBuilder, ThinkerRows
from vllm_omni.model_executor.models.qwen_omni.talker import QwenOmniTalker, QwenOmniTalkerFeedback

NUM_SUPPRESSED = 1024
"""The last ids of the codec vocabulary are specials and voices; of them only the end may be sampled."""


class OmniQwen3OmniMoeTalker(QwenOmniTalker):
    """Predicts the first code of each frame, and the residual codes of the frame before."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.text_projection.": "prompt_builder.text_projection.",
            "talker.hidden_projection.": "prompt_builder.hidden_projection.",
            "talker.": "",
            "thinker.": None,
            "code2wav.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        text_config = config.text_config
        self.config = config
        self.model = Qwen3MoeModel(
            vllm_config=vllm_config.with_hf_config(text_config, architectures=["Qwen3MoeForCausalLM"]),
            prefix=maybe_prefix(prefix, "model"),
        )
        suppressed = torch.arange(text_config.vocab_size) >= text_config.vocab_size - NUM_SUPPRESSED
        suppressed[config.codec_eos_token_id] = False
        self.add_codec_head(vllm_config, text_config, prefix, suppressed)
        self.prompt_builder = TalkerPromptBuilder(config)
        model_config = vllm_config.model_config
        self.max_model_len = model_config.max_model_len
        self.code_predictor = CodePredictor(
            config.code_predictor_config,
            max_batch_size=vllm_config.scheduler_config.max_num_seqs,
            use_graphs=current_platform.is_cuda() and not model_config.enforce_eager,
        )

    def make_feedback_strategy(self, max_batch_size: int) -> "TalkerFeedback":
        return TalkerFeedback(
            self.model.embed_tokens, self.prompt_builder, self.code_predictor, max_batch_size, self.max_model_len
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Codec embeddings of first codes; the rest of a row's input is added when the code is fed back."""
        return self.model.embed_input_ids(input_ids)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        whole = self.config.omni_parent_config
        token_ids = [whole[f"tts_{name}_token_id"] for name in ("bos", "eos", "pad")]
        loaded, control_embeds = self.load_with_thinker_embeds(weights, token_ids)
        self.prompt_builder.set_control_embeds(control_embeds)
        return loaded


_RESIDUAL_SEED = 0x5EED0FC0DE


class ResidualSampler:
    """How each slot's residual codes are sampled: greedily for a greedy request, by a generator for one with a seed."""

    def __init__(self, num_steps: int, num_slots: int, device: torch.device) -> None:
        """
        Args:
            num_steps: Residual codes of a frame.
        """
        self._shape = (num_steps, SAMPLING_TOP_K)
        self._top_p = torch.zeros(num_slots, 1, dtype=torch.float32, device=device)
        self._sampled: set[int] = set()
        self._generators: dict[int, torch.Generator] = {}

    def begin(self, slot: int, params: SamplingParams) -> None:
        self._top_p = with_room_for(self._top_p, slot)
        is_greedy = params.sampling_type == SamplingType.GREEDY
        self._top_p[slot] = 0.0 if is_greedy else SAMPLING_TOP_P
        if not is_greedy:
            self._sampled.add(slot)
        if params.sampling_type == SamplingType.RANDOM_SEED:
            assert params.seed is not None
            # Not the seed itself: vLLM's sampler draws the first code from a generator with it.
            generator = torch.Generator(self._top_p.device).manual_seed(params.seed ^ _RESIDUAL_SEED)
            self._generators[slot] = generator

    def end(self, slot: int) -> None:
        self._sampled.discard(slot)
        self._generators.pop(slot, None)

    def draw(self, slots: torch.Tensor) -> ResidualSampling | None:
        """For one frame of each of `[N]` slots; None while all requests are greedy."""
        if not self._sampled:
            return None
        noise = self._top_p.new_empty(slots.shape[0], *self._shape).exponential_()
        if self._generators:
            for row, slot in zip(noise, slots.tolist(), strict=True):
                if slot in self._generators:
                    row.exponential_(generator=self._generators[slot])
        return ResidualSampling(top_p=self._top_p[slots], noise=noise)


class TalkerFeedback(QwenOmniTalkerFeedback):
    """Keeps the frames of each request as well. Emits `codes`, int64 `[num_code_groups]` for each row.

    The first code of a frame is the sampled token; its residual codes are computed when it is fed back. So the frame of
    the last sampled token is never computed, whether the reply ended or was cut, as in the reference.
    """

    def __init__(
        self,
        codec_embedding: nn.Module,
        prompt_builder: TalkerPromptBuilder,
        code_predictor: CodePredictor,
        max_batch_size: int,
        max_model_len: int,
    ) -> None:
        """
        Args:
            codec_embedding: Of first codes, `[N]` ids -> `[N, hidden]`.
            max_model_len: The most frames of a request.
        """
        padding = prompt_builder.tts_pad
        super().__init__(prompt_builder.tts_eos, padding, max_batch_size)
        self._codec_embedding = codec_embedding
        self._prompt_builder = prompt_builder
        self._code_predictor = code_predictor
        self._max_model_len = max_model_len
        num_codes = code_predictor.num_steps + 1
        self._frames = SlotBuffer((num_codes,), max_batch_size, dtype=torch.int64, device=padding.device)
        self._last_hidden = padding.new_zeros(max_batch_size, padding.shape[0])
        self._sampler = ResidualSampler(code_predictor.num_steps, max_batch_size, padding.device)

    def begin(self, slot: int, information: dict[str, Any], params: SamplingParams, is_input_complete: bool) -> None:
        """`information` holds the fields of `ThinkerRows`."""
        prompt, text = self._prompt_builder(ThinkerRows.pop_from(information), self._codec_embedding)
        self._set_input(slot, prompt, text, is_input_complete)
        self._frames.reserve(slot, min(params.max_tokens or self._max_model_len, self._max_model_len))
        self._last_hidden = with_room_for(self._last_hidden, slot)
        self._sampler.begin(slot, params)

    def project_reply(self, reply_rows: torch.Tensor) -> torch.Tensor:
        return self._prompt_builder.project_reply(reply_rows)

    def end(self, slot: int) -> None:
        super().end(slot)
        self._sampler.end(slot)

    def feed_back(self, rows: FedBackRows) -> FedBack:
        first = self._codec_embedding(rows.token_ids)
        frame = self._code_predictor(self._last_hidden[rows.slots], first, self._sampler.draw(rows.slots))
        codes = torch.cat((rows.token_ids[:, None], frame.codes), dim=1)  # [N, num_code_groups]
        self._frames.write(rows.slots, rows.frames, codes)
        return self._with_text(rows, first + frame.embeds, codes)

    def replay(self, rows: FedBackRows) -> FedBack:
        codes = self._frames.read(rows.slots, rows.frames)
        residual = self._code_predictor.embed_codes(codes[:, 1:])
        return self._with_text(rows, self._codec_embedding(codes[:, 0]) + residual, codes)

    def _with_text(self, rows: FedBackRows, frame_embeds: torch.Tensor, codes: torch.Tensor) -> FedBack:
        return FedBack(frame_embeds + self._text.read(rows.slots, rows.frames), {"codes": codes})

    def save_hidden_states(self, slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """A token's residual codes are predicted from the state that the token is sampled from."""
        self._last_hidden[slots] = hidden_states
