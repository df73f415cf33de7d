# SPDX-License-Identifier: Apache-2.0
"""What a chat request and its answer have besides what vLLM's have."""

from typing import Any, Literal

from openai.types.chat.chat_completion_audio import ChatCompletionAudio
from pydantic import Field, ModelWrapValidatorHandler, model_validator
from typing_extensions import Self
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatMessage
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel

Modality = Literal["text", "audio", "image", "video"]
AudioFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm16", "pcm"]


class AudioVoice(OpenAIBaseModel):
    id: str = Field(description="Its name.")


class ChatAudio(OpenAIBaseModel):
    """How the speech of an answer shall be."""

    format: AudioFormat | None = Field(None, description="Default: wav, and pcm16 in a stream.")
    voice: str | AudioVoice | None = Field(
        None, description="One of GET /v1/audio/voices; default: the first of them.", examples=["ethan"]
    )


class OmniChatCompletionRequest(ChatCompletionRequest):
    """OpenAI's and vLLM's fields, and those of a pipeline of stages."""

    modalities: list[Modality] | None = Field(
        None, description="The outputs wanted; default: all that the model has.", examples=[["text", "audio"]]
    )
    audio: ChatAudio | None = Field(None, description="How the speech shall be.")
    sampling_params_list: list[dict[str, Any] | None] | None = Field(
        None,
        description="Sampling parameters of each stage, in stage order; null for a stage's defaults. OpenAI's own "
        "fields apply to the stage that understands, and win over its entry here.",
        examples=[[{"temperature": 0.0}, {"temperature": 0.9}, None]],
    )
    extra_body: dict[str, Any] | None = Field(
        None,
        description="Settings of a diffusion model: height, width, num_inference_steps, guidance_scale, "
        "true_cfg_scale, seed, negative_prompt, num_outputs_per_prompt, num_frames.",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_what_cannot_be_checked(cls, data: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        """vLLM's checks reach into the raw fields, and stumble where these are not what they should be."""
        try:
            return check(data)
        except KeyError as error:
            raise ValueError(f"the field {error} is missing") from error
        except (AttributeError, IndexError, TypeError) as error:
            raise ValueError(f"a field is not what it should be: {error}") from error


class MediaMessage(ChatMessage):
    """A message of sound, or of images or videos as a list of content parts."""

    content: str | list[dict[str, Any]] | None = None  # type: ignore[assignment]
    audio: ChatCompletionAudio | None = None
