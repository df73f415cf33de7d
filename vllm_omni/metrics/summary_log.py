# SPDX-License-Identifier: Apache-2.0
"""A log line for each request and for each stage that worked on it, when the request has ended."""

from vllm_omni.metrics.logs import about, get_logger
from vllm_omni.metrics.observer import PipelineObserver, RequestSummary
from vllm_omni.metrics.stats import StageMetrics

logger = get_logger(__name__)


class SummaryLog(PipelineObserver):
    """Logs how each request went."""

    def request_ended(self, summary: RequestSummary) -> None:
        for stage in summary.stages:
            log = about(logger, request_id=summary.request_id, stage=f"stage {stage.stage_id} ({stage.name})")
            log.info("%s", _stage_line(stage))
        about(logger, request_id=summary.request_id).info("%s", _request_line(summary))


def _stage_line(stage: StageMetrics) -> str:
    waited = stage.started - stage.arrival
    return (
        f"{stage.num_input_tokens} in, {stage.num_output_tokens} out, {stage.seconds:.3f} s, "
        f"of which {waited:.3f} s in the queue"
    )


def _request_line(summary: RequestSummary) -> str:
    where = f" in {summary.failed_stage}" if summary.failed_stage is not None else ""
    times = {
        "TTFT": summary.ttft,
        "time per output token": summary.tpot,
        "TTFA": summary.ttfa,
        "TTFI": summary.ttfi,
    }
    parts = [f"{name} {seconds:.3f} s" for name, seconds in times.items() if seconds is not None]
    if summary.real_time_factor is not None:
        parts.append(f"RTF {summary.real_time_factor:.3f}")
    return ", ".join([f"{summary.outcome}{where} after {summary.seconds:.3f} s", *parts])
