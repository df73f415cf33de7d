# SPDX-License-Identifier: Apache-2.0
"""Builds the requests of each stage from a prompt.

Rendering, tokenizing and multimodal preprocessing happen here, in the caller's process, with vLLM's own input
processor; the first stage receives a request that is ready for its engine. Wrong input is refused here.
"""

import copy
import dataclasses
import itertools
import secrets
import threading
import time
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import torch
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.config.utils import nearest
from vllm_omni.diffusion.input_images import read_images
from vllm_omni.engine.engine_args import message_of
from vllm_omni.engine.input_processor import OmniInputProcessor, describe_refusal
from vllm_omni.engine.text_decoder import TextDecoder
from vllm_omni.entrypoints.text_input import TextInput
from vllm_omni.errors import InvalidRequestError, StageConfigError
from vllm_omni.events import OmniEvent
from vllm_omni.function_stage import CALLER, SOUND_RATE
from vllm_omni.inputs import ChatParams, OmniPrompt, StageRequest
from vllm_omni.kinds.parameters import REF_AUDIO, FunctionParameters, load_function_parameters
from vllm_omni.metrics.stats import CacheCounts
from vllm_omni.model_executor.prompt_processor import PromptProcessor, load_prompt_processors, read_sound, read_text
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor, load_stage_input_processor
from vllm_omni.orchestrator.request import PipelineRequest
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.payloads import OmniEngineCoreRequest
from vllm_omni.sampling_params import DiffusionRequest, DiffusionSamplingParams

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces import SupportsTranscription

    from vllm_omni.diffusion.input_processor import DiffusionInputProcessor

_T = TypeVar("_T")
_PROMPT_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "prompt": ((str, AsyncIterable), "a string"),
    "prompt_token_ids": ((list, tuple), "a list of token ids"),
    "messages": ((list, tuple), "a list of messages"),
    "chat_params": (ChatParams, "vLLM's ChatParams"),
    "engine_input": (Mapping, "a prompt that vLLM has rendered"),
    "multi_modal_data": (Mapping, "a dict, such as {'image': image}"),
    "mm_processor_kwargs": (Mapping, "a dict"),
    "negative_prompt": (str, "a string"),
    "additional_information": (Mapping, "a dict"),
    "cache_salt": (str, "a string"),
    "stage": (str, "the name of a stage"),
}
_RAW_PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "multi_modal_data", "mm_processor_kwargs")

MAX_SOUND_S = 3600.0
"""Of a sound that is given to a stage."""
MAX_SOUND_BESIDE_TEXT_S = 30.0
"""As long as what such models make, and write after it."""
MAX_PIXELS = 64 << 20
"""Of an image that is given to a stage."""
_MEDIA = ("audio", "image")
"""What stages accept in `multi_modal_data`."""

_PARAMS = (SamplingParams, DiffusionSamplingParams, Mapping)
StageSamplingParams = SamplingParams | DiffusionSamplingParams | Mapping[str, Any] | None


class RequestBuilder:
    """Builds the requests of one pipeline. Thread-safe.

    Attributes:
        input_processors: Those of the vLLM stages that read prompts, by stage id.
        prompt_processors: Those that models have, by stage id.
        function_parameters: Of the stages that are a `FunctionStage`, and of those that transcribe, by stage id.
        lock: For calls of processors and tokenizers, which are not thread-safe.
    """

    def __init__(self, config: PipelineConfig, model: str) -> None:
        self._config = config
        self._ids = itertools.count()
        self.lock = threading.Lock()
        self.input_processors: dict[int, OmniInputProcessor] = _of_stages(
            config, lambda stage: stage.kind.make_input_processor(model)
        )
        self._transcription_models: dict[int, type[SupportsTranscription]] = _of_stages(
            config, lambda stage: stage.kind.load_transcription_model(model)
        )
        self._diffusion_processors: dict[int, DiffusionInputProcessor] = _of_stages(
            config, lambda stage: stage.kind.make_diffusion_processor(model)
        )
        self.prompt_processors = load_prompt_processors(config, model)
        self.function_parameters = load_function_parameters(config)
        self._reads_sound = any(each.sound_rate is not None for each in self.function_parameters.values())
        self._encoded_for: dict[int, int] = _of_stages(
            config, lambda stage: stage.kind.params_from([config.stages[i] for i in config.targets[stage.stage_id]])
        )
        self._adapter_stages = config.adapter_stages
        self._processors = load_processors(config, model)
        self._mm_metadata_keys = {key for processor in self._processors.values() for key in processor.mm_metadata_keys}
        self._default_params = {
            stage.stage_id: self._make_default_params(stage)
            for stage in config.stage_args
            if stage.kind.params == "sampling"
        }
        # A GPU's sampler has a kernel call for each request with a seed.
        self._draws_seeds = current_platform.is_cpu() and config.runtime.restart.max_restarts > 0

    def build(
        self,
        prompt: str | OmniPrompt,
        sampling_params_list: Sequence[StageSamplingParams] | StageSamplingParams,
        on_event: Callable[[OmniEvent], None],
        *,
        request_id: str | None = None,
        streams: bool = False,
        keep_outputs: bool = True,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: LoRARequest | None = None,
        request_fields: Mapping[str, Any] | None = None,
        priority: int = 0,
        text: TextInput | None = None,
    ) -> PipelineRequest:
        """
        Args:
            sampling_params_list: One for each stage, in stage order; None, or a None in it, means the defaults. A
                dict replaces single defaults, `SamplingParams` all of them. A pipeline of one stage takes a single one.
            on_event: See `PipelineRequest`.
            request_id: The caller's id. Default: a number.
            streams, keep_outputs: See `PipelineRequest`.
            trace_headers: W3C trace context of the caller.
            lora_request: The adapter of the first stage; if that only encodes prompts for a diffusion stage, of the
                latter.
            request_fields: Fields of vLLM's `EngineCoreRequest` for the stages that read the prompt.
            priority: Lower values come first, in admission and in the stages that schedule by priority.
            text: The prompt's, if it arrives in pieces: its first input is the request's.

        Raises:
            InvalidRequestError: The prompt or the parameters are wrong; with the remedy.
        """
        arrival = time.monotonic()
        number = next(self._ids)
        external_id = str(number) if request_id is None else request_id
        # A caller's id may be reused; ours is unique, so that no late message is assigned to a new request.
        internal_id = external_id if request_id is None else f"{request_id}-{number}"
        try:
            _check_settings(lora_request, priority)
            with self.lock:
                prompt = self._with_rendered_chat(_as_prompt(prompt))
                stages, final_stages = self._build(
                    internal_id, prompt, sampling_params_list, lora_request, request_fields or {}, text, streams
                )
                decoders = self._make_decoders(stages, final_stages)
            self._set_priority(stages, priority)
        except (ValueError, TypeError, VLLMClientError) as error:
            raise InvalidRequestError(message_of(error), external_id) from error
        return PipelineRequest(
            request_id=internal_id,
            external_id=external_id,
            stages=stages,
            final_stages=final_stages,
            on_event=on_event,
            streams=streams,
            keep_outputs=keep_outputs,
            timeout_s=self._config.runtime.request_timeout_s or None,
            arrival=arrival,
            trace_headers=dict(trace_headers or {}),
            priority=next(iter(stages.values())).priority,
            decoders=decoders,
        )

    def _make_decoders(self, stages: Mapping[int, StageRequest], final_stages: Sequence[int]) -> dict[int, TextDecoder]:
        """Makes the decoders of the final stages whose text no other stage reads."""
        decoders = {}
        for stage_id in final_stages:
            request = stages[stage_id].engine_request
            is_read = any(target in stages for target in self._config.targets[stage_id])
            if request is None or is_read or not self._config.stages[stage_id].kind.emits_only_text:
                continue
            tokenizer = self.input_processors[stage_id].renderer.tokenizer
            if (decoder := TextDecoder.take_over(tokenizer, request)) is not None:
                decoders[stage_id] = decoder
        return decoders

    def is_quick(
        self,
        prompt: str | OmniPrompt,
        sampling_params_list: Sequence[StageSamplingParams] | StageSamplingParams = None,
    ) -> bool:
        """Whether a prompt is text that vLLM's server has tokenized, without a grammar, which vLLM would parse: its
        request is built in a fraction of a millisecond."""
        params = sampling_params_list if isinstance(sampling_params_list, Sequence) else [sampling_params_list]
        return (
            not any(isinstance(each, SamplingParams) and each.structured_outputs for each in params)
            and isinstance(prompt, Mapping)
            and prompt.keys() == {"engine_input", "modalities"}
            and prompt["engine_input"].get("type") == "token"  # A raw prompt has no type.
            and not self.prompt_processors
        )

    def _set_priority(self, stages: dict[int, StageRequest], priority: int) -> None:
        for stage_id, request in stages.items():
            if self._config.stages[stage_id].kind.schedules_by_priority:
                request.priority = priority
                if request.engine_request is not None:
                    request.engine_request.priority = priority

    def media_cache_counts(self) -> CacheCounts:
        """Hits and queries of the caches of preprocessed media. May be called from any thread."""
        return sum((processor.media_cache_counts for processor in self.input_processors.values()), CacheCounts())

    def clear_media_cache(self) -> None:
        """Forgets preprocessed media."""
        with self.lock:
            for processor in self.input_processors.values():
                processor.clear_media_cache()

    @property
    def voices(self) -> list[str]:
        """The voices of all stages, the default one first."""
        return list_voices(self.prompt_processors, self._processors, self.function_parameters)

    @property
    def prompt_fields(self) -> frozenset[str]:
        """The keys of a prompt's `additional_information` that prompt processors and function stages declare."""
        declared = {name for processor in self.prompt_processors.values() for name in processor.fields}
        declared |= {name for each in self.function_parameters.values() for name in each.prompt_fields}
        return frozenset(declared - OmniPrompt.__annotations__.keys())

    @property
    def prompt_stage(self) -> OmniStageConfig | None:
        """The vLLM stage that a chat is rendered for: of the stages that read vLLM's prompts the one with
        `is_comprehension`, else the first; None if there is none."""
        reading = [
            stage
            for stage in self._config.stage_args
            if stage.stage_id in self.input_processors and stage.stage_id not in self.prompt_processors
        ]
        return next((stage for stage in reading if stage.is_comprehension), reading[0] if reading else None)

    def default_values(self, stage: OmniStageConfig) -> Mapping[str, Any]:
        """The default sampling parameters of a vLLM stage."""
        processor = self.input_processors.get(stage.stage_id)
        return stage.kind.default_params(None if processor is None else processor.model_config.get_diff_sampling_param)

    def read_parameters(self, stage_id: int, given: Any, information: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of a stage that is a `FunctionStage`, or transcribes. See `FunctionParameters.read`; what is
        wrong with a language that is transcribed is an error, too."""
        parameters = self.function_parameters[stage_id].read(given, information)
        if (model := self._transcription_models.get(stage_id)) is not None:
            model.validate_language(parameters.get("language"))
        return parameters

    def _build(
        self,
        request_id: str,
        prompt: OmniPrompt,
        sampling_params_list: Sequence[StageSamplingParams] | StageSamplingParams,
        lora_request: LoRARequest | None,
        request_fields: Mapping[str, Any],
        text: TextInput | None,
        streams: bool,
    ) -> tuple[dict[int, StageRequest], list[int]]:
        """The request of each stage, and the final stages."""
        start = self._named_stage(prompt)
        modalities = self._check_modalities(prompt.get("modalities"), start)
        given = self._params_by_stage(sampling_params_list)
        params = self._sampling_params(given)
        if streams and self._draws_seeds:
            params = {stage_id: _seeded(each) for stage_id, each in params.items()}
        stage_ids = self._config.stages_for(modalities, None if start is None else start.stage_id)
        diffusion = self._diffusion_requests(prompt, given, stage_ids, lora_request)
        if text is None:
            settings = next((request.params for request in reversed(diffusion.values())), None)
            processors = self.prompt_processors.items()
            inputs = {i: processor(prompt, settings) for i, processor in processors if i in stage_ids}
        else:
            inputs = {text.stage_id: text.first}
        params |= {stage_id: stage_input.apply_to(params[stage_id]) for stage_id, stage_input in inputs.items()}
        for stage_id in inputs:
            self.prompt_processors[stage_id].validate(params[stage_id])
        cache_salt: Any = (prompt.get("engine_input") or prompt).get("cache_salt")
        engine_requests = {
            stage_id: processor.process_inputs(
                request_id,
                inputs[stage_id].as_prompt(cache_salt)
                if stage_id in inputs
                else self._engine_prompt(prompt, processor),
                params[stage_id],
                supported_tasks=("generate",),
                lora_request=lora_request,
            )
            for stage_id, processor in self.input_processors.items()
            if stage_id in stage_ids
        }
        for engine_request in engine_requests.values():
            for name, value in request_fields.items():
                setattr(engine_request, name, value)
        first = next(iter(engine_requests.values()), None)
        information = dict(prompt.get("additional_information") or {})
        sound = (prompt.get("multi_modal_data") or {}).get("audio")
        if self._reads_sound:
            sound = information.pop(REF_AUDIO, sound)
        parameters = {i: self.read_parameters(i, given.get(i), information) for i in self.function_parameters}
        if inputs:
            information = {key: value for each in inputs.values() for key, value in each.additional_information.items()}
        original = StageRequest(
            request_id=request_id,
            modalities=modalities,
            prompt=given_text if isinstance(given_text := prompt.get("prompt"), str) else None,
            prompt_token_ids=[] if first is None else first.prompt_token_ids or [],
            mm_metadata={} if first is None else _mm_metadata(first, self._mm_metadata_keys),
            options={key: value for key, value in information.items() if not isinstance(value, torch.Tensor)},
            cache_salt=cache_salt,
        )
        stages = {
            stage_id: msgspec.structs.replace(
                original,
                sampling_params=params.get(stage_id),
                engine_request=engine_requests.get(stage_id),
                diffusion=diffusion.get(stage_id),
                parameters=parameters.get(stage_id, {}),
            )
            for stage_id in stage_ids
        }
        if start is not None:
            stages[start.stage_id].input_override = _read_override(request_id, start, prompt)
        is_read = self._add_sound(stages, prompt, sound) or engine_requests or diffusion or start is not None
        if prompt.get("multi_modal_data") and not is_read:
            raise ValueError("multi_modal_data: no stage of this pipeline reads any; remove it")
        if text is not None:
            stages[text.stage_id].is_complete = text.is_complete
            stages[text.stage_id].num_ready_tokens = text.first.num_ready_tokens
        spoken_text = prompt.get("spoken_text")
        for stage_id in stage_ids:
            if self._speaks_text(self._config.stages[stage_id]):
                stages[stage_id].spoken_text = spoken_text
            if stage_id in self._processors:
                rows = self._processors[stage_id].spoken_rows
                if spoken_text is not None and rows is not None:
                    stages[stage_id].spoken_text = msgspec.structs.replace(spoken_text, rows=rows)
                self._processors[stage_id].validate(stages[stage_id])
        return stages, self._config.final_stages(modalities, None if start is None else start.stage_id)

    def _add_sound(self, stages: Mapping[int, StageRequest], prompt: OmniPrompt, sound: Any) -> bool:
        """Adds the sound, if any, of a prompt with a text to a stage that reads both. Whether there is one."""
        for stage_id, request in stages.items() if sound is not None else ():
            stage, parameters = self._config.stages[stage_id], self.function_parameters.get(stage_id)
            if parameters is None or parameters.sound_rate is None:
                continue
            if request.input_override is None and not stage.engine_input_source:
                request.input_override = _read_override(request.request_id, stage, prompt)
            if request.input_override is not None:  # Else it reads the text that another stage writes.
                wave = read_sound(sound, "audio", parameters.sound_rate, MAX_SOUND_BESIDE_TEXT_S)
                request.input_override.tensors = {"audio": wave}
                return True
        return False

    def _speaks_text(self, stage: OmniStageConfig) -> bool:
        """Whether it is a stage that speaks the text of a chat's answer."""
        writer = self.prompt_stage
        reads_it = writer is not None and stage.engine_input_source == [writer.stage_id]
        return reads_it and stage.kind.speaks_replies and stage.final_output_type == "audio"

    def _named_stage(self, prompt: OmniPrompt) -> OmniStageConfig | None:
        """The stage at which a request begins that names one. Any other begins at all first stages (None); where each
        of those accepts something, and one of them audio or an image, at the one that accepts what it has."""
        name = prompt.get("stage")
        if name is None:
            first = {stage.accepts: stage for stage in self._config.stage_args if not stage.engine_input_source}
            media = [kind for kind in _MEDIA if kind in first]
            if None in first or not media:
                return None
            given = prompt.get("multi_modal_data") or {}
            return first.get(next((kind for kind in media if kind in given), "text"), first[media[0]])
        accepting = {stage.name: stage for stage in self._config.stage_args if stage.accepts is not None}
        if name not in accepting:
            known = f"it has {', '.join(accepting)}" if accepting else "it has none"
            raise ValueError(f"this pipeline has no stage {name!r} that accepts input of a caller ({known})")
        return accepting[name]

    def _with_rendered_chat(self, prompt: OmniPrompt) -> OmniPrompt:
        """The prompt with its `messages`, if it has any, rendered as `engine_input`, unless the model does it."""
        if "messages" not in prompt or self.prompt_processors:
            return prompt
        others = [key for key in _RAW_PROMPT_KEYS if key in prompt]
        if others:
            raise ValueError(f"a prompt has messages or {others[0]}, not both")
        if self.prompt_stage is None:
            raise ValueError("no stage of this pipeline has a chat template; use prompt instead of messages")
        processor = self.input_processors[self.prompt_stage.stage_id]
        _check_messages(prompt["messages"])
        try:
            engine_input = processor.render_chat(
                prompt["messages"], prompt.get("chat_params") or ChatParams(), prompt.get("cache_salt")
            )
        except (NotImplementedError, OSError) as error:  # media that vLLM cannot load
            raise ValueError(f"messages: {error}") from error
        except (AttributeError, LookupError) as error:  # vLLM checks some parts only
            raise ValueError(f"messages: a part of a message has the wrong form: {error}") from error
        except ValueError as error:
            raise ValueError(describe_refusal(error)) from error
        rendered = {key: value for key, value in prompt.items() if key not in ("messages", "chat_params")}
        return cast(OmniPrompt, {**rendered, "prompt": engine_input.get("prompt"), "engine_input": engine_input})

    def _check_modalities(self, modalities: list[str] | None, start: OmniStageConfig | None) -> list[str]:
        known = self._config.output_types_from(None if start is None else start.stage_id)
        if modalities is None:
            return known
        if not isinstance(modalities, (list, tuple)) or not modalities:
            raise ValueError(f"modalities must be a list of values in {known}, not {modalities!r}")
        for modality in modalities:
            if modality not in known:
                hint = nearest(str(modality), known)
                raise ValueError(f"this pipeline cannot output {modality!r}{hint} (it has {known})")
        return list(modalities)

    def _params_by_stage(
        self, given: Sequence[StageSamplingParams] | StageSamplingParams
    ) -> dict[int, StageSamplingParams]:
        """The caller's parameters of each stage."""
        if given is None:
            return {}
        stages = self._config.stage_args
        is_single = isinstance(given, _PARAMS)
        if not is_single and (isinstance(given, str) or not isinstance(given, Sequence)):
            raise TypeError(f"sampling_params_list must be a list, not {type(given).__name__}")
        entries = cast("Sequence[StageSamplingParams]", [given] if is_single else given)
        if len(entries) != len(stages):
            names = ", ".join(stage.name for stage in stages)
            raise ValueError(
                f"sampling_params_list must have one entry for each of the {len(stages)} stages ({names}), "
                "with None for a stage's defaults"
            )
        for stage, entry in zip(stages, entries, strict=True):
            if entry is not None and not isinstance(entry, _PARAMS):
                raise TypeError(
                    f"sampling_params_list: stage {stage.name!r} takes SamplingParams, a dict of their fields, or "
                    f"None, not {type(entry).__name__}"
                )
        return {stage.stage_id: entry for stage, entry in zip(stages, entries, strict=True)}

    def _sampling_params(self, given: Mapping[int, StageSamplingParams]) -> dict[int, SamplingParams]:
        params = dict(self._default_params)
        for stage_id in params:
            entry = given.get(stage_id)
            if isinstance(entry, Mapping):
                stage = self._config.stages[stage_id]
                entry = {**self.default_values(stage), **stage.kind.sampling_values(entry)}
            if entry is not None:
                params[stage_id] = _as_sampling_params(entry, self._config.stages[stage_id])
        return params

    def _diffusion_requests(
        self,
        prompt: OmniPrompt,
        given: Mapping[int, StageSamplingParams],
        stage_ids: Sequence[int],
        lora_request: LoRARequest | None,
    ) -> dict[int, DiffusionRequest]:
        if prompt.get("negative_prompt") is not None and not self._diffusion_processors:
            raise ValueError("negative_prompt is for diffusion stages, and this pipeline has none; remove it")
        for encoder, reader in self._encoded_for.items():
            if given.get(encoder) is not None:
                names = [self._config.stages[stage_id].name for stage_id in (encoder, reader)]
                raise ValueError(
                    f"stage {names[0]!r} uses the sampling parameters of stage {names[1]!r}: set it to None"
                )
        return {
            stage_id: processor.process(
                prompt,
                given.get(self._encoded_for.get(stage_id, stage_id)),
                lora_request if stage_id in self._adapter_stages else None,
            )
            for stage_id, processor in self._diffusion_processors.items()
            if stage_id in stage_ids
        }

    def _engine_prompt(self, prompt: OmniPrompt, processor: OmniInputProcessor) -> dict[str, Any]:
        """The part of a prompt that a vLLM stage reads."""
        if "engine_input" in prompt:
            return {**prompt["engine_input"], "additional_information": prompt.get("additional_information")}
        excluded = {"modalities", "negative_prompt"}
        if not processor.model_config.is_multimodal_model and any(
            later.reads_images for later in self._diffusion_processors.values()
        ):
            excluded.add("multi_modal_data")  # It is for the diffusion stage; this stage reads text only.
        return {key: value for key, value in prompt.items() if key not in excluded and value is not None}

    def _make_default_params(self, stage: OmniStageConfig) -> SamplingParams:
        try:
            return _as_sampling_params(self.default_values(stage), stage)
        except (ValueError, TypeError, VLLMClientError) as error:
            raise StageConfigError(f"default_sampling_params: {error}") from error


def _of_stages(config: PipelineConfig, make: Callable[[OmniStageConfig], _T | None]) -> dict[int, _T]:
    """What is made of each stage, by stage id; without those of which there is none."""
    made = {stage.stage_id: make(stage) for stage in config.stage_args}
    return {stage_id: each for stage_id, each in made.items() if each is not None}


def load_processors(config: PipelineConfig, model: str) -> dict[int, StageInputProcessor]:
    """The stage input processors of a checkpoint's pipeline, by stage id."""
    return _of_stages(config, lambda stage: load_stage_input_processor(stage, stage.checkpoint(model)))


def list_voices(
    *stages: Mapping[int, PromptProcessor] | Mapping[int, StageInputProcessor] | Mapping[int, FunctionParameters],
) -> list[str]:
    """The voices of all stages, the default one first."""
    return list(dict.fromkeys(voice for group in stages for each in group.values() for voice in each.voices))


def _read_override(request_id: str, stage: OmniStageConfig, prompt: OmniPrompt) -> StageOutput:
    """What a caller gives a stage, as the output of a stage before it."""
    given = StageOutput(request_id=request_id, stage_id=CALLER)
    if stage.accepts not in _MEDIA:
        text = read_text(prompt.get("prompt"), "prompt")
        given.completions = [Completion(text=text, finish_reason="stop")]
        return given
    media = prompt.get("multi_modal_data") or {}
    if stage.accepts == "audio":
        if media.get("audio") is None:
            raise ValueError("there is no sound: multi_modal_data['audio'] must be (waveform, samples per second)")
        given.tensors = {"audio": read_sound(media["audio"], "audio", SOUND_RATE, MAX_SOUND_S)}
    else:
        images = read_images({"image": media.get("image")}, MAX_PIXELS)
        if len(images) != 1:
            raise ValueError(
                f"stage {stage.name!r} takes one image, not {len(images)}: multi_modal_data={{'image': picture}}"
            )
        given.tensors = {"image": images[0]}
    return given


def _mm_metadata(request: OmniEngineCoreRequest, keys: set[str]) -> dict[str, torch.Tensor]:
    """The declared multimodal fields of a request, items stacked in prompt order."""
    items: dict[str, list[torch.Tensor]] = {}
    for feature in request.mm_features or ():
        for key, element in (feature.data or {}).items():
            if key in keys and isinstance(element.data, torch.Tensor):
                items.setdefault(key, []).append(element.data)
    return {key: torch.stack(tensors) for key, tensors in items.items()}


def _check_settings(lora_request: Any, priority: Any) -> None:
    if lora_request is not None and not isinstance(lora_request, LoRARequest):
        raise TypeError(f"lora_request must be a LoRARequest of vLLM, not {type(lora_request).__name__}")
    if not isinstance(priority, int):
        raise TypeError(f"priority must be an integer, not {type(priority).__name__}")


def _as_prompt(prompt: str | OmniPrompt) -> OmniPrompt:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        raise TypeError(f"a prompt is a string or a dict with the key 'prompt', not {type(prompt).__name__}")
    known = OmniPrompt.__annotations__
    for key, value in prompt.items():
        if key not in known:
            raise ValueError(f"unknown key {key!r} in a prompt{nearest(str(key), known)} (known: {', '.join(known)})")
        expected, words = _PROMPT_TYPES.get(key, (object, ""))
        if value is not None and not isinstance(value, expected):
            raise TypeError(f"{key} must be {words}, not {type(value).__name__}")
    tokens: Sequence[Any] = prompt.get("prompt_token_ids") or ()
    for token in tokens:
        if not isinstance(token, Integral):
            raise TypeError(f"prompt_token_ids must be integers, not {token!r}")
    return prompt


def _check_messages(messages: Sequence[Any]) -> None:
    """Checks messages as far as vLLM relies on it."""
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise TypeError(f'{where} must be a dict {{"role": ..., "content": ...}}, not {type(message).__name__}')
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where}.role must be a string, such as 'user', not {message.get('role')!r}")
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list, tuple)):
            raise TypeError(f"{where}.content must be a string or a list of parts, not {type(content).__name__}")
        if not isinstance(message.get("tool_calls"), (list, tuple, type(None))):
            raise TypeError(f"{where}.tool_calls must be a list, not {type(message['tool_calls']).__name__}")
        for part in () if content is None or isinstance(content, str) else content:
            if not isinstance(part, (str, Mapping)):
                raise TypeError(f"{where}.content: a part is a string or a dict with a type, not {type(part).__name__}")


def _seeded(params: SamplingParams) -> SamplingParams:
    """The parameters with a seed, so that a stream can be made again if a process dies."""
    if params.temperature == 0 or params.seed is not None:
        return params
    seeded = copy.copy(params)
    seeded.seed = secrets.randbits(62)
    vars(seeded).pop("sampling_type", None)  # which vLLM keeps
    return seeded


def _as_sampling_params(
    value: SamplingParams | DiffusionSamplingParams | Mapping[str, Any], stage: OmniStageConfig
) -> SamplingParams:
    if isinstance(value, DiffusionSamplingParams):
        raise TypeError(f"stage {stage.name!r} generates tokens: use SamplingParams, not DiffusionSamplingParams")
    if not isinstance(value, SamplingParams):
        known = SamplingParams.__struct_fields__
        for key in value:
            if key not in known:
                raise ValueError(f"unknown sampling parameter {key!r} for stage {stage.name!r}{nearest(key, known)}")
    params = value.clone() if isinstance(value, SamplingParams) else make_sampling_params(value)
    if params.n > 1 and not (stage.final_output and stage.final_output_type == "text"):
        raise ValueError(f"n={params.n} for stage {stage.name!r}: only a final stage with text output supports n")
    stage.kind.check_num_outputs(params.n)
    for name in params.__struct_fields__:
        number = getattr(params, name)
        if isinstance(number, int) and not -(1 << 63) <= number < 1 << 63:
            raise ValueError(f"{name} must be a 64-bit integer")
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def make_sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """vLLM's sampling parameters; `structured_outputs` may also be a dict of its fields, and the keys of `logit_bias`
    strings."""
    names = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]
    if (unknown := next((name for name in values if name not in names), None)) is not None:
        raise ValueError(f"unknown sampling parameter {unknown!r}{nearest(unknown, names)}")
    constraint = values.get("structured_outputs")
    if isinstance(constraint, Mapping):
        known = [field.name for field in dataclasses.fields(StructuredOutputsParams) if field.init]
        for key in constraint:
            if key not in known:
                raise ValueError(f"unknown key {key!r} in structured_outputs{nearest(key, known)}")
        values = {**values, "structured_outputs": StructuredOutputsParams(**constraint)}
    if values.get("logit_bias") is not None:
        values = {**values, "logit_bias": _read_logit_bias(values["logit_bias"])}
    return SamplingParams(**values)


def _read_logit_bias(given: Any) -> dict[int, float]:
    """Biases by token id. The keys of a JSON object are strings."""
    try:
        return {int(token): float(bias) for token, bias in given.items()}
    except (AttributeError, ValueError, TypeError) as error:
        raise ValueError('logit_bias must be an object of token ids and biases, such as {"17": -100}') from error
