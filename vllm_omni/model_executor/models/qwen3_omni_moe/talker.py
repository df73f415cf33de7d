# SPDX-License-Identifier: Apache-2.0
"""The talker: makes speech of the thinker's reply, one frame of codes per step.

A step reads the frame of the step before. Only a frame's first code comes from this model: `TalkerFeedback` computes
the residual codes when the first code is fed back.

Reference: `Qwen3OmniMoeTalkerForConditionalGeneration` of HF transformers. This file knows no engine.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.platforms import current_platform

from vllm_omni.model_executor.feedback import RequestInput
from vllm_omni.model_executor.layers.depth_decoder import DepthDecoder
from vllm_omni.model_executor.layers.frame_loop import FrameLoop
from vllm_omni.model_executor.layers.residual_codes import ResidualFilter
from vllm_omni.model_executor.layers.talker import FrameFeedback, find_specials
from vllm_omni.model_executor.models.qwen3_omni_moe.talker_prompt import TalkerPromptBuilder, ThinkerRows
from vllm_omni.model_executor.models.qwen_omni.stage_input_processors import REPLY_ROWS
from vllm_omni.model_executor.models.qwen_omni.talker import QwenOmniTalker

RESIDUAL_FILTER = ResidualFilter(temperature=1.0, top_k=50, top_p=0.8)
"""Of the residual codes, fixed by the reference, whatever the talker's own parameters."""


@support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0}
)
class TalkerModel(Qwen3MoeModel):
    """vLLM's, which is compiled for positions `[num_tokens]`, with M-RoPE's `[3, num_tokens]`."""


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
        self.model = TalkerModel(
            vllm_config=vllm_config.with_hf_config(text_config, architectures=["Qwen3MoeForCausalLM"]),
            prefix=maybe_prefix(prefix, "model"),
        )
        specials = find_specials(text_config.vocab_size, config.codec_eos_token_id)
        self.add_codec_head(vllm_config, text_config, prefix, specials)
        self.prompt_builder = TalkerPromptBuilder(config)
        model_config = vllm_config.model_config
        self.max_model_len = model_config.max_model_len
        self.code_predictor = DepthDecoder(
            config.code_predictor_config,
            num_codes=config.code_predictor_config.num_code_groups,
            max_batch_size=vllm_config.scheduler_config.max_num_seqs,
            use_graphs=current_platform.is_cuda() and not model_config.enforce_eager,
        )

    def make_feedback_strategy(self, max_batch_size: int) -> "TalkerFeedback":
        frames = FrameLoop(self.code_predictor, max_batch_size, self.max_model_len)
        return TalkerFeedback(self.model.embed_tokens, self.prompt_builder, frames, max_batch_size)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        whole = self.config.omni_parent_config
        token_ids = [whole[f"tts_{name}_token_id"] for name in ("bos", "eos", "pad")]
        loaded, control_embeds = self.load_with_thinker_embeds(weights, token_ids)
        self.prompt_builder.set_control_embeds(control_embeds)
        return loaded


class TalkerFeedback(FrameFeedback):
    text_key: ClassVar[str] = REPLY_ROWS

    def __init__(
        self,
        codec_embedding: nn.Module,
        prompt_builder: TalkerPromptBuilder,
        frames: FrameLoop,
        max_batch_size: int,
    ) -> None:
        """
        Args:
            codec_embedding: Of first codes, `[N]` ids -> `[N, hidden]`.
        """
        super().__init__(codec_embedding, frames, prompt_builder.tts_eos[None], prompt_builder.tts_pad, max_batch_size)
        self._prompt_builder = prompt_builder

    def begin(self, slot: int, request: RequestInput) -> None:
        """Reads information with the fields of `ThinkerRows`."""
        prompt, text = self._prompt_builder(ThinkerRows.pop_from(request.information), self._codec_embedding)
        self.set_input(slot, prompt, text, request.is_complete)
        self._frames.begin(slot, request.params, RESIDUAL_FILTER)

    def embed_text(self, text: torch.Tensor) -> torch.Tensor:
        return self._prompt_builder.project_reply(text)
