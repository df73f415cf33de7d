# SPDX-License-Identifier: Apache-2.0
"""The input of a pipeline, and of one of its stages. The structs cross processes as msgspec."""

import copy
from collections.abc import AsyncIterable
from typing import Any, Literal, TypedDict

import msgspec
import torch
from vllm.inputs import EngineInput
from vllm.renderers import ChatParams
from vllm.renderers.chat_utils import ChatCompletionMessageParam
from vllm.sampling_params import SamplingParams

from vllm_omni.outputs import StageOutput
from vllm_omni.payloads import Guidance, OmniEngineCoreRequest
from vllm_omni.sampling_params import DiffusionRequest

VOICE_FIELD = "speaker"
"""The key of a prompt's `additional_information` that selects a voice."""


class ReplyParsers(msgspec.Struct, kw_only=True, frozen=True):
    """vLLM's parsers of a reply, and the tokenizer of the stage that writes it, by the names of vLLM's options."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    tool_parser_plugin: str | None = None
    reasoning_parser_plugin: str | None = None
    tokenizer: str
    tokenizer_mode: str = "auto"
    tokenizer_revision: str | None = None
    trust_remote_code: bool = False


class SpokenText(msgspec.Struct, kw_only=True, frozen=True):
    """Selects what of a reply is spoken: its content, and neither tool calls nor reasoning.

    Attributes:
        request: The fields of the chat completion request that the parsers read: `tools`, `tool_choice`, ...
        rows: The tensor of the writing stage that a stage which speaks reads; set for it alone. Empty: it reads text.
    """

    parsers: ReplyParsers
    request: dict[str, Any] = {}
    rows: str = ""


class OmniPrompt(TypedDict, total=False):
    """One prompt of `OmniLLM.generate`: vLLM's text, token or embedding prompt, with further keys.

    `negative_prompt` is for diffusion stages; it may be set in their sampling parameters instead. `multi_modal_data` is
    for the first stage; a diffusion stage reads its images, one or a list, and further media by the names of its
    diffusers pipeline: `{"image": PIL.Image.open("cat.png"), "mask_image": mask}`.
    `modalities` are the requested outputs (default: all outputs of the pipeline).
    `prompt` can be an async iterator of strings, for `AsyncOmniLLM` and a model that reads its text in pieces.
    `messages` is a conversation as in OpenAI's API, instead of a prompt: it is rendered with the chat template of the
    first stage's model and `chat_params`.
    `engine_input` is the first stage's prompt as rendered by vLLM, and replaces the keys of the raw prompt.
    `cache_salt` keeps the request from others' entries in the prefix caches, as in vLLM, in every stage.
    `additional_information` holds tensors for the first stage's model, and plain values that every stage
    input processor can read as `StageRequest.options` (e.g. `{"speaker": "ethan"}`). A model with a `PromptProcessor`
    declares which keys it reads, here and there.
    `stage` is the name of a stage that `accepts` input of a caller: the request begins there, with `prompt`, or with
    `multi_modal_data`, `{"audio": (waveform, samples per second)}` or `{"image": picture}`.
    `spoken_text` tells which part of a reply is spoken; without it all of it is.
    """

    prompt: str | AsyncIterable[str]
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
    cache_salt: str | None
    spoken_text: SpokenText | None
    stage: str


class TranscriptionParameters(msgspec.Struct, kw_only=True, frozen=True):
    """What a request may set of a vLLM stage that transcribes, beside vLLM's sampling parameters.

    Attributes:
        language: That is spoken, an ISO 639-1 code. None: the model finds it.
        prompt: Names, words, style, or what was said before; not every model reads it.
        task: `translate`: the text is English.
    """

    language: str | None = None
    prompt: str = ""
    task: Literal["transcribe", "translate"] = "transcribe"


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
        input_override: What the caller gives this stage in place of its source's output, see `OmniStageConfig.accepts`.
        parameters: Those of a stage that is a `FunctionStage`, or transcribes (`TranscriptionParameters`), by name, but
            for defaults of the class.
        is_complete: The prompt is complete; otherwise `InputMessage`s follow, up to the last one.
        num_ready_tokens: As in `StageInput`, of a prompt that is not complete.
        priority: Lower values come first; 0 where the stage does not schedule by priority.
        cache_salt: The prefix cache finds only requests with the same one.
        spoken_text: Of a stage that speaks a reply: which part of it. None: all of it.
        trace_headers: W3C trace context of the request (`traceparent`, ...); empty without tracing.
        sent_s: Seconds of sound that the caller of a stream has already, if it is made again.
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
    input_override: StageOutput | None = None
    parameters: dict[str, Any] = {}
    is_complete: bool = True
    num_ready_tokens: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    spoken_text: SpokenText | None = None
    trace_headers: dict[str, str] = {}
    sent_s: float = 0.0


class StageInput(msgspec.Struct, kw_only=True):
    """The result of a stage input processor or prompt processor: the prompt of this stage's engine, or a later part.

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
        token_information: Names in it of tensors `[n, ...]` whose row i is what the model reads for token i of the
            prompt, which begins with these n tokens. Prompts with the same first rows, and the same M-RoPE positions of
            them, have a common prefix in the prefix cache, whatever follows. Empty: only tokens are read.
        stop_token_ids: Added to the stage's stop tokens, so that configuration files need no token ids.
        max_tokens: Upper bound on the stage's `max_tokens`.
        seed: Of the stage's sampling, unless its parameters have one.
        guidance: Of an autoregressive stage. The engine computes two sequences, which share its
            `max_num_seqs`; callers see one. The input is complete.
        num_ready_tokens: Tokens of the request, prompt and generated, that the engine can compute with what has
            arrived so far: an autoregressive stage holds the request, and it alone, when it has computed them. None
            means that it needs nothing more. The last window lifts the bound.
        finish_reason: Of a stage that generates in one step, with its last window: why its output ends there, e.g.
            `length` where its source was cut. Default: `stop`.
        is_extensible: Of a stage that generates in one step: the next window may be added while this one waits, because
            windows of any size give the same output. Both have the same tensors in `additional_information`.
    """

    prompt: str | None = None
    prompt_token_ids: list[int] = []
    prompt_embeds: torch.Tensor | None = None
    additional_information: dict[str, Any] = {}
    token_information: list[str] = []
    stop_token_ids: list[int] = []
    max_tokens: int | None = None
    seed: int | None = None
    guidance: Guidance | None = None
    num_ready_tokens: int | None = None
    finish_reason: str | None = None
    is_extensible: bool = False

    def extended_by(self, later: "StageInput") -> "StageInput":
        """One window of two that follow each other: ids and tensors of both, and the plain values of this one."""
        information = dict(self.additional_information)
        for name, value in later.additional_information.items():
            if isinstance(value, torch.Tensor):
                information[name] = torch.cat((information[name], value))
        return msgspec.structs.replace(
            self,
            prompt_token_ids=[*self.prompt_token_ids, *later.prompt_token_ids],
            additional_information=information,
            finish_reason=later.finish_reason,
        )

    def as_prompt(self, cache_salt: str | None = None) -> dict[str, Any]:
        """The prompt of a vLLM stage. `cache_salt`: the request's."""
        prompt: dict[str, Any] = {"additional_information": self.additional_information}
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        if self.token_information:
            prompt["token_information"] = self.token_information
        if self.guidance is not None:
            prompt["guidance"] = self.guidance
        if self.prompt_embeds is not None:
            prompt["prompt_embeds"] = self.prompt_embeds
        else:
            prompt["prompt_token_ids"] = self.prompt_token_ids
        return prompt

    def apply_to(self, params: SamplingParams) -> SamplingParams:
        """A copy of a vLLM stage's parameters, with `stop_token_ids`, `max_tokens` and `seed`."""
        if self.stop_token_ids:
            # This copy runs vLLM's own set-up again: min_tokens must include these ids.
            params = msgspec.structs.replace(
                params, stop_token_ids=[*(params.stop_token_ids or ()), *self.stop_token_ids]
            )
        else:
            params = copy.copy(params)
        if self.max_tokens is not None:
            params.max_tokens = min(params.max_tokens or self.max_tokens, self.max_tokens)
        if params.seed is None:
            params.seed = self.seed
        return params
