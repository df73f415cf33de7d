# SPDX-License-Identifier: Apache-2.0
"""A stage without a model, for testing pipelines: its outputs can be checked by hand."""

import os
import queue
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from vllm_omni.config.stage import OmniStageConfig
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.engines.base import Outbox
from vllm_omni.stage.engines.function import FunctionStageEngine, PlainFunction


class FakeStageEngine(FunctionStageEngine):
    """Joins the texts of its sources (or takes the prompt) and appends its own name.

    From sources with tokens it forwards the tokens and their tensor `rows` `[tokens, 4]` float32: window by window, if
    the edge has a window size.

    Options of a request:
        `fake_tokens`: the first stage makes this many tokens 0, 1, ..., one by one, and their `rows`;
        `fake_steps`: it reports this many steps of progress first, as a diffusion stage does, each with an `image`;
        `fake_images`: it makes this many images, each of one colour, as a diffusion stage does (and reports the
            progress of each of them);
        `fake_seconds`: each call, and each token, takes this long (a number, or one for each stage by name);
        `fake_bytes`: adds a tensor `bytes` of this size;
        `fake_fail`, `fake_die`: name of the stage that raises, or whose process dies, on this request;
        `fake_only`: name of the stage that `fake_seconds`, `fake_bytes`, `fake_steps` and `fake_images` apply to
            (default: all).
    """

    def __init__(self, outbox: Outbox, stage_id: int, name: str) -> None:
        stage = OmniStageConfig(stage_id=stage_id, engine_type="fake", engine_args={"model_stage": name})
        super().__init__(outbox, PlainFunction(stage, "", self.compute))
        self._name = name

    def compute(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> StageOutput | Iterator[StageOutput]:
        options = self._options(request)
        if options.get("fake_fail") == self._name:
            raise RuntimeError(f"{self._name} fails (fake_fail)")
        if options.get("fake_die") == self._name:
            os.kill(os.getpid(), signal.SIGKILL)
        if not sources and "fake_tokens" in options:
            return self._make_tokens(request, options)
        if "fake_steps" in options:
            return self._report_progress(request, sources, options)
        self._pause(request, options)
        return self._output(request, sources, options)

    def _options(self, request: StageRequest) -> dict[str, Any]:
        if request.options.get("fake_only", self._name) == self._name:
            return request.options
        not_here = ("fake_seconds", "fake_bytes", "fake_steps", "fake_images")
        return {name: value for name, value in request.options.items() if name not in not_here}

    def _make_tokens(self, request: StageRequest, options: Mapping[str, Any]) -> Iterator[StageOutput]:
        for token in range(options["fake_tokens"]):
            self._pause(request, options)
            is_last = token == options["fake_tokens"] - 1
            completion = Completion(text=f"{token} ", token_ids=[token], finish_reason="stop" if is_last else None)
            yield self._piece(request, [completion], {"rows": torch.full((1, 4), float(token))})

    def _report_progress(
        self, request: StageRequest, sources: Mapping[int, StageOutput], options: Mapping[str, Any]
    ) -> Iterator[StageOutput]:
        num_steps, num_images = options["fake_steps"], options.get("fake_images", 1)
        for step in range(num_steps):
            self._pause(request, options)
            for index in range(num_images):
                piece = self._piece(request, [], {"image": _make_image(step)})
                piece.step, piece.num_steps, piece.data = step, num_steps, {"index": index}
                yield piece
        yield self._output(request, sources, options)

    def _output(
        self, request: StageRequest, sources: Mapping[int, StageOutput], options: Mapping[str, Any]
    ) -> StageOutput:
        texts = [source.completions[0].text for _, source in sorted(sources.items()) if source.completions]
        is_last = all(source.is_last for source in sources.values())
        text = ("+".join(texts) or request.prompt or "") + (f">{self._name}" if is_last else "")
        tensors = {}
        data = {}
        if num_images := options.get("fake_images"):
            tensors["image"] = torch.stack([_make_image(index) for index in range(num_images)])
            data = {"output_type": "image", "output_format": "pil"}
        if num_bytes := options.get("fake_bytes"):
            tensors["bytes"] = torch.full((num_bytes,), self._stage_id, dtype=torch.uint8)
        rows = [source.tensors["rows"][source.context :] for source in sources.values() if "rows" in source.tensors]
        if rows:
            tensors["rows"] = torch.cat(rows)
        tokens = [token for source in sources.values() if source.completions for token in _own_tokens(source)]
        finish_reason = "stop" if is_last else None
        completion = Completion(text=text, token_ids=tokens, finish_reason=finish_reason)
        return self._piece(request, [completion], tensors, data)

    def _piece(
        self,
        request: StageRequest,
        completions: list[Completion],
        tensors: dict[str, torch.Tensor],
        data: dict[str, Any] | None = None,
    ) -> StageOutput:
        return StageOutput(
            request_id=request.request_id,
            stage_id=self._stage_id,
            completions=completions,
            tensors=tensors,
            data=data or {},
        )

    def _pause(self, request: StageRequest, options: Mapping[str, Any]) -> None:
        """Takes `fake_seconds`; returns at once when the request is aborted."""
        seconds = options.get("fake_seconds", 0.0)
        deadline = time.monotonic() + (seconds.get(self._name, 0.0) if isinstance(seconds, dict) else seconds)
        while self._is_live(self._runs[request.request_id]) and (left := deadline - time.monotonic()) > 0:
            try:
                self._read(self.inbox.get(timeout=left))
            except queue.Empty:
                return


def _make_image(grey: int) -> torch.Tensor:
    """uint8 `[2, 2, 3]`."""
    return torch.full((2, 2, 3), grey, dtype=torch.uint8)


def _own_tokens(source: StageOutput) -> list[int]:
    """A window's tokens without its context (which is counted in rows, if rows are its unit)."""
    tokens = source.completions[0].token_ids
    return tokens if "rows" in source.tensors else tokens[source.context :]
