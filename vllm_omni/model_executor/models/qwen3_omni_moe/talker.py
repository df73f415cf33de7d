# SPDX-License-Identifier: Apache-2.0
"""The talker: makes speech of the thinker's reply, one frame of codes per step.

A step reads the frame of the step before. Only a frame's first code comes from this model: `talker_feedback` computes
the residual codes when the first code is fed back.

Reference: `Qwen3OmniMoeTalkerForConditionalGeneration` of HF transformers. This file knows no engine.
"""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.platforms import current_platform

from vllm_omni.model_executor.models.qwen3_omni_moe.code_predictor import CodePredictor
from vllm_omni.model_executor.models.qwen3_omni_moe.talker_feedback import TalkerFeedback
from vllm_omni.model_executor.models.qwen3_omni_moe.talker_prompt import TalkerPromptBuilder
from vllm_omni.model_executor.models.qwen_omni.talker import QwenOmniTalker

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
        self.codec_head = ParallelLMHead(
            text_config.vocab_size,
            text_config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "codec_head"),
        )
        self.logits_processor = LogitsProcessor(text_config.vocab_size)
        self.prompt_builder = TalkerPromptBuilder(config)
        model_config = vllm_config.model_config
        self.max_model_len = model_config.max_model_len
        self.code_predictor = CodePredictor(
            config.code_predictor_config,
            max_batch_size=vllm_config.scheduler_config.max_num_seqs,
            use_graphs=current_platform.is_cuda() and not model_config.enforce_eager,
        )
        suppressed = torch.arange(text_config.vocab_size) >= text_config.vocab_size - NUM_SUPPRESSED
        suppressed[config.codec_eos_token_id] = False
        self.suppressed: torch.Tensor
        self.register_buffer("suppressed", suppressed, persistent=False)

    def make_feedback_strategy(self, max_batch_size: int) -> TalkerFeedback:
        return TalkerFeedback(
            self.model.embed_tokens, self.prompt_builder, self.code_predictor, max_batch_size, self.max_model_len
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Codec embeddings of first codes; the rest of a row's input is added when the code is fed back."""
        return self.model.embed_input_ids(input_ids)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = self.logits_processor(self.codec_head, hidden_states)
        return None if logits is None else logits.masked_fill_(self.suppressed, float("-inf"))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        whole = self.config.omni_parent_config
        token_ids = [whole[f"tts_{name}_token_id"] for name in ("bos", "eos", "pad")]
        loaded, control_embeds = self.load_with_thinker_embeds(weights, token_ids)
        self.prompt_builder.set_control_embeds(control_embeds)
        return loaded
