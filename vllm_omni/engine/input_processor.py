# SPDX-License-Identifier: Apache-2.0
"""From a prompt to an engine's request: vLLM's input processing, with further inputs and checks.

Whatever could make a model raise is refused here, for this request alone, because an exception inside a step fails the
whole batch. Works without an engine: the pipeline's front end preprocesses prompts with it, and sends the request to
the stage's process.
"""

from importlib.util import find_spec
from typing import Any, TypedDict, cast

import torch
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.inputs import EngineInput, PromptType
from vllm.pooling_params import PoolingParams
from vllm.renderers import BaseRenderer, ChatParams
from vllm.renderers.chat_utils import ChatCompletionMessageParam
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from vllm_omni.engine.engine_args import OmniEngineSettings
from vllm_omni.errors import InvalidRequestError
from vllm_omni.payloads import AdditionalInformationPayload, OmniEngineCoreRequest, PromptEmbedsPayload


class PreprocessedPrompt(TypedDict):
    """A request that another `OmniInputProcessor` made, in the form of a prompt.

    `LLMEngine.add_request` deprecates requests but accepts any dict; it reads the two other keys.
    """

    engine_core_request: OmniEngineCoreRequest
    prompt: str | None
    prompt_token_ids: list[int] | None


class OmniInputProcessor(InputProcessor):
    """vLLM's input processor with additional information, embedding payloads and stricter checks.

    A prompt is any of vLLM's, raw or rendered; as a dict it can have two more keys:

    - `additional_information`: a dict of tensors and plain values for the model's hooks. Its key `mrope_positions`
      (int64 `[3, prompt_len]`), where present, sets the request's M-RoPE positions.
    - `prompt_embeds`: a tensor, as in vLLM, or a `PromptEmbedsPayload`.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._settings = OmniEngineSettings.from_vllm_config(vllm_config)
        if not self._settings.uses_generation_config:
            # vLLM always takes stop tokens from the generation config: a talker would stop at the text's last id, or
            # raise where that id is outside its vocabulary and a minimum length is set.
            self.generation_config_fields = {}
        _resample_without_torchaudio(self.renderer)
        self._dtype = cast(torch.dtype, self.model_config.dtype)  # vLLM has resolved the name.
        self._vocab_size = self.model_config.get_vocab_size()
        self._embeds_size = self.model_config.get_inputs_embeds_size()

    def process_inputs(
        self,
        request_id: str,
        prompt: PromptType | EngineInput | PreprocessedPrompt | dict[str, Any],
        params: SamplingParams | PoolingParams,
        supported_tasks: tuple[SupportedTask, ...] = ("generate",),
        *args: Any,
        tokenization_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> OmniEngineCoreRequest:
        """
        Args:
            args, kwargs: vLLM's.

        Raises:
            InvalidRequestError: The prompt or its parameters are invalid; the message names them.
        """
        if isinstance(prompt, dict) and "engine_core_request" in prompt:
            return cast(PreprocessedPrompt, prompt)["engine_core_request"]
        try:
            information = _take_additional_information(prompt)
            engine_input = self._render(prompt, tokenization_kwargs)
            request = super().process_inputs(request_id, engine_input, params, supported_tasks, *args, **kwargs)
            return self._finish(request, information)
        except (ValueError, TypeError, VLLMClientError) as error:
            raise InvalidRequestError(str(error), request_id) from error

    def render_chat(self, messages: list[ChatCompletionMessageParam], params: ChatParams) -> EngineInput:
        """A conversation, rendered by the model's chat template and tokenized, its media fetched and preprocessed.

        Raises:
            ValueError, TypeError, VLLMClientError: The messages are wrong, or the model has no chat template.
        """
        tokenize = is_mistral_tokenizer(self.renderer.tokenizer) or self.model_config.enable_prompt_embeds
        _, (engine_input,) = self.renderer.render_chat(
            [messages],
            params.with_defaults({"add_generation_prompt": True, "tokenize": tokenize}),
            # The chat template writes the special tokens.
            self.renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False),
            prompt_extras={"mm_processor_kwargs": params.mm_processor_kwargs} if params.mm_processor_kwargs else None,
            skip_mm_cache=True,  # See `_render`.
        )
        return engine_input

    def _render(self, prompt: Any, tokenization_kwargs: dict[str, Any] | None) -> EngineInput:
        """Tokenizes and preprocesses a raw prompt; a rendered one is returned as it is."""
        if isinstance(prompt, dict) and "type" in prompt:
            return cast(EngineInput, prompt)
        parsed = parse_model_prompt(self.model_config, prompt)
        if "prompt_embeds" in parsed:
            parsed = self._with_checked_embeds(parsed)
        tok_params = self.renderer.default_cmpl_tok_params.with_kwargs(**(tokenization_kwargs or {}))
        # The cache omits items that the engine has received before. Here the engine is in another process and may have
        # been restarted, so it is skipped. Items are still processed only once.
        return self.renderer.render_cmpl([parsed], tok_params, skip_mm_cache=True)[0]

    def _with_checked_embeds(self, prompt: dict[str, Any]) -> dict[str, Any]:
        embeds = self._check_embeds(prompt["prompt_embeds"])
        prompt = {**prompt, "prompt_embeds": embeds}
        if prompt.get("prompt_token_ids") is not None and prompt.get("prompt_is_token_ids") is None:
            # Without a mask vLLM would embed the ids and ignore the embeddings.
            prompt["prompt_is_token_ids"] = [False] * len(embeds)
        return prompt

    def _finish(self, request: EngineCoreRequest, information: dict[str, Any]) -> OmniEngineCoreRequest:
        num_tokens = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
        self._check_length(num_tokens)
        self._check_token_ids(request)
        _check_mrope_positions(information, num_tokens)
        payload = AdditionalInformationPayload.from_dict(information) if information else None
        return OmniEngineCoreRequest.from_engine_core_request(request, payload)

    def _check_embeds(self, embeds: torch.Tensor | PromptEmbedsPayload) -> torch.Tensor:
        """Prompt embeddings `[len, hidden]` in the model's dtype."""
        tensor = embeds.to_tensor() if isinstance(embeds, PromptEmbedsPayload) else embeds
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"prompt_embeds must be a tensor, got a {type(tensor).__name__}")
        if tensor.ndim == 3 and tensor.shape[0] == 1:
            tensor = tensor[0]
        if tensor.ndim != 2 or tensor.shape[1] != self._embeds_size:
            raise ValueError(f"prompt_embeds must be [len, {self._embeds_size}], got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ValueError(f"prompt_embeds must be floating point, got {tensor.dtype}")
        return tensor.detach().to(device="cpu", dtype=self._dtype)

    def _check_length(self, num_tokens: int) -> None:
        budget = self.scheduler_config.max_num_batched_tokens
        if self._settings.engine_type == "generation" and num_tokens > budget:
            raise ValueError(f"a prompt of {num_tokens} does not fit into one step of at most {budget} tokens")

    def _check_token_ids(self, request: EngineCoreRequest) -> None:
        """vLLM checks ids only with a tokenizer, and against its vocabulary instead of the model's."""
        token_ids = request.prompt_token_ids
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            return
        covered = _positions_without_token(request)
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < self._vocab_size and position not in covered:
                raise ValueError(f"token id {token_id} at position {position} is not in [0, {self._vocab_size})")


def _resample_without_torchaudio(renderer: BaseRenderer) -> None:
    """Audio of another sampling rate than the model's: vLLM uses torchaudio, which may not be installed."""
    if renderer.mm_processor is None or find_spec("torchaudio"):
        return
    resampler = renderer.mm_processor.info.data_parser.audio_resampler
    if resampler.method == "torchaudio":
        resampler.method = "pyav"


def _take_additional_information(prompt: Any) -> dict[str, Any]:
    if not isinstance(prompt, dict):
        return {}
    information = prompt.get("additional_information")
    if information is None:
        return {}
    if not isinstance(information, dict):
        raise TypeError(f"additional_information must be a dict, got a {type(information).__name__}")
    return information


def _positions_without_token(request: EngineCoreRequest) -> set[int]:
    """Positions of multimodal items and of prompt embeddings: their ids are placeholders and are not embedded."""
    positions: set[int] = set()
    for feature in request.mm_features or ():
        span = feature.mm_position
        positions.update(range(span.offset, span.offset + span.length))
    if request.prompt_is_token_ids is not None:
        positions.update(i for i, is_token in enumerate(request.prompt_is_token_ids) if not is_token)
    return positions


def _check_mrope_positions(information: dict[str, Any], num_tokens: int) -> None:
    positions = information.get("mrope_positions")
    if positions is None:
        return
    if not isinstance(positions, torch.Tensor) or positions.dtype != torch.int64:
        raise TypeError("mrope_positions must be an int64 tensor")
    if list(positions.shape) != [3, num_tokens]:
        raise ValueError(f"mrope_positions must be [3, {num_tokens}] for this prompt, got {list(positions.shape)}")
