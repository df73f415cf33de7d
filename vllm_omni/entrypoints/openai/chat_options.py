# SPDX-License-Identifier: Apache-2.0
"""What a chat request sets besides vLLM's fields: its outputs, the voice, and each stage's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient, RequestOptions
from vllm_omni.entrypoints.openai.media_messages import diffusion_settings
from vllm_omni.entrypoints.openai.protocol import OmniChatCompletionRequest
from vllm_omni.entrypoints.openai.stage_params import read_stage_params, said_by
from vllm_omni.errors import StageConfigError

# They change what is understood and not how much work it is, so that anybody may say them.
HARMLESS_MM_KWARGS = {"use_audio_in_video"}


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """
    Attributes:
        for_engine: What the pipeline is told.
        shows_text: Whether the answer has the text; that of speech only is its transcript.
        audio_format: How speech is encoded.
        trusts_mm_kwargs: The request's `mm_processor_kwargs` may be used also where clients are not trusted.
    """

    for_engine: RequestOptions
    shows_text: bool
    audio_format: str
    trusts_mm_kwargs: bool


def read_chat_options(
    request: OmniChatCompletionRequest, client: OmniEngineClient, default_modalities: Sequence[str]
) -> ChatOptions:
    """
    Args:
        default_modalities: The outputs of a request without `modalities`.

    Raises:
        VLLMValidationError: The request asks for what the model cannot do; says what it can.
    """
    wanted = read_modalities(request.modalities, client.config, default_modalities)
    media = [modality for modality in wanted if modality != "text"]
    if media and request.use_beam_search:
        raise VLLMValidationError(
            f"beam search is for text only; leave it out, or set modalities to ['text'] (not {wanted})",
            parameter="use_beam_search",
        )
    # Whoever asks for speech gets its transcript: the text is made anyway.
    needed = list(dict.fromkeys([*(["text"] if "text" in client.config.output_types else []), *wanted]))
    return ChatOptions(
        for_engine=RequestOptions(
            modalities=tuple(needed),
            stage_params=_stage_params(request, client.config),
            said=said_by(request),
            prompt=_voice(request, client, wanted),
        ),
        shows_text="text" in wanted,
        audio_format=_audio_format(request),
        trusts_mm_kwargs=set(request.mm_processor_kwargs or {}) <= HARMLESS_MM_KWARGS and not request.media_io_kwargs,
    )


def default_modalities(given: Sequence[str] | None, config: PipelineConfig) -> list[str]:
    """The outputs of a request without `modalities`: text, as in OpenAI's API, or all if the pipeline has no text.

    Args:
        given: `--default-modalities`, which replaces this.

    Raises:
        StageConfigError: The pipeline does not have one of them.
    """
    known = config.output_types
    for modality in given or ():
        if modality not in known:
            raise StageConfigError(
                f"--default-modalities {modality}: this model cannot output it; it outputs {', '.join(known)}"
            )
    return list(given or (["text"] if "text" in known else known))


def read_modalities(modalities: list[Any] | None, config: PipelineConfig, default: Sequence[str]) -> list[str]:
    """The outputs of a request.

    Raises:
        VLLMValidationError: There is none, or one that the pipeline does not have.
    """
    known = config.output_types
    if modalities is None:
        return list(default)
    for modality in modalities:
        if modality not in known:
            raise VLLMValidationError(
                f"this model cannot output {modality!r}; it outputs {', '.join(known)}",
                parameter="modalities",
                value=modality,
            )
    if not modalities:
        raise VLLMValidationError(f"modalities is empty; name some of {', '.join(known)}", parameter="modalities")
    return list(modalities)


def _stage_params(request: OmniChatCompletionRequest, config: PipelineConfig) -> list[Mapping[str, Any] | None]:
    params = read_stage_params(request.sampling_params_list, config)
    painting = [i for i, stage in enumerate(config.stage_args) if stage.kind == "DiT" and not stage.encodes_prompts]
    if request.extra_body and not painting:
        raise VLLMValidationError(
            "extra_body holds the settings of a diffusion model, and this model has none", parameter="extra_body"
        )
    for i in painting:
        params[i] = {**(params[i] or {}), **diffusion_settings(request.extra_body or {})}
    return params


def _voice(request: OmniChatCompletionRequest, client: OmniEngineClient, modalities: Sequence[str]) -> dict[str, Any]:
    if request.audio is None:
        return {}
    if "audio" not in client.config.output_types:
        raise VLLMValidationError(
            f"this model cannot speak; it outputs {', '.join(client.config.output_types)}", parameter="audio"
        )
    if "audio" not in modalities:
        raise VLLMValidationError(
            f"audio sets how an answer is spoken, and this one is not (modalities: {', '.join(modalities)}); "
            "add 'audio' to modalities, or leave audio out",
            parameter="audio",
        )
    return client.voices.read(request.audio.voice_name, "audio.voice")


def _audio_format(request: OmniChatCompletionRequest) -> str:
    said = None if request.audio is None else request.audio.format
    return said or ("pcm16" if request.stream else "wav")
