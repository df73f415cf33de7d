# SPDX-License-Identifier: Apache-2.0
"""Runs one stage's engine in this process on input that arrives in windows: many requests, in random order."""

import random
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.sampling_params import SamplingParams

from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines.base import NewRequest, Result, StreamChunk
from vllm_omni.stage.engines.llm_request import ARRequest, Items, LLMRequest
from vllm_omni.stage.window import WindowState

Pieces = dict[str, list[StageOutput]]
"""For each request the pieces of a stage's output, in order; the last one has `is_last`."""


def run_first_stage(engine: OmniLLMEngine, prompts: Mapping[str, Any], params: SamplingParams) -> Pieces:
    """The pieces that an autoregressive first stage makes of these prompts, token by token."""
    requests = {}
    for name, prompt in prompts.items():
        made = engine.input_processor.process_inputs(name, prompt, params)
        request = StageRequest(request_id=name, engine_request=made)
        requests[name] = ARRequest(engine, 0, NewRequest(request, None, {}, True, streams_output=True))
        requests[name].start(NewRequest(request, None, {}, True, streams_output=True))
    return _run(engine, requests, {})


def run_stage(
    engine: OmniLLMEngine,
    request_class: type[LLMRequest],
    processor: StageInputProcessor,
    requests: Mapping[str, StageRequest],
    sources: Pieces,
    window: WindowConfig,
    seed: int = 0,
) -> Pieces:
    """
    Args:
        requests: By name, with this stage's sampling parameters.
        sources: The output of the stage that this one reads.
        window: Of the sources' output.
        seed: Of the order in which windows arrive.

    Returns:
        As `run_first_stage`. Requests without input have the processor's empty output.
    """
    rng, running, waiting, pieces = random.Random(seed), {}, {}, {}
    for name, request in requests.items():
        calls = _make_calls(processor, request, sources[name], window)
        begin = next((i for i, (made, _) in enumerate(calls) if made is not None), None)
        if begin is None:
            empty = StageOutput(request_id=name, stage_id=0, tensors=processor.empty_output())
            pieces[name] = [empty]
            continue
        made, is_last = calls[begin]
        item = NewRequest(request, made, {}, is_last, streams_output=True)
        running[name] = request_class(engine, 0, item)
        running[name].start(item)
        waiting[name] = deque(StreamChunk(name, made, {}, is_last) for made, is_last in calls[begin + 1 :])
    return pieces | _run(engine, running, waiting, rng)


def _make_calls(
    processor: StageInputProcessor, request: StageRequest, pieces: Iterable[StageOutput], window: WindowConfig
) -> list[tuple[StageInput | None, bool]]:
    state = WindowState(window)
    windows = [window for piece in pieces for window in state.add(piece)]
    calls = [(processor.process(request, {0: window}), window.is_last) for window in windows]
    return [(made, is_last) for made, is_last in calls if made is not None or is_last]


def _run(
    engine: OmniLLMEngine,
    requests: Mapping[str, LLMRequest],
    waiting: Mapping[str, deque[StreamChunk]],
    rng: random.Random | None = None,
) -> Pieces:
    pieces: Pieces = {name: [] for name in requests}
    open_requests = set(requests)

    def collect(items: Items) -> None:
        for item in items:
            pieces[item.request_id].append(item.output)
            if isinstance(item, Result):
                open_requests.discard(item.request_id)

    while open_requests:
        fed = [name for name, chunks in waiting.items() if chunks and name in open_requests]
        if rng is not None and fed and (not engine.has_work() or rng.random() < 0.5):
            name = rng.choice(fed)
            collect(requests[name].extend(waiting[name].popleft()))
        for output in engine.step():
            owner = requests[next(iter(requests.values())).owner_of(output.request_id)]
            collect(owner.take(output))
    return pieces
