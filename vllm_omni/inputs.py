# SPDX-License-Identifier: Apache-2.0
"""The input of a pipeline, and of one of its stages. The structs cross processes as msgspec."""

from typing import Any, TypedDict

import msgspec
import torch
from vllm.inputs import EngineInput
from vllm.renderers import ChatParams
from vllm.renderers.chat_utils import ChatCompletionMessageParam
from vllm.sampling_params import SamplingParams

from vllm_omni.payloads import OmniEngineCoreRequest
from vllm_omni.sampling_params import DiffusionRequest


class OmniPrompt(TypedDict, total=False):
    """One prompt of `OmniLLM.generate`: vLLM's text, token or embedding prompt, with further keys.

    `negative_prompt` is for diffusion stages; it may be set in their sampling parameters instead. `multi_modal_data` is
    for the first stage; a diffusion stage reads its images, one or a list: `{"image": PIL.Image.open("cat.png")}`.
    `modalities` are the requested outputs (default: all outputs of the pipeline).
    `messages` is a conversation as in OpenAI's API, instead of a prompt: it is rendered with the chat template of the
    first stage's model and `chat_params`.
    `engine_input` is the first stage's prompt as rendered by vLLM, and replaces the keys of the raw prompt.
    `additional_information` holds tensors for the first stage's model, and plain values that every stage
    input processor can read as `StageRequest.options` (e.g. `{"speaker": "ethan"}`).
    """

    prompt: str
    prompt_token_ids: list[int]
    prompt_embeds: torch.Tensor
    messages: list[ChatCompletionMessageParam]
    chat_params: ChatParams
    engine_input: EngineInput
    multi_modal_data: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    negative_prompt: str | None
    modalities: list[str] | None
    additional_information: dict[str, Any]


class StageRequest(msgspec.Struct, kw_only=True):
    """One request for one stage, without the outputs of its sources.

    Attributes:
        request_id: The pipeline's id, unique for the pipeline's lifetime.
        modalities: The requested outputs; never empty.
        prompt: The prompt's text, if it is text.
        prompt_token_ids: The first stage's prompt, multimodal placeholders expanded.
        mm_metadata: Small multimodal fields declared by stage input processors, all items of the request
            stacked in prompt order, e.g. `image_grid_thw` int64 `[num_images, 3]`.
        options: Plain values of the prompt's `additional_information`.
        sampling_params: This stage's sampling parameters; None for stages that do not sample.
        engine_request: The first stage's preprocessed request; None for every other stage.
        diffusion: Parameters of a diffusion stage; None for every other stage.
        trace_headers: W3C trace context of the request (`traceparent`, ...); empty without tracing.
    """

    request_id: str
    modalities: list[str] = []
    prompt: str | None = None
    prompt_token_ids: list[int] = []
    mm_metadata: dict[str, torch.Tensor] = {}
    options: dict[str, Any] = {}
    sampling_params: SamplingParams | None = None
    engine_request: OmniEngineCoreRequest | None = None
    diffusion: DiffusionRequest | None = None
    trace_headers: dict[str, str] = {}


class StageInput(msgspec.Struct, kw_only=True):
    """The result of a stage input processor: the prompt of this stage's engine, or a later part of it.

    If the input arrives in windows, the first one has the whole prompt of an autoregressive stage and all its
    parameters. Later ones have more `additional_information` and a new `num_ready_tokens`. A stage that generates in
    one step runs one step for each window, with that window's prompt and information.

    A diffusion stage takes `prompt`, or `prompt_embeds`, and `additional_information`: further arguments of its
    pipeline, such as `negative_prompt` or `pooled_prompt_embeds`.

    Attributes:
        prompt: The prompt's text, for a diffusion stage.
        prompt_token_ids: Token ids, or as many placeholders as the model has input rows.
        prompt_embeds: `[len, hidden]`, instead of ids.
        additional_information: Tensors and plain values for the model's hooks.
        stop_token_ids: Added to the stage's stop tokens, so that configuration files need no token ids.
        max_tokens: Upper bound on the stage's `max_tokens`.
        num_ready_tokens: Tokens of the request, prompt and generated, that the engine can compute with what has
            arrived so far: an autoregressive stage holds the request, and it alone, when it has computed them. None
            means that it needs nothing more. The last window lifts the bound.
        finish_reason: Of a stage that generates in one step, with its last window: why its output ends there, e.g.
            `length` where its source was cut. Default: `stop`.
    """

    prompt: str | None = None
    prompt_token_ids: list[int] = []
    prompt_embeds: torch.Tensor | None = None
    additional_information: dict[str, Any] = {}
    stop_token_ids: list[int] = []
    max_tokens: int | None = None
    num_ready_tokens: int | None = None
    finish_reason: str | None = None
