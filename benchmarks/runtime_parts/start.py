# SPDX-License-Identifier: Apache-2.0
"""From the start of a Python process until it takes requests: pipelines of 3 and 6 stages against one `vllm.LLM`."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from report import Report, percentile, progress

from runtime_parts import starter
from runtime_parts.rows import add_row
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

PLAIN = "vllm.LLM"
NOTES = (
    "a start is from the start of a Python process until what it makes takes requests, all with the same dtype and KV "
    "cache; vllm.LLM runs a tiny text model, we the tiny Qwen3-Omni, once and twice side by side",
    "start_3_stages, start_6_stages: our time to that of vllm.LLM, below 0.7 is wanted of 3 stages",
)


def measure_start(report: Report, quick: bool) -> None:
    """Adds `start_3_stages` and `start_6_stages`: our time to plain vLLM's; below is better."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        text, omni = directory / "text", directory / "omni"
        commands = {
            PLAIN: ["plain", str(write_tiny_checkpoint("qwen3", text))],
            "3 stages": ["omni", str(write_tiny_checkpoint("qwen3_omni_moe", omni))],
            "6 stages": ["omni", str(omni), str(_write_doubled_config(directory))],
        }
        progress("start: warming up the file system's cache")
        _time_of_start(commands["3 stages"])
        seconds: dict[str, list[float]] = {who: [] for who in commands}
        for number in range(1 if quick else 3):
            for who, command in commands.items():
                progress(f"start: {who}, round {number + 1}")
                seconds[who].append(_time_of_start(command))
    _add_results(report, seconds)


def _add_results(report: Report, seconds: dict[str, list[float]]) -> None:
    median = {who: percentile(values, 50) for who, values in seconds.items()}
    for who, values in seconds.items():
        add_row(report, f"start: {who}", values, "s")
    for stages in (3, 6):
        report.ratios[f"start_{stages}_stages"] = median[f"{stages} stages"] / median[PLAIN]
    report.notes += NOTES


def _time_of_start(command: list[str]) -> float:
    """Seconds until the process says that it is ready. Waits for its end, too."""
    ready: float | None = None
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            [sys.executable, starter.__file__, *command], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() == starter.READY:
                    ready = time.monotonic() - started
        if ready is None:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} did not start:\n{errors.read()}")
    return ready


def _write_doubled_config(directory: Path) -> Path:
    """The three stages of Qwen3-Omni twice, side by side."""
    config: dict[str, Any] = yaml.safe_load((stage_configs_dir() / "qwen3_omni_moe.yaml").read_text())
    config["stage_args"] += [_second(stage) for stage in config["stage_args"]]
    del config["runtime"]
    path = directory / "six.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _second(stage: dict[str, Any]) -> dict[str, Any]:
    return stage | {
        "stage_id": stage["stage_id"] + 3,
        "engine_args": stage["engine_args"] | {"model_stage": f"{stage['engine_args']['model_stage']}_2"},
        "engine_input_source": [source + 3 for source in stage.get("engine_input_source", [])],
    }
