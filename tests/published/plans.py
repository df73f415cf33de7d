# SPDX-License-Identifier: Apache-2.0
"""Memory needs of the shipped configurations for published checkpoints; as a program it prints JSON.

    python -m tests.published.plans [--markdown]

It needs its own process, because building a mixture of experts needs vLLM's process groups, which another engine may
have created without those of experts.
"""

import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
CHECKPOINTS = {
    "qwen3_omni_30b_a3b_instruct": "Qwen3-Omni-30B-A3B-Instruct",
    "qwen2_5_omni_7b": "Qwen2.5-Omni-7B",
    "qwen2_5_omni_3b": "Qwen2.5-Omni-3B",
}
LONGER = "--stage.thinker.max_model_len 32768 --stage.talker.max_model_len 36864"
ON_24_GB = (
    "--stage.thinker.max_model_len 16384 --stage.talker.gpu_memory_utilization 0.1 "
    "--stage.token2wav.gpu_memory_utilization 0.2"
)
ROWS = (
    ("qwen3_omni_30b_a3b_instruct", "1 x 80 GB", ""),
    ("qwen3_omni_30b_a3b_instruct", "1 x 80 GB", LONGER),
    ("qwen3_omni_30b_a3b_instruct", "1 x 80 GB", "--stage.thinker.quantization fp8"),
    ("qwen3_omni_30b_a3b_instruct", "2 x 80 GB", "--stage-configs-path qwen3_omni_moe_2x80gb"),
    ("qwen3_omni_30b_a3b_instruct", "1 x 141 GB", "--stage-configs-path qwen3_omni_moe_141gb"),
    ("qwen2_5_omni_7b", "1 x 48 GB", ""),
    ("qwen2_5_omni_7b", "1 x 80 GB", ""),
    ("qwen2_5_omni_7b", "2 x 80 GB", "--stage.talker.runtime.devices 1 --stage.token2wav.runtime.devices 1"),
    ("qwen2_5_omni_7b", "1 x 141 GB", ""),
    ("qwen2_5_omni_3b", "1 x 24 GB", ON_24_GB),
    ("qwen2_5_omni_3b", "1 x 48 GB", ""),
    ("qwen2_5_omni_3b", "1 x 80 GB", ""),
)
"""Checkpoint, machine, and options."""


@functools.cache
def compute_plans() -> list[dict[str, Any]]:
    """The rows' plans, computed in a process of its own."""
    command = [sys.executable, "-m", "tests.published.plans"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """The table of `docs/models.md`."""
    lines = [
        "| checkpoint, GPUs, options | stage | weights | activations | KV cache of one request | needs | budget | KV "
        "cache has room for |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        options = f"<br>`{row['options']}`" if row["options"] else ""
        title = f"{CHECKPOINTS[row['checkpoint']]}, {row['machine']}{options}"
        for stage in row["stages"]:
            length = f" of {stage['max_model_len']:,} tokens" if stage["kv_request"] else ""
            cache = f"{_gib(stage['kv_request'])}{length}" if length else ""
            room = f"{stage['room'] // 1000:,},000 tokens" if length else ""
            parts = [_gib(stage[name]) for name in ("weights", "activations")]
            cells = (title, stage["name"], *parts, cache, _gib(stage["needs"]), _gib(stage["budget"]), room)
            lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
            title = ""
    return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / (1 << 30):.1f}"


def _compute() -> list[dict[str, Any]]:
    import torch

    from vllm_omni.entrypoints.cli.doctor_memory import MACHINES, MemoryPlanner
    from vllm_omni.entrypoints.cli.serve import OmniServeCommand, make_omni_args
    from vllm_omni.entrypoints.resolve import read_pipeline

    machines = {machine.name: machine for machine in MACHINES}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in CHECKPOINTS:
            (path := Path(folder, name)).mkdir()
            config = (FOLDER / f"{name}.json").read_text()
            (path / "config.json").write_text(config)
            if "token2wav_config" in config:
                voice = {"bos_token": 0, "cond": torch.zeros(1, 192), "ref_mel": torch.zeros(1, 1, 80)}
                torch.save({"Chelsie": voice}, path / "spk_dict.pt")
        planners = {}
        for name, options in dict.fromkeys((name, options) for name, _, options in ROWS):
            args = make_omni_args(OmniServeCommand().parse([str(Path(folder, name)), *options.split()]))
            planners[name, options] = MemoryPlanner(read_pipeline(args).with_checkpoints, args.model)
        for name, machine, options in ROWS:
            plan = planners[name, options].plan(machines[machine])
            stages = [
                {
                    "name": stage.stage.name,
                    **dataclasses.asdict(stage.needs),  # type: ignore[arg-type]
                    "needs": stage.needed,
                    "budget": stage.budget,
                    "room": stage.room,
                }
                for stage in plan.stages
            ]
            row = {"checkpoint": name, "machine": machine, "options": options, "problems": plan.problems}
            rows.append(row | {"verdict": plan.verdict, "stages": stages})
    return rows


if __name__ == "__main__":
    result = _compute()
    print(as_markdown(result) if "--markdown" in sys.argv else json.dumps(result))
