# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of requests and stages, where `otlp_traces_endpoint` asks for them.

The caller's process makes a root span for each request and gives its context to the stages, each of which makes a span
of its own below it; so does vLLM's engine, which is given the same context. Here is what a stage calls;
OpenTelemetry itself is imported, with `otel`, only where it is used.
"""

from collections.abc import Mapping

from vllm_omni.metrics.observer import COMPLETED
from vllm_omni.metrics.stats import StageMetrics


class StageTracer:
    """Makes the spans of one stage, in its process. This one makes none."""

    def stage_done(
        self, request_id: str, trace_headers: Mapping[str, str], metrics: StageMetrics, outcome: str = COMPLETED
    ) -> None:
        """A request has ended in this stage.

        Args:
            trace_headers: The request's `StageRequest.trace_headers`.
            metrics: What the stage did; a request that did not complete need not have started or finished.
            outcome: `completed`, or the name of an error class.
        """

    def close(self) -> None:
        """Sends what has not been sent. Waits two seconds at most."""
