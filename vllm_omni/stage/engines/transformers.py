# SPDX-License-Identifier: Apache-2.0
"""The engine of stages that run a model of transformers that speaks or transcribes.

A text is a window, or, for a client that streams, each of its sentences; a sound is a window, or, if it is long, each
clip of it. One thread computes: waiting windows with equal parameters together, where that changes nothing, else one by
one.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from vllm.multimodal.audio import resample_audio_pyav
from vllm.platforms import current_platform

from vllm_omni.config.stage import OmniStageConfig
from vllm_omni.config.utils import convert
from vllm_omni.engine.audio_clips import split_sound
from vllm_omni.errors import InvalidRequestError
from vllm_omni.function_stage import CALLER, SOUND_RATE
from vllm_omni.inputs import StageRequest
from vllm_omni.metrics.logs import about, get_logger
from vllm_omni.model_executor.speech_model import SpeechModel, TextWithSound
from vllm_omni.model_executor.transcription_model import MIN_SOUND_S, TranscriptionModel
from vllm_omni.model_executor.transformers_model import are_equal
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.engines.base import Error, NewRequest, Outbox, RequestItem, StreamChunk
from vllm_omni.stage.engines.function import BatchFunction, FunctionStageEngine, Sources
from vllm_omni.stage.sentences import SentenceCutter
from vllm_omni.stage.watchdog import StepTimer

logger = get_logger(__name__)

_MAX_TRIALS = 4
"""Calls that find out whether texts may be computed together, before the answer is no."""


class _AllAborted(Exception):
    """Nobody waits for the sounds of this call."""


class ModelFunction(BatchFunction):
    """A model as a function for a batch of windows. Subclasses say what is computed of a window.

    Attributes:
        what: The windows, for messages.
    """

    what: ClassVar[str]

    def __init__(self, stage: OmniStageConfig, opened: SpeechModel | TranscriptionModel) -> None:
        super().__init__(stage, opened.model)
        self.opened = opened
        self.parameters = opened.parameters  # type: ignore[misc]
        self._joins = opened.joins
        self._num_trials = 0

    def start(self) -> None:
        self.opened.load(torch.device(current_platform.device_type))

    def cut(self, request: StageRequest, sources: Sources, *, streams: bool) -> list[StageOutput]:
        """The parts of what a caller gives that are computed one after the other.

        Raises:
            InvalidRequestError: There is nothing in it, or a part is too long.
        """
        raise NotImplementedError

    def read(self, request: StageRequest, sources: Sources) -> Any:
        """What is computed of a window; None: nothing. Raises as `cut`."""
        raise NotImplementedError

    def size(self, item: Any) -> int:
        """The size of what `read` returns: items of equal sizes have no padding."""
        raise NotImplementedError

    def result(self, request: StageRequest, sources: Sources, output: torch.Tensor | None) -> dict[str, Any]:
        """
        Args:
            output: The model's for the window; None: it had nothing to compute.
        """
        raise NotImplementedError

    def windows(self, states: Sequence[StageRequest], sources: Sequence[Sources]) -> Sequence[Any]:
        results: list[Any] = [None for _ in states]
        items: list[Any] = [None for _ in states]
        groups = defaultdict(list)
        for index, request in enumerate(states):
            try:
                items[index] = self.read(request, sources[index])
            except InvalidRequestError as error:
                results[index] = error
                continue
            if items[index] is None:
                results[index] = self.result(request, sources[index], None)
            else:
                alone = index if isinstance(items[index], TextWithSound) else None
                groups[msgspec.json.encode([request.parameters, alone], order="sorted")].append(index)
        for indexes in groups.values():
            parameters = convert(states[indexes[0]].parameters, self.parameters)
            try:
                outputs = self._compute([items[index] for index in indexes], parameters)
            except _AllAborted:
                break  # Results of aborted requests are not sent.
            for index, output in zip(indexes, outputs, strict=True):
                is_error = isinstance(output, Exception)
                results[index] = output if is_error else self.result(states[index], sources[index], output)
        return [{} if result is None else result for result in results]

    def _compute(self, items: list[Any], parameters: Any) -> Sequence[Any]:
        """The model's outputs for items with equal parameters, or the exceptions of single ones."""
        if len(items) > 1 and self._joins:
            return self.opened.compute(items, parameters)
        outputs = [self._compute_alone(item, parameters) for item in items]
        if self._joins is None and len({self.size(item) for item in items}) > 1:
            self._find_out(items, parameters, outputs)
        return outputs

    def _compute_alone(self, item: Any, parameters: Any) -> Any:
        try:
            return self.opened.compute([item], parameters)[0]
        except _AllAborted:
            raise
        except Exception as error:
            return error

    def _find_out(self, items: list[Any], parameters: Any, outputs: list[Any]) -> None:
        """Whether items have the same outputs together as alone: then later ones are joined. Outputs of equal lengths
        do not show it."""
        if any(isinstance(output, Exception) for output in outputs):
            return
        self._num_trials += 1
        try:
            equal = are_equal(self.opened.compute(items, parameters), outputs)
        except _AllAborted:
            raise
        except Exception as error:  # The class does not take a batch.
            equal = False
            about(logger, stage=self.stage.label).debug("%s cannot be computed together: %s", self.what, error)
        if equal and len({output.shape for output in outputs}) == 1 and self._num_trials < _MAX_TRIALS:
            return
        self._joins = equal and len({output.shape for output in outputs}) > 1
        how = "together" if self._joins else "one by one"
        about(logger, stage=self.stage.label).info("%s that wait at the same time are computed %s", self.what, how)


class SpeechFunction(ModelFunction):
    """Texts are computed. Its results are `audio`, float32 `[samples]` or `[channels, samples]`."""

    what = "texts"
    opened: SpeechModel

    def cut(self, request: StageRequest, sources: Sources, *, streams: bool) -> list[StageOutput]:
        text = _text_of(sources) if sources else request.prompt or ""
        tensors = next(iter(sources.values())).tensors if sources else {}  # A sound beside the text.
        parts = self.cut_text(text, request.request_id, streams=streams, is_whole=bool(tensors))
        return [
            _as_source(request, number, completions=[Completion(text=part)], tensors=tensors)
            for number, part in enumerate(parts)
        ]

    def cut_text(self, text: str, request_id: str, *, streams: bool, is_whole: bool = False) -> list[str]:
        """The parts of a text. Raises as `cut`.

        Args:
            is_whole: It has one part.
        """
        parts = [text]
        is_long = self.opened.count_tokens(text) > self.opened.max_text_tokens
        if self.opened.speaks and not is_whole and (streams or is_long):
            parts = SentenceCutter(first_is_clause=streams).add(text, is_last=True)
        parts = [part for part in parts if self._has_words(part, request_id)]
        if not parts:
            raise InvalidRequestError("the text has nothing that this model reads", request_id)
        return parts

    def _has_words(self, text: str, request_id: str) -> bool:
        """
        Raises:
            InvalidRequestError: The text is too long.
        """
        number, limit = self.opened.count_tokens(text), self.opened.max_text_tokens
        if number > limit:
            problem = f"a part of the text has {number} tokens, and this model reads at most {limit}; make it shorter"
            raise InvalidRequestError(problem, request_id)
        return number > 0

    def read(self, request: StageRequest, sources: Sources) -> Any:
        text = _text_of(sources)
        if not self._has_words(text, request.request_id):  # A reply may have sentences without any.
            return None
        sound = next(iter(sources.values())).tensors.get("audio") if self.opened.sound_rate else None
        return text if sound is None else TextWithSound(text, sound.numpy())

    def size(self, item: str) -> int:
        return self.opened.count_tokens(item)

    def result(self, request: StageRequest, sources: Sources, output: torch.Tensor | None) -> dict[str, Any]:
        return {"audio": torch.empty(0) if output is None else output}


class TranscriptionFunction(ModelFunction):
    """Sounds are computed. Its results are `text`, and, if they are asked for, `word_times` of `TranscriptionModel`."""

    what = "sounds"
    opened: TranscriptionModel

    def __init__(self, stage: OmniStageConfig, opened: TranscriptionModel) -> None:
        super().__init__(stage, opened)
        self._have_text: set[str] = set()  # by request

    def cut(self, request: StageRequest, sources: Sources, *, streams: bool) -> list[StageOutput]:
        return _cut_sound(request, sources, self.opened.sample_rate, self.opened.settings.max_audio_clip_s)

    def read(self, request: StageRequest, sources: Sources) -> np.ndarray | None:
        (source,) = sources.values()
        sound = source.tensors["audio"].numpy()
        return sound if self.opened.is_long_enough(sound) else None

    def size(self, item: np.ndarray) -> int:
        return len(item)

    def result(self, request: StageRequest, sources: Sources, output: torch.Tensor | None) -> dict[str, Any]:
        if output is None:
            return {"text": ""}
        (source,) = sources.values()
        rate = self.opened.sample_rate
        parameters = convert(request.parameters, self.parameters)
        found = self.opened.read(output, source.tensors["audio"].shape[-1] / rate, parameters)
        if "word_times" in found:
            found["word_times"] = found["word_times"] + source.start / rate
        if found["text"] and request.request_id in self._have_text:
            found["text"] = f" {found['text']}"
        elif found["text"]:
            self._have_text.add(request.request_id)
        return found

    def end(self, state: StageRequest) -> None:
        self._have_text.discard(state.request_id)

    def abort(self, state: StageRequest) -> None:
        self._have_text.discard(state.request_id)


class SpeechToSpeechFunction(SpeechFunction):
    """Sounds are computed, one by one. Its results are those of `SpeechFunction`."""

    what = "sounds"

    def __init__(self, stage: OmniStageConfig, opened: SpeechModel) -> None:
        super().__init__(stage, opened)
        self._joins = False

    def cut(self, request: StageRequest, sources: Sources, *, streams: bool) -> list[StageOutput]:
        return _cut_sound(request, sources, self.opened.input_rate, self.opened.settings.max_audio_clip_s)

    def read(self, request: StageRequest, sources: Sources) -> Any:
        (source,) = sources.values()
        sound = source.tensors["audio"].numpy()
        return sound if len(sound) >= MIN_SOUND_S * self.opened.input_rate else None


class TransformersStageEngine(FunctionStageEngine):
    """Computes the sounds of texts, or the texts of sounds."""

    def __init__(self, outbox: Outbox, stage: OmniStageConfig, opened: SpeechModel | TranscriptionModel) -> None:
        function: type[ModelFunction] = TranscriptionFunction
        if isinstance(opened, SpeechModel):
            function = SpeechToSpeechFunction if opened.hears else SpeechFunction
        self._model_function: ModelFunction = function(stage, opened)
        super().__init__(outbox, self._model_function, num_threads=1)

    def _take_in(self, item: RequestItem) -> None:
        if not isinstance(item, NewRequest) or not item.is_last or not _is_of_caller(item.sources):
            super()._take_in(item)
            return
        streams = item.streams_output
        try:
            parts = self._model_function.cut(item.request, item.sources, streams=streams)
        except InvalidRequestError as error:
            self.outbox.put(Error.from_exception(item.request_id, error, invalid=True))
            return
        for number, part in enumerate(parts):
            sources, is_last = {CALLER: part}, number == len(parts) - 1
            if number:
                super()._take_in(StreamChunk(item.request_id, sources=sources, is_last=is_last))
            else:
                first = NewRequest(item.request, sources=sources, is_last=is_last, streams_output=streams)
                super()._take_in(first)

    def _compute(self, calls: list[Any], timer: StepTimer) -> tuple[list[Any], float]:
        with self._watch(calls, timer):
            return super()._compute(calls, timer)

    @contextmanager
    def _watch(self, calls: list[Any], timer: StepTimer) -> Iterator[None]:
        """A layer that runs is a sign of life; none runs when all requests are aborted."""

        def gate() -> None:
            timer.restart()
            if all(call.run.aborted.is_set() for call in calls):
                raise _AllAborted("all requests of this call are aborted")

        self._model_function.opened.gate = gate
        try:
            yield
        finally:
            self._model_function.opened.gate = lambda: None


def _as_source(request: StageRequest, start: int, **content: Any) -> StageOutput:
    """A part of what a caller gives."""
    return StageOutput(request_id=request.request_id, stage_id=CALLER, start=start, **content)


def _cut_sound(request: StageRequest, sources: Sources, rate: int, max_clip_s: float) -> list[StageOutput]:
    """The clips of a caller's sound, at the model's rate."""
    (source,) = sources.values()
    sound = resample_audio_pyav(source.tensors["audio"].numpy(), orig_sr=SOUND_RATE, target_sr=rate)
    clips = split_sound(sound, rate, max_clip_s)
    starts = [0, *itertools.accumulate(map(len, clips))]
    return [
        _as_source(request, start, tensors={"audio": torch.from_numpy(clip)})
        for start, clip in zip(starts, clips, strict=False)
    ]


def _is_of_caller(sources: Sources) -> bool:
    return all(source.stage_id == CALLER for source in sources.values())


def _text_of(sources: Sources) -> str:
    (source,) = sources.values()
    first = source.first_completion
    return "" if first is None else first.text
