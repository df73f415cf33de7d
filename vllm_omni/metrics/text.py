# SPDX-License-Identifier: Apache-2.0
"""Statistics as text: log lines for each request that ended, and a table of all stages."""

from collections.abc import Callable, Sequence

from vllm_omni.metrics.logs import about, get_logger
from vllm_omni.metrics.observer import PipelineObserver, RequestSummary
from vllm_omni.metrics.stats import StageMetrics, StageStats

logger = get_logger(__name__)


class SummaryLog(PipelineObserver):
    """Logs a line for each stage of a request and one for the request, when it has ended."""

    def request_ended(self, summary: RequestSummary) -> None:
        for stage in summary.stages:
            log = about(logger, request_id=summary.request_id, stage=f"stage {stage.stage_id} ({stage.name})")
            log.info("%s", _stage_line(stage))
        about(logger, request_id=summary.request_id).info("%s", _request_line(summary))


def _stage_line(stage: StageMetrics) -> str:
    waited = stage.started - stage.arrival
    cached = f" ({stage.num_cached_tokens} of them cached)" if stage.num_cached_tokens else ""
    return (
        f"{stage.num_input_tokens} in{cached}, {stage.num_output_tokens} out, {stage.seconds:.3f} s, "
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


_STAGE_COLUMNS: dict[str, Callable[[StageStats], str]] = {
    "stage": lambda s: s.name,
    "queued": lambda s: str(s.queue_depth),
    "running": lambda s: str(s.num_running),
    "entered": lambda s: str(s.num_enqueued),
    "completed": lambda s: str(s.num_completed),
    "aborted": lambda s: str(s.num_aborted),
    "failed": lambda s: str(sum(s.failures.values())),
    "blocked s": lambda s: f"{s.blocked_seconds:.2f}",
    "steps": lambda s: str(s.num_steps),
    "ms/step": lambda s: _mean(s.step_seconds * 1e3, s.num_steps),
    "batch": lambda s: _mean(s.num_scheduled, s.num_steps),
    "KV blocks": lambda s: f"{s.kv_blocks_used}/{s.kv_blocks_total}" if s.kv_blocks_total else "-",
}
_EDGE_COLUMNS = ("edge", "payloads", "MB", "ms/payload", "windows")


def format_stage_table(stats: Sequence[StageStats]) -> str:
    """A line for each stage, then one for each edge that was used, then one for each cause of failure.

    Totals are those since each stage started.

    Args:
        stats: The stages, in the order of the lines.
    """
    names = {stage.stage_id: stage.name.partition(".")[0] if stage.replica else stage.name for stage in stats}
    rows = [tuple(cell(stage) for cell in _STAGE_COLUMNS.values()) for stage in stats]
    parts = [_format_rows([tuple(_STAGE_COLUMNS), *rows])]
    edges = [_edge_row(names, stage, source) for stage in stats for source in sorted(stage.edges)]
    if edges:
        parts.append(_format_rows([_EDGE_COLUMNS, *edges]))
    failures = [(stage.name, cause, str(n)) for stage in stats for cause, n in sorted(stage.failures.items())]
    if failures:
        parts.append(_format_rows([("failures in", "cause", "requests"), *failures]))
    return "\n\n".join(parts)


def _edge_row(names: dict[int, str], stage: StageStats, source: int) -> tuple[str, ...]:
    edge = stage.edges[source]
    return (
        f"{names.get(source, source)} -> {stage.name}",
        str(edge.num_payloads),
        f"{edge.num_bytes / 1e6:.2f}",
        _mean(edge.seconds * 1e3, edge.num_payloads),
        str(edge.num_windows),
    )


def _mean(total: float, count: int) -> str:
    return f"{total / count:.2f}" if count else "-"


def _format_rows(rows: Sequence[tuple[str, ...]]) -> str:
    """Aligns columns: the first, of names, to the left, the others, of numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
