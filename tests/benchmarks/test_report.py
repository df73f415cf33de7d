# SPDX-License-Identifier: Apache-2.0
"""The report that all benchmarks share: its file and its tables."""

import json
from pathlib import Path

import pytest

from benchmarks.report import Report, format_table, make_parser, mean, percentile, underrun

pytestmark = pytest.mark.slow


def test_the_file_holds_ratios_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("demo", {"quick": "True"})
    report.rows.append({"backend": "ours", "requests/s": 12.3456})
    report.ratios["requests_per_second_c8"] = 4.5
    report.notes.append("weights are random")
    report.finish(tmp_path / "out.json")

    written = json.loads((tmp_path / "out.json").read_text())
    assert written["ratios"] == {"requests_per_second_c8": 4.5}
    assert written["rows"] == [{"backend": "ours", "requests/s": 12.3456}]
    assert written["settings"]["cores"] >= 1
    shown = capsys.readouterr().out
    assert "12.3" in shown and "requests_per_second_c8" in shown and "- weights are random" in shown


def test_columns_are_aligned() -> None:
    lines = format_table([{"name": "HF", "s": 1.5}, {"name": "vllm_omni", "s": 1234.5}]).splitlines()

    assert lines == ["name          s", "---------  ----", "HF          1.5", "vllm_omni  1234"]
    assert format_table([]) == "(nothing measured)"


def test_statistics() -> None:
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert [percentile(range(1, 101), percent) for percent in (0, 50, 95, 100)] == [1, 50, 95, 100]
    assert percentile([3.0], 95) == 3.0


def test_an_underrun_is_silence_after_the_first_sound() -> None:
    assert underrun([(3.0, 1.0), (3.5, 1.0)]) == 0
    assert underrun([(3.0, 1.0), (4.5, 1.0), (6.0, 1.0)]) == pytest.approx(0.5 + 0.5)


def test_every_benchmark_has_quick_and_output() -> None:
    args = make_parser("What it does.\n\nMore.").parse_args(["--quick", "--output", "x.json"])

    assert args.quick and args.output == Path("x.json")
