# SPDX-License-Identifier: Apache-2.0
"""Keeps count of the rows that each request has handed out, so that every row leaves the engine exactly once.

A row is the model's output at one position of a request. A request that was preempted, or whose step raised, computes
rows again that left before; a chunked prefill computes rows in steps that sample nothing, which vLLM must not see as
outputs.

Rows leave with the step that samples a token, and a request has the token only if that step was good. So of a request
with tokens all rows have left but the last one's; what is noted here is of requests that have none yet.
"""

from collections import defaultdict

import torch

from vllm_omni.model_executor.interfaces import RequestSpan

Rows = dict[str, torch.Tensor]


class RowLedger:
    """Rows of autoregressive requests, keyed by request id. A request's rows are its prompt and generated - 1."""

    def __init__(self, emits_prompt_rows: bool) -> None:
        self._emits_prompt_rows = emits_prompt_rows
        self._next_position: dict[str, int] = {}
        self._held_back: dict[str, dict[str, list[torch.Tensor]]] = {}

    def select(self, spans: list[RequestSpan]) -> list[tuple[int, int]]:
        """For each span the rows `[start, stop)` of the flat batch that have not left yet; empty where none."""
        return [(span.stop - (self._num_new(span) if span.emits_rows else 0), span.stop) for span in spans]

    def hand_out(self, spans: list[RequestSpan], rows: list[Rows]) -> list[Rows | None]:
        """Books the selected rows.

        Args:
            spans: As for `select`.
            rows: For each span its selected rows, in memory that belongs to nobody else.

        Returns:
            For each span everything that leaves with this step: nothing while the prompt is incomplete.
        """
        return [self._hand_out_one(span, span_rows) for span, span_rows in zip(spans, rows, strict=True)]

    def forget(self, req_id: str) -> None:
        self._next_position.pop(req_id, None)
        self._held_back.pop(req_id, None)

    def _num_new(self, span: RequestSpan) -> int:
        first = 0 if self._emits_prompt_rows else span.num_prompt_tokens
        has_tokens = span.num_tokens > span.num_prompt_tokens
        first = max(first, span.num_tokens - 1 if has_tokens else self._next_position.get(span.req_id, 0))
        return min(max(span.position + span.num_rows - first, 0), span.num_rows)

    def _hand_out_one(self, span: RequestSpan, rows: Rows) -> Rows | None:
        if not span.samples:
            end = span.position + span.num_rows
            self._next_position[span.req_id] = max(end, self._next_position.get(span.req_id, 0))
            self._hold_back(span.req_id, rows)
            return None
        if span.req_id in self._held_back:
            self._hold_back(span.req_id, rows)
            rows = {name: torch.cat(chunks) for name, chunks in self._held_back[span.req_id].items()}
        self.forget(span.req_id)
        return rows or None

    def _hold_back(self, req_id: str, rows: Rows) -> None:
        held = self._held_back.setdefault(req_id, defaultdict(list))
        for name, chunk in rows.items():
            held[name].append(chunk)
