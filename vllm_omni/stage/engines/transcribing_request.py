# SPDX-License-Identifier: Apache-2.0
"""One request of a vLLM stage that transcribes: a sound of any length, which the model reads in clips."""

import copy
from typing import Any

import msgspec
from vllm.sampling_params import RequestOutputKind

from vllm_omni.config.utils import convert
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.engine.transcription import Transcription, keep_prompts
from vllm_omni.errors import InvalidRequestError
from vllm_omni.function_stage import SOUND_RATE
from vllm_omni.inputs import TranscriptionParameters
from vllm_omni.outputs import Completion, StageOutput, merge_stage_outputs
from vllm_omni.stage.engines.base import NewRequest, StreamChunk
from vllm_omni.stage.engines.llm_request import Items, LLMRequest

MAX_CLIPS = 8
"""Of one request that are in the engine at once: other requests have their turn, and few are preprocessed ahead."""
_LANGUAGE = "language"


class TranscribingRequest(LLMRequest):
    """A request that is one of the engine for each clip, and one before them for the language, if it names none and the
    model has to find it. The text of a clip follows that of the clips before it."""

    def __init__(self, engine: OmniLLMEngine, stage_id: int, item: NewRequest) -> None:
        super().__init__(engine, stage_id, item)
        self._request = item.request
        self._transcription: Transcription
        self._running: set[str] = set()
        self._num_started = 0
        self._num_written = 0  # clips whose text is complete, and part of the output
        self._outputs: dict[int, list[Any]] = {}  # vLLM's of clips, which have not been read
        self._has_begun = False  # the text of the first clip that is not complete
        self._pieces: list[StageOutput] = []  # of the output, which have not been sent
        self._finish_reason = "stop"

    @property
    def engine_ids(self) -> list[str]:
        return list(self._running)

    @staticmethod
    def owner_of(engine_id: str) -> str:
        return engine_id.rpartition("/")[0]

    def start(self, item: NewRequest) -> Items:
        keep_prompts(self._engine.renderer)
        (source,) = item.sources.values()
        try:
            self._transcription = Transcription(
                self._engine.model_config,
                self._engine.get_tokenizer(),
                source.tensors["audio"].numpy(),
                SOUND_RATE,
                convert(item.request.parameters, TranscriptionParameters),
            )
        except ValueError as error:
            raise InvalidRequestError(str(error), self.request_id) from error
        if self._transcription.needs_language:
            self._add(_LANGUAGE, *self._transcription.language_prompt())
        else:
            self._fill()
        return []

    def extend(self, chunk: StreamChunk) -> Items:
        raise AssertionError("a caller gives a sound as a whole")

    def take(self, output: Any) -> Items:
        name = output.request_id.rpartition("/")[2]
        if output.finished:
            self._running.remove(output.request_id)
        if name == _LANGUAGE:
            self._transcription.read_language(output.outputs[0].token_ids)
        else:
            self._outputs.setdefault(int(name), []).append(output)
        self._fill()
        return self._read()

    def _fill(self) -> None:
        """Adds clips to the engine."""
        while self._num_started < len(self._transcription.clips) and len(self._running) < MAX_CLIPS:
            assert self._request.sampling_params is not None
            params = copy.copy(self._request.sampling_params)
            params.output_kind = RequestOutputKind.DELTA if self._streams_output else RequestOutputKind.FINAL_ONLY
            params = self._transcription.with_settings(params)
            self._add(str(self._num_started), self._transcription.prompt(self._num_started), params)
            self._num_started += 1

    def _add(self, name: str, prompt: Any, params: Any) -> None:
        engine_id = f"{self.request_id}/{name}"
        headers, priority = self._request.trace_headers or None, self._request.priority
        self._engine.add_request(engine_id, prompt, params, trace_headers=headers, priority=priority)
        self._running.add(engine_id)

    def _read(self) -> Items:
        """The text that follows the output so far."""
        while outputs := self._outputs.pop(self._num_written, None):
            self._pieces += [self._as_text(output) for output in outputs]
            if not outputs[-1].finished:
                break
            self._num_written += 1
            self._has_begun = False
        if self._num_written == len(self._transcription.clips):
            return [self._result(merge_stage_outputs([*self._pieces, self._end()]))]
        pieces: list[StageOutput] = []
        if self._streams_output:
            pieces, self._pieces = self._pieces, pieces
        return [self._stream(piece) for piece in pieces]

    def _as_text(self, output: Any) -> StageOutput:
        """What an output of the engine adds to the transcript."""
        piece = self._as_piece(output, is_first=not self._has_begun)
        self._has_begun = True
        (completion,) = piece.completions
        if completion.finish_reason == "length":
            self._finish_reason = "length"
        asked = self._request.sampling_params
        assert asked is not None
        logprobs = completion.logprobs if asked.logprobs is not None else None
        text = self._transcription.add(output)
        completion = Completion(text=text, token_ids=completion.token_ids, logprobs=logprobs)
        if self._num_written:  # The prompt of the stage's output is that of the first clip.
            piece = msgspec.structs.replace(piece, prompt_token_ids=[], prompt_logprobs=None, num_cached_tokens=None)
        elif asked.prompt_logprobs is None:
            piece = msgspec.structs.replace(piece, prompt_logprobs=None)
        return msgspec.structs.replace(piece, completions=[completion])

    def _end(self) -> StageOutput:
        completion = Completion(finish_reason=self._finish_reason)
        return StageOutput(request_id=self.request_id, stage_id=self._stage_id, completions=[completion])
