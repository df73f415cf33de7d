# SPDX-License-Identifier: Apache-2.0
"""The programs of `benchmarks/` and `scripts/`, run as a user does: with `--help`, or with the smallest input."""

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.forked_programs import ForkedProgram

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
# The others are modules of these, and programs that these start.
BENCHMARKS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "make_parser(__doc__)" in path.read_text()]
SCRIPTS = [ROOT / "scripts" / f"{name}.py" for name in ("figures", "gpu_bundle", "run_tests", "vllm_seams")]


def test_there_are_at_most_ten_benchmarks() -> None:
    assert 0 < len(BENCHMARKS) <= 10


def run(program: Path, arguments: Sequence[object], folder: Path) -> str:
    """
    Returns:
        What it prints.
    """
    output = folder / "output.txt"
    code = ForkedProgram(program, arguments, output).wait()
    assert code == 0, output.read_text()
    return output.read_text()


@pytest.mark.parametrize("program", [*BENCHMARKS, *SCRIPTS], ids=lambda path: path.stem)
def test_help(program: Path, tmp_path: Path) -> None:
    shown = run(program, ["--help"], tmp_path)
    assert shown.startswith(f"usage: {program.name}") and "options:" in shown
    if program in BENCHMARKS:
        assert "--quick" in shown and "--output" in shown


def simulate(stage: dict[str, float], listeners: int, folder: Path) -> dict[str, float | str]:
    """The row of a simulation of two such stages."""
    one = {"step_ms": 10, "per_request_ms": 1, "units_per_s": 4, "max_num_seqs": 4}
    stages = json.dumps([{"name": name, **one, **stage} for name in ("first", "second")])
    output = folder / "simulate.json"
    shown = run(
        ROOT / "benchmarks" / "scale_out.py",
        ["--simulate", "--quick", "--listeners", listeners, "--stages", stages, "--output", output],
        folder,
    )
    report = json.loads(output.read_text())
    assert report["settings"]["cores"] >= 1 and f"written to {output}" in shown
    assert all(note in shown for note in report["notes"])
    (row,) = report["rows"]
    lines = shown.splitlines()
    (header,) = (i for i, line in enumerate(lines) if line.split()[:2] == ["listeners", "replicas"])
    assert len(lines[header]) == len(lines[header + 1]) == len(lines[header + 2]), "columns are aligned"
    return row


def test_one_answer_takes_the_steps_that_it_needs(tmp_path: Path) -> None:
    """Two steps of the first stage, one of the second; each stage begins with a prefill."""
    row = simulate({"prefill_ms": 5}, 1, tmp_path)
    assert row["first_audio_p95_s"] == pytest.approx(0.005 + 2 * 0.011 + 0.016)
    assert row["interrupted"] == 0 and row["replicas"] == "1 first, 1 second"


def test_what_is_too_slow_is_heard_and_gets_replicas(tmp_path: Path) -> None:
    row = simulate({"step_ms": 100, "per_request_ms": 30}, 20, tmp_path)
    assert row["interrupted"] <= 0.01 and row["first_audio_p95_s"] <= 1.0
    assert row["replicas"] != "1 first, 1 second"


def test_a_figure_has_a_line_for_each_latency_and_a_point_for_each_count(tmp_path: Path) -> None:
    metrics = ("TTFT p50 ms", "TTFA p50 ms", "E2EL p50 ms")
    rows = [
        {"part": "chat", "backend": backend, "concurrency": count} | dict.fromkeys(metrics, 20.0 * count)
        for backend in ("server", "direct")
        for count in (1, 4, 16)
    ]
    report, figure = tmp_path / "report.json", tmp_path / "figures" / "load.svg"
    report.write_text(json.dumps({"rows": rows}))
    run(ROOT / "scripts" / "figures.py", ["load", report, figure], tmp_path)
    polylines = ElementTree.fromstring(figure.read_text()).iter("{http://www.w3.org/2000/svg}polyline")
    lines = [line.get("points", "").split() for line in polylines]
    assert [len(points) for points in lines] == [3, 3, 3]
    xs, ys = zip(*(map(float, point.split(",")) for point in lines[0]), strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1]) and ys[0] - ys[1] == pytest.approx(ys[1] - ys[2])
