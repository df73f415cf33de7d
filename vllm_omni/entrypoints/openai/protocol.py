# SPDX-License-Identifier: Apache-2.0
"""What a chat request has besides vLLM's fields."""

import argparse
from typing import Any, Literal, get_args

from pydantic import Field, ModelWrapValidatorHandler, model_validator
from typing_extensions import Self
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel

Modality = Literal["text", "audio", "image", "video"]
AudioFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm16", "pcm"]


def add_chat_flags(group: argparse._ActionsContainer) -> None:
    """What the server assumes where a chat request does not say."""
    group.add_argument(
        "--default-modalities",
        nargs="+",
        choices=get_args(Modality),
        metavar="MODALITY",
        help="Outputs of a chat request without `modalities`, such as `text audio`. Default: text, as in OpenAI's API; "
        "all outputs of a model that writes no text.",
    )


class AudioVoice(OpenAIBaseModel):
    id: str = Field(description="Its name.")


class ChatAudio(OpenAIBaseModel):
    """How the speech of an answer shall be."""

    format: AudioFormat | None = Field(None, description="Default: wav, and pcm16 in a stream.")
    voice: str | AudioVoice | None = Field(
        None, description="One of GET /v1/audio/voices; default: the first of them.", examples=["alloy"]
    )

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, AudioVoice) else self.voice


class OmniChatCompletionRequest(ChatCompletionRequest):
    """OpenAI's and vLLM's fields, and those of a pipeline of stages."""

    modalities: list[Modality] | None = Field(
        None,
        description="The outputs of the answer. Default: those of --default-modalities, else text, and of a model that "
        "writes no text all that it makes.",
        examples=[["text", "audio"]],
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
