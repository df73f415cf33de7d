# SPDX-License-Identifier: Apache-2.0
"""`examples/rl`: training with the rollouts of a pipeline improves them."""

import os
import re
from pathlib import Path

import pytest

from tests.forked_programs import ForkedProgram

ROOT = Path(__file__).parents[2]


def train(folder: Path, name: str, steps: int, *flags: str) -> tuple[list[float], float, str]:
    """The rewards, the largest difference of log-probabilities, and the line that compares with the reference, if the
    flags ask for one."""
    folders = (ROOT, ROOT / "packages/coloured_shapes", ROOT / "packages/talk")
    environment = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    output = folder / "output"
    program = ForkedProgram(ROOT / "examples/rl" / name, ["--steps", steps, *flags], output, environment)
    assert program.wait() == 0, output.read_text()
    printed = output.read_text()
    lines = re.findall(r"step (\d+): reward ([\d.]+), weights ([\w-]+), difference ([\de.-]+)", printed)
    assert [(int(step), weights) for step, _, weights, _ in lines] == [
        (step, f"step-{step - 1}" if step else "default") for step in range(steps)
    ]
    compared = next((line for line in printed.splitlines() if " per second: " in line), "")
    return [float(reward) for _, reward, _, _ in lines], max(float(each) for *_, each in lines), compared


@pytest.mark.slow
def test_grpo_improves_the_reward(tmp_path: Path) -> None:
    rewards, difference, compared = train(tmp_path, "grpo.py", 15, "--compare")
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])
    assert difference < 1e-4
    assert compared.endswith("equal replies: 32 of 32")


@pytest.mark.slow
def test_grpo_of_an_omni_model_improves_its_answers(tmp_path: Path) -> None:
    rewards, difference, _ = train(tmp_path, "grpo_shapes.py", 20)
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])
    assert difference < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_flow_grpo_improves_the_reward(tmp_path: Path) -> None:
    rewards, difference, compared = train(tmp_path, "flow_grpo.py", 12, "--compare")
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])
    assert difference < 1e-5
    latents, pixels = re.findall(r"latents ([\de.-]+), pixels (\d+) of 255", compared)[0]
    assert float(latents) < 1e-4 and int(pixels) <= 1
