# SPDX-License-Identifier: Apache-2.0
"""Makes an engine's request of a prompt: vLLM's input processing, with further inputs and checks.

Whatever could make a model raise is refused here, for this request alone, because an exception inside a step fails the
whole batch. Works without an engine: the pipeline's front end preprocesses prompts with it, and sends the request to
the stage's process.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, TypedDict, cast

import msgspec
import torch
import vllm.envs as envs
from transformers import TokenizersBackend
from vllm.config import ModelConfig, VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.inputs import EngineInput, PromptType
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY
from vllm.pooling_params import PoolingParams
from vllm.renderers import BaseRenderer as BaseRenderer
from vllm.renderers.inputs.preprocess import parse_model_prompt as parse_model_prompt
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu.sample.logit_bias import (
    MAX_NUM_ALLOWED_TOKEN_IDS,
    MAX_NUM_LOGIT_BIAS_TOKENS,
    MAX_NUM_STOP_TOKEN_IDS,
)

from vllm_omni.engine.engine_args import OmniEngineSettings, message_of
from vllm_omni.engine.images import fetch_images, show_images
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs import ChatCompletionMessageParam, ChatParams
from vllm_omni.metrics.stats import CacheCounts
from vllm_omni.payloads import AdditionalInformationPayload, Guidance, OmniEngineCoreRequest, PromptEmbedsPayload

_TOKENIZER_METHODS = (
    "__call__", "batch_decode", "batch_encode", "convert_ids_to_tokens", "convert_tokens_to_ids",
    "convert_tokens_to_string", "decode", "encode",
)  # fmt: skip
"""Those for which vLLM borrows a copy: some change a tokenizer's settings, which fails while another one runs. Without
`apply_chat_template`: it calls these, and a template that takes long keeps nobody waiting."""


class PreprocessedPrompt(TypedDict):
    """A request that another `OmniInputProcessor` made, in the form of a prompt.

    `LLMEngine.add_request` deprecates requests but accepts any dict; it reads the two other keys.
    """

    engine_core_request: OmniEngineCoreRequest
    prompt: str | None
    prompt_token_ids: list[int] | None


class OmniInputProcessor(InputProcessor):
    """vLLM's input processor with additional information, embedding payloads and stricter checks.

    A prompt is any of vLLM's, raw or rendered; as a dict it can have five more keys:

    - `additional_information`: a dict of tensors and plain values for the model's hooks. Its key `mrope_positions`
      (int64 `[3, n]`), where present, sets the request's M-RoPE positions: of the whole prompt, and of the first
      tokens that it generates. After the last one they count on.
    - `prompt_embeds`: a tensor, as in vLLM, or a `PromptEmbedsPayload`.
    - `guidance`: a `Guidance`.
    - `token_information`: as in `StageInput`.
    - `forced_token_ids`: what is generated, instead of what the model would sample.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        share_tokenizer(vllm_config.model_config)
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
            further = prompt if isinstance(prompt, dict) else {}
            return self._finish(request, information, cast("dict[str, Any]", further))
        except (ValueError, TypeError, VLLMClientError) as error:
            raise InvalidRequestError(describe_refusal(error), request_id) from error

    def render_chat(
        self, messages: list[ChatCompletionMessageParam], params: ChatParams, cache_salt: str | None = None
    ) -> EngineInput:
        """A conversation, rendered by the model's chat template and tokenized, its media fetched and preprocessed.

        Raises:
            ValueError, TypeError, VLLMClientError: The messages are wrong, or the model has no chat template.
        """
        if (multimodal := self.model_config.multimodal_config) is not None:
            connector = MEDIA_CONNECTOR_REGISTRY.load(
                envs.VLLM_MEDIA_CONNECTOR,
                media_io_kwargs=params.media_io_kwargs or multimodal.media_io_kwargs,
                allowed_local_media_path=self.model_config.allowed_local_media_path,
                allowed_media_domains=self.model_config.allowed_media_domains,
            )
            messages = fetch_images(messages, connector)
        extras = {"mm_processor_kwargs": params.mm_processor_kwargs, "cache_salt": cache_salt}
        tokenize = is_mistral_tokenizer(self.renderer.tokenizer) or self.model_config.enable_prompt_embeds
        _, (engine_input,) = self.renderer.render_chat(
            [messages],
            params.with_defaults({"add_generation_prompt": True, "tokenize": tokenize}),
            # The chat template writes the special tokens.
            self.renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False),
            prompt_extras={name: value for name, value in extras.items() if value},
            skip_mm_cache=True,  # as in `_render`
        )
        return engine_input

    @property
    def media_cache_counts(self) -> CacheCounts:
        """Hits and queries of the cache of preprocessed media. May be read from any thread."""
        caches = (self.renderer.mm_processor_cache, self.renderer._mm_processor_only_cache)
        stats = [cache.make_stats() for cache in caches if isinstance(cache, MultiModalProcessorOnlyCache)]
        return CacheCounts(queries=sum(each.total for each in stats), hits=sum(each.hits for each in stats))

    def clear_media_cache(self) -> None:
        """Forgets preprocessed media."""
        self.renderer.clear_mm_cache()
        if (cache := self.renderer._mm_processor_only_cache) is not None:
            cache.clear_cache()

    def _render(self, prompt: Any, tokenization_kwargs: dict[str, Any] | None) -> EngineInput:
        """Tokenizes and preprocesses a raw prompt; a rendered one is returned as it is."""
        if isinstance(prompt, dict) and "type" in prompt:
            return cast(EngineInput, prompt)
        if isinstance(prompt, dict) and isinstance(media := prompt.get("multi_modal_data"), dict):
            prompt = {**prompt, "multi_modal_data": show_images(media)}
        parsed = parse_model_prompt(self.model_config, prompt)
        if "prompt_embeds" in parsed:
            parsed = self._with_checked_embeds(parsed)
        tok_params = self.renderer.default_cmpl_tok_params.with_kwargs(**(tokenization_kwargs or {}))
        # This skips the cache that vLLM's server uses on a thread of its own; there is another one for these calls.
        return self.renderer.render_cmpl([parsed], tok_params, skip_mm_cache=True)[0]

    def _with_checked_embeds(self, prompt: dict[str, Any]) -> dict[str, Any]:
        embeds = self._check_embeds(prompt["prompt_embeds"])
        prompt = {**prompt, "prompt_embeds": embeds}
        if prompt.get("prompt_token_ids") is not None and prompt.get("prompt_is_token_ids") is None:
            # Without a mask vLLM would embed the ids and ignore the embeddings.
            prompt["prompt_is_token_ids"] = [False] * len(embeds)
        return prompt

    def _finish(
        self,
        request: EngineCoreRequest,
        information: dict[str, Any],
        further: dict[str, Any],
    ) -> OmniEngineCoreRequest:
        guidance: Guidance | None = further.get("guidance")
        token_information: Sequence[str] = further.get("token_information", ())
        num_tokens = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
        self._check_length(num_tokens)
        self._check_token_ids(request)
        _check_mrope_positions(information, num_tokens)
        if self.vllm_config.use_v2_model_runner:
            _check_fits_v2_runner(request.sampling_params, information)
        _identify_together(request.mm_features or [])
        payload = AdditionalInformationPayload.from_dict(information) if information else None
        if self.cache_config.enable_prefix_caching and not token_information:
            self._identify(request, payload)
        if guidance is not None:
            self._check_guidance(guidance)
            params = request.sampling_params  # vLLM's copy
            assert params is not None and params.max_tokens is not None
            params.max_tokens = min(params.max_tokens, self.model_config.max_model_len - len(guidance.prompt_token_ids))
        return OmniEngineCoreRequest.from_engine_core_request(
            request, payload, guidance, token_information, further.get("forced_token_ids", ())
        )

    def _identify(self, request: EngineCoreRequest, payload: AdditionalInformationPayload | None) -> None:
        """A prompt in the prefix cache: what a model makes of its tokens may depend on additional information."""
        if payload is not None:
            digest = hashlib.sha256(msgspec.msgpack.encode(payload)).hexdigest()
            request.cache_salt = f"{request.cache_salt or ''}{digest}"
        if self._settings.emits_rows and self.model_config.enable_prompt_embeds:
            # It may read rows, and does not say which of them belong to which tokens.
            assert request.sampling_params is not None
            request.sampling_params.skip_reading_prefix_cache = True

    def _check_guidance(self, guidance: Guidance) -> None:
        if self._settings.engine_type != "ar" or self.vllm_config.speculative_config is not None:
            raise ValueError("guidance is for autoregressive stages without speculative decoding")
        if self.scheduler_config.async_scheduling:
            raise ValueError(
                "guidance needs a stage that is scheduled synchronously: set its async_scheduling to false"
            )
        if self.scheduler_config.max_num_seqs < 2:
            raise ValueError("guidance computes two sequences: raise the stage's max_num_seqs, which is 1")
        if not math.isfinite(guidance.scale):
            raise ValueError(f"guidance.scale must be a finite number, not {guidance.scale}")
        token_ids, max_model_len = guidance.prompt_token_ids, self.model_config.max_model_len
        if not 0 < len(token_ids) < max_model_len:
            raise ValueError(f"guidance.prompt_token_ids has {len(token_ids)} ids; max_model_len is {max_model_len}")
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise ValueError(f"guidance.prompt_token_ids has ids that are not in [0, {self._vocab_size})")

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


def describe_refusal(error: Exception) -> str:
    """An error about a prompt, in one sentence: vLLM's of a model's processor have all arrays of the prompt."""
    if error.__cause__ is None or not str(error).startswith("Failed to apply "):
        return message_of(error)
    cause = str(error.__cause__).partition("\n")[0]
    return f"the model does not read an image, sound or video of the prompt, which may be too short or narrow: {cause}"


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


def _identify_together(features: list[MultiModalFeatureSpec]) -> None:
    """Items that share a range of the prompt, as a video and its sound, get identifiers of all of them: vLLM's block
    hashes have the first item of a range only, and would find a video with another sound."""
    by_range: dict[tuple[int, int], list[MultiModalFeatureSpec]] = {}
    for feature in features:
        by_range.setdefault((feature.mm_position.offset, feature.mm_position.length), []).append(feature)
    for together in by_range.values():
        if len(together) > 1:
            digest = hashlib.sha256("".join(feature.identifier for feature in together).encode()).hexdigest()
            for feature in together:
                feature.identifier = f"{feature.identifier}-{digest}"


def _check_mrope_positions(information: dict[str, Any], num_tokens: int) -> None:
    positions = information.get("mrope_positions")
    if positions is None:
        return
    if not isinstance(positions, torch.Tensor) or positions.dtype != torch.int64:
        raise TypeError("mrope_positions must be an int64 tensor")
    if positions.ndim != 2 or positions.shape[0] != 3 or positions.shape[1] < num_tokens:
        raise ValueError(
            f"mrope_positions must be [3, {num_tokens}] or longer for this prompt, got {list(positions.shape)}"
        )


def _check_fits_v2_runner(params: SamplingParams | None, information: dict[str, Any]) -> None:
    """vLLM's V2 model runner has tables of fixed size, and raises in a step where there is no room."""
    assert params is not None, "stages take no pooling requests"
    if "mrope_positions" in information:
        raise ValueError("mrope_positions need a stage whose async_scheduling is false")
    stop_token_ids = params.all_stop_token_ids if params.min_tokens else ()
    for name, num_tokens, limit in (
        ("allowed_token_ids", len(params.allowed_token_ids or ()), MAX_NUM_ALLOWED_TOKEN_IDS),
        ("logit_bias", len(params.logit_bias or ()), MAX_NUM_LOGIT_BIAS_TOKENS),
        ("stop_token_ids with min_tokens", len(stop_token_ids), MAX_NUM_STOP_TOKEN_IDS),
        ("bad_words", sum(map(len, params.bad_words_token_ids or ())), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    ):
        if num_tokens > limit:
            raise ValueError(
                f"{name}: at most {limit} tokens, not {num_tokens}; a stage whose async_scheduling is false takes more"
            )


def share_tokenizer(config: ModelConfig) -> None:
    """Makes the tokenizer that vLLM keeps for a model one for several threads. For use before a renderer has it.

    vLLM makes two deep copies of a tokenizer of Hugging Face for a renderer, so that no thread waits for another: of
    one with 49,000 words 20 MB and 0.3 s each. A stage's process has one thread that tokenizes, and a server one for
    prompts, beside which others look up single tokens. So here threads take turns.
    """
    tokenizer = cached_tokenizer_from_config(config)
    if isinstance(tokenizer, TokenizersBackend) and not isinstance(tokenizer, ThreadSafeHFTokenizerMixin):
        tokenizer.__class__ = _shared_class(type(tokenizer))


def _shared_class(tokenizer_class: type[TokenizersBackend]) -> type[TokenizersBackend]:
    """A class of its own for one tokenizer and its shallow copies, whose methods run one at a time."""
    lock = threading.RLock()

    def method(name: str) -> Callable[..., Any]:
        def call(self: TokenizersBackend, *args: Any, **kwargs: Any) -> Any:
            with lock:
                return getattr(tokenizer_class, name)(self, *args, **kwargs)

        return call

    methods = {name: method(name) for name in _TOKENIZER_METHODS} | {"__copy__": _shallow_copy}
    return type(f"Shared{tokenizer_class.__name__}", (ThreadSafeHFTokenizerMixin, tokenizer_class), methods)


def _shallow_copy(tokenizer: TokenizersBackend) -> TokenizersBackend:
    """A tokenizer with the same vocabulary. vLLM's own copies list all words again."""
    copied = type(tokenizer).__new__(type(tokenizer))
    vars(copied).update(vars(tokenizer))
    return copied
