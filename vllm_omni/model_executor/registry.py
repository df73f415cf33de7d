# SPDX-License-Identifier: Apache-2.0
"""The models of this package: the architectures that it adds to vLLM's, and the configurations to transformers'.

As `module:class`: a model is imported when first used. It has no architecture of vLLM's.
"""

from pathlib import Path

from vllm_omni.model_packages import ModelPackage

_CSM = "vllm_omni.model_executor.models.csm"
_GLM_IMAGE = "vllm_omni.model_executor.models.glm_image"
_HIGGS_AUDIO_V2 = "vllm_omni.model_executor.models.higgs_audio_v2"
_JANUS = "vllm_omni.model_executor.models.janus"
_QWEN2_5_OMNI = "vllm_omni.model_executor.models.qwen2_5_omni"
_QWEN3_OMNI_MOE = "vllm_omni.model_executor.models.qwen3_omni_moe"
_QWEN3_TTS = "vllm_omni.model_executor.models.qwen3_tts"
_VIBEVOICE = "vllm_omni.model_executor.models.vibevoice"

OMNI_MODELS: dict[str, str] = {
    "CsmForConditionalGeneration": f"{_CSM}.backbone:OmniCsm",
    "CsmCodec": f"{_CSM}.codec:OmniCsmCodec",
    "GlmImageForConditionalGeneration": f"{_GLM_IMAGE}.prior:OmniGlmImage",
    "HiggsAudioV2Codec": f"{_HIGGS_AUDIO_V2}.codec:OmniHiggsAudioCodec",
    "HiggsAudioV2ForConditionalGeneration": f"{_HIGGS_AUDIO_V2}.backbone:OmniHiggsAudio",
    "JanusForConditionalGeneration": f"{_JANUS}.language_model:OmniJanus",
    "JanusVQDecoder": f"{_JANUS}.vq_decoder:OmniJanusVQDecoder",
    "OmniMimi": "vllm_omni.model_executor.layers.mimi:OmniMimi",
    "Qwen2_5OmniThinkerForConditionalGeneration": f"{_QWEN2_5_OMNI}.thinker:OmniQwen2_5OmniThinker",
    "Qwen2_5OmniTalkerForConditionalGeneration": f"{_QWEN2_5_OMNI}.talker:OmniQwen2_5OmniTalker",
    "Qwen2_5OmniToken2WavModel": f"{_QWEN2_5_OMNI}.token2wav:OmniQwen2_5OmniToken2Wav",
    "Qwen3OmniMoeThinkerForConditionalGeneration": f"{_QWEN3_OMNI_MOE}.thinker:OmniQwen3OmniMoeThinker",
    "Qwen3OmniMoeTalkerForConditionalGeneration": f"{_QWEN3_OMNI_MOE}.talker:OmniQwen3OmniMoeTalker",
    "Qwen3OmniMoeCode2Wav": f"{_QWEN3_OMNI_MOE}.code2wav:OmniQwen3OmniMoeCode2Wav",
    "Qwen3TTSCodec": f"{_QWEN3_TTS}.codec:OmniQwen3TTSCodec",
    "Qwen3TTSForConditionalGeneration": f"{_QWEN3_TTS}.talker:OmniQwen3TTSTalker",
    "VibeVoiceForConditionalGeneration": f"{_VIBEVOICE}.language_model:OmniVibeVoice",
}

OMNI_CONFIGS: dict[str, str] = {
    "qwen3_tts": f"{_QWEN3_TTS}.configuration:Qwen3TTSConfig",
    "qwen3_tts_tokenizer_12hz": f"{_QWEN3_TTS}.configuration:Qwen3TTSTokenizerConfig",
}
"""By `model_type`: configurations that transformers does not have. Their modules import no model."""

OMNI_PIPELINES: dict[str, str] = {"GlmImagePipeline": "glm_image"}
"""By the class in `model_index.json`: names of stage configurations, for diffusers checkpoints with several stages."""

STAGE_KINDS: dict[str, str] = {
    "AR": "vllm_omni.kinds.vllm:Autoregressive",
    "generation": "vllm_omni.kinds.vllm:Generation",
    "DiT": "vllm_omni.kinds.diffusion:Diffusion",
    "transformers": "vllm_omni.kinds.transformers:Transformers",
    "function": "vllm_omni.kinds.function:Function",
    "fake": "vllm_omni.kinds.function:Fake",
}
"""By `engine_type`: the kinds of stages."""

_ADAPTERS = "vllm_omni.model_executor.speech_adapters"
_TRANSCRIBING = "vllm_omni.model_executor.transcription_adapters"

SPEECH_ADAPTERS: dict[str, str] = {
    "BarkModel": f"{_ADAPTERS}:Bark",
    "DiaForConditionalGeneration": f"{_ADAPTERS}:Dia",
    "FastSpeech2ConformerWithHifiGan": f"{_ADAPTERS}:FastSpeech2Conformer",
    "MoshiForConditionalGeneration": f"{_ADAPTERS}:Moshi",
    "MusicgenForConditionalGeneration": f"{_ADAPTERS}:Musicgen",
    "MusicgenMelodyForConditionalGeneration": f"{_ADAPTERS}:MusicgenMelody",
    "SeamlessM4TForSpeechToSpeech": f"{_ADAPTERS}:SeamlessM4T",
    "SeamlessM4TForTextToSpeech": f"{_ADAPTERS}:SeamlessM4T",
    "SeamlessM4TModel": f"{_ADAPTERS}:SeamlessM4T",
    "SeamlessM4Tv2ForSpeechToSpeech": f"{_ADAPTERS}:SeamlessM4T",
    "SeamlessM4Tv2ForTextToSpeech": f"{_ADAPTERS}:SeamlessM4T",
    "SeamlessM4Tv2Model": f"{_ADAPTERS}:SeamlessM4T",
    "SpeechT5ForTextToSpeech": f"{_ADAPTERS}:SpeechT5",
    "VitsModel": f"{_ADAPTERS}:Vits",
}
"""By the class of transformers: what its declarations do not tell."""

TRANSCRIPTION_ADAPTERS: dict[str, str] = {
    "KyutaiSpeechToTextForConditionalGeneration": f"{_TRANSCRIBING}:KyutaiSpeechToText",
    "SeamlessM4TForSpeechToText": f"{_TRANSCRIBING}:SeamlessM4TForSpeechToText",
    "SeamlessM4Tv2ForSpeechToText": f"{_TRANSCRIBING}:SeamlessM4TForSpeechToText",
}
"""By the class of transformers: what its tables do not tell."""

MODELS = ModelPackage(
    architectures=OMNI_MODELS,
    hf_configs=OMNI_CONFIGS,
    stage_configs=Path(__file__).parents[1] / "stage_configs",
    pipelines=OMNI_PIPELINES,
    stage_kinds=STAGE_KINDS,
    speech_adapters=SPEECH_ADAPTERS,
    transcription_adapters=TRANSCRIPTION_ADAPTERS,
)
