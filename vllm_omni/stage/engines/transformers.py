# SPDX-License-Identifier: Apache-2.0
"""The engine of stages that run a speech model of transformers.

A text is a window, or, for a client that streams, each of its sentences. One thread computes: waiting windows with
equal parameters together, where that changes nothing, else one by one.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from vllm.platforms import current_platform

from vllm_omni.config.stage import OmniStageConfig
from vllm_omni.config.utils import convert
from vllm_omni.errors import InvalidRequestError
from vllm_omni.function_stage import CALLER
from vllm_omni.inputs import StageRequest
from vllm_omni.metrics.logs import about, get_logger
from vllm_omni.model_executor.speech_model import SpeechModel, are_equal
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


class SpeechFunction(BatchFunction):
    """A speech model as a function for a batch of windows. Its results are `audio`, float32 `[samples]` or `[channels,
    samples]`."""

    def __init__(self, stage: OmniStageConfig, speech: SpeechModel) -> None:
        super().__init__(stage, speech.model)
        self.speech = speech
        self.parameters = speech.parameters  # type: ignore[misc]
        self._joins = speech.joins
        self._num_trials = 0

    def start(self) -> None:
        self.speech.load(torch.device(current_platform.device_type))

    def cut(self, text: str, request_id: str, *, streams: bool) -> list[str]:
        """The parts of a caller's text that are computed one after the other.

        Raises:
            InvalidRequestError: There is nothing in it to speak, or a part is too long.
        """
        parts = [text]
        is_long = self.speech.count_tokens(text) > self.speech.max_text_tokens
        if self.speech.speaks and (streams or is_long):
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
        number, limit = self.speech.count_tokens(text), self.speech.max_text_tokens
        if number > limit:
            problem = f"a part of the text has {number} tokens, and this model reads at most {limit}; make it shorter"
            raise InvalidRequestError(problem, request_id)
        return number > 0

    def windows(self, states: Sequence[StageRequest], sources: Sequence[Sources]) -> Sequence[Any]:
        texts = [_text_of(each) for each in sources]
        results: list[Any] = [{"audio": torch.empty(0)} for _ in texts]
        groups = defaultdict(list)
        for index, request in enumerate(states):
            try:
                if self._has_words(texts[index], request.request_id):  # A reply may have sentences without any.
                    groups[msgspec.json.encode(request.parameters, order="sorted")].append(index)
            except InvalidRequestError as error:
                results[index] = error
        for indexes in groups.values():
            parameters = convert(states[indexes[0]].parameters, self.parameters)
            try:
                sounds = self._compute([texts[index] for index in indexes], parameters)
            except _AllAborted:
                break  # Results of aborted requests are not sent.
            for index, sound in zip(indexes, sounds, strict=True):
                results[index] = sound if isinstance(sound, Exception) else {"audio": sound}
        return results

    def _compute(self, texts: list[str], parameters: Any) -> Sequence[Any]:
        """The sounds of texts with equal parameters, or the exceptions of single ones."""
        if len(texts) > 1 and self._joins:
            return self.speech.compute(texts, parameters)
        sounds = [self._compute_alone(text, parameters) for text in texts]
        if self._joins is None and len({self.speech.count_tokens(text) for text in texts}) > 1:
            self._find_out(texts, parameters, sounds)
        return sounds

    def _compute_alone(self, text: str, parameters: Any) -> Any:
        try:
            return self.speech.compute([text], parameters)[0]
        except _AllAborted:
            raise
        except Exception as error:
            return error

    def _find_out(self, texts: list[str], parameters: Any, sounds: list[Any]) -> None:
        """Whether texts have the same sounds together as alone: then later ones are joined. Sounds of equal lengths do
        not show it."""
        if any(isinstance(sound, Exception) for sound in sounds):
            return
        self._num_trials += 1
        try:
            equal = are_equal(self.speech.compute(texts, parameters), sounds)
        except _AllAborted:
            raise
        except Exception as error:  # The class does not take a batch.
            equal = False
            about(logger, stage=self.stage.label).debug("texts cannot be computed together: %s", error)
        if equal and len({sound.shape for sound in sounds}) == 1 and self._num_trials < _MAX_TRIALS:
            return
        self._joins = equal and len({sound.shape for sound in sounds}) > 1
        how = "together" if self._joins else "one by one"
        about(logger, stage=self.stage.label).info("texts that wait at the same time are computed %s", how)


class TransformersStageEngine(FunctionStageEngine):
    """Computes the sounds of texts."""

    def __init__(self, outbox: Outbox, stage: OmniStageConfig, speech: SpeechModel) -> None:
        self._speech = SpeechFunction(stage, speech)
        super().__init__(outbox, self._speech, num_threads=1)

    def _take_in(self, item: RequestItem) -> None:
        if not isinstance(item, NewRequest) or not item.is_last or not _is_of_caller(item.sources):
            super()._take_in(item)
            return
        text = _text_of(item.sources) if item.sources else item.request.prompt or ""
        try:
            parts = self._speech.cut(text, item.request_id, streams=item.streams_output)
        except InvalidRequestError as error:
            self.outbox.put(Error.from_exception(item.request_id, error, invalid=True))
            return
        for number, part in enumerate(parts):
            output = StageOutput(
                request_id=item.request_id, stage_id=CALLER, start=number, completions=[Completion(text=part)]
            )
            sources, is_last = {CALLER: output}, number == len(parts) - 1
            if number:
                super()._take_in(StreamChunk(item.request_id, sources=sources, is_last=is_last))
            else:
                streams = item.streams_output
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

        self._speech.speech.gate = gate
        try:
            yield
        finally:
            self._speech.speech.gate = lambda: None


def _is_of_caller(sources: Sources) -> bool:
    return all(source.stage_id == CALLER for source in sources.values())


def _text_of(sources: Sources) -> str:
    (source,) = sources.values()
    first = source.first_completion
    return "" if first is None else first.text
