# SPDX-License-Identifier: Apache-2.0
"""The architectures that this package adds to vLLM's, as `module:class` to be imported when first used.

It imports no model, and has no architecture of vLLM's.
"""

_QWEN2_5_OMNI = "vllm_omni.model_executor.models.qwen2_5_omni"
_QWEN3_OMNI_MOE = "vllm_omni.model_executor.models.qwen3_omni_moe"

OMNI_MODELS: dict[str, str] = {
    "Qwen2_5OmniThinkerForConditionalGeneration": f"{_QWEN2_5_OMNI}.thinker:OmniQwen2_5OmniThinker",
    "Qwen2_5OmniTalkerForConditionalGeneration": f"{_QWEN2_5_OMNI}.talker:OmniQwen2_5OmniTalker",
    "Qwen2_5OmniToken2WavModel": f"{_QWEN2_5_OMNI}.token2wav:OmniQwen2_5OmniToken2Wav",
    "Qwen3OmniMoeThinkerForConditionalGeneration": f"{_QWEN3_OMNI_MOE}.thinker:OmniQwen3OmniMoeThinker",
    "Qwen3OmniMoeTalkerForConditionalGeneration": f"{_QWEN3_OMNI_MOE}.talker:OmniQwen3OmniMoeTalker",
    "Qwen3OmniMoeCode2Wav": f"{_QWEN3_OMNI_MOE}.code2wav:OmniQwen3OmniMoeCode2Wav",
}
