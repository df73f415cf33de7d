# SPDX-License-Identifier: Apache-2.0
"""The figures of all stages as a table for people. Shows totals since each stage started, and means of them."""

from collections.abc import Sequence

from vllm_omni.metrics.stats import EdgeStats, StageStats

_STAGE_COLUMNS = (
    "stage",
    "queued",
    "running",
    "entered",
    "completed",
    "aborted",
    "failed",
    "blocked s",
    "steps",
    "ms/step",
    "batch",
    "KV blocks",
)
_EDGE_COLUMNS = ("edge", "payloads", "MB", "ms/payload", "windows")


def format_stage_table(stats: Sequence[StageStats]) -> str:
    """A line for each stage, then one for each edge that carried something, then one for each cause of failure.

    Args:
        stats: The stages, in the order in which they are to be shown.
    """
    names = {stage.stage_id: stage.name for stage in stats}
    parts = [_format_rows([_STAGE_COLUMNS, *(_stage_row(stage) for stage in stats)])]
    edges = [_edge_row(names, stage, source) for stage in stats for source in sorted(stage.edges)]
    if edges:
        parts.append(_format_rows([_EDGE_COLUMNS, *edges]))
    failures = [(stage.name, cause, str(n)) for stage in stats for cause, n in sorted(stage.failures.items())]
    if failures:
        parts.append(_format_rows([("failures in", "cause", "requests"), *failures]))
    return "\n\n".join(parts)


def _stage_row(stage: StageStats) -> tuple[str, ...]:
    return (
        stage.name,
        str(stage.queue_depth),
        str(stage.num_running),
        str(stage.num_enqueued),
        str(stage.num_completed),
        str(stage.num_aborted),
        str(sum(stage.failures.values())),
        f"{stage.blocked_seconds:.2f}",
        str(stage.num_steps),
        _mean(stage.step_seconds * 1e3, stage.num_steps),
        _mean(stage.num_scheduled, stage.num_steps),
        f"{stage.kv_blocks_used}/{stage.kv_blocks_total}" if stage.kv_blocks_total else "-",
    )


def _edge_row(names: dict[int, str], stage: StageStats, source: int) -> tuple[str, ...]:
    edge: EdgeStats = stage.edges[source]
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
    """Columns of equal width: the first to the left, the others, which are figures, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
