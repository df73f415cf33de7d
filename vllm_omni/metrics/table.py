# SPDX-License-Identifier: Apache-2.0
"""The figures of all stages as a table for people."""

from collections.abc import Sequence

from vllm_omni.metrics.stats import StageStats


def format_stage_table(stats: Sequence[StageStats]) -> str:
    """A table with one line for each stage, and one for each of its edges."""
    return ""
