# SPDX-License-Identifier: Apache-2.0
"""The table of `runtime.py`: one figure a row, with its unit."""

from report import Report, percentile


def add_row(report: Report, what: str, values: list[float], unit: str) -> None:
    """The median of what was measured, and how far it spread."""
    row = {"what": what, "median": percentile(values, 50), "least": min(values), "most": max(values), "unit": unit}
    report.rows.append(row)


def milliseconds(seconds: list[float]) -> list[float]:
    return [1000 * value for value in seconds]
