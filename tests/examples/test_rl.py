# SPDX-License-Identifier: Apache-2.0
"""`examples/rl`: training with the rollouts of a pipeline improves them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def train(name: str, steps: int, *flags: str) -> tuple[list[float], float, str]:
    """The rewards, the largest difference of log-probabilities, and the line that compares with the reference, if the
    flags ask for one."""
    command = [sys.executable, str(ROOT / "examples/rl" / name), "--steps", str(steps), *flags]
    folders = (ROOT, ROOT / "packages/coloured_shapes", ROOT / "packages/talk")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True, env=environment)
    lines = re.findall(r"step (\d+): reward ([\d.]+), weights ([\w-]+), difference ([\de.-]+)", done.stdout)
    assert [(int(step), weights) for step, _, weights, _ in lines] == [
        (step, f"step-{step - 1}" if step else "default") for step in range(steps)
    ]
    compared = next((line for line in done.stdout.splitlines() if " per second: " in line), "")
    return [float(reward) for _, reward, _, _ in lines], max(float(each) for *_, each in lines), compared


@pytest.mark.slow
def test_grpo_improves_the_reward() -> None:
    rewards, difference, compared = train("grpo.py", 15, "--compare")
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])
    assert difference < 1e-4
    assert compared.endswith("equal replies: 32 of 32")


@pytest.mark.slow
def test_grpo_of_an_omni_model_improves_its_answers() -> None:
    rewards, difference, _ = train("grpo_shapes.py", 20)
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])
    assert difference < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_flow_grpo_improves_the_reward() -> None:
    rewards, difference, compared = train("flow_grpo.py", 12, "--compare")
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])
    assert difference < 1e-5
    latents, pixels = re.findall(r"latents ([\de.-]+), pixels (\d+) of 255", compared)[0]
    assert float(latents) < 1e-4 and int(pixels) <= 1
