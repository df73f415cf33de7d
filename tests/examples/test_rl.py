# SPDX-License-Identifier: Apache-2.0
"""`examples/rl`: training with the rollouts of a pipeline improves them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_grpo_improves_the_reward() -> None:
    command = [sys.executable, str(ROOT / "examples/rl/grpo.py"), "--steps", "15"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True, env=environment)
    lines = re.findall(r"step (\d+): reward ([\d.]+), weights ([\w-]+), difference ([\de.-]+)", done.stdout)
    assert [(int(step), weights) for step, _, weights, _ in lines] == [
        (step, f"step-{step - 1}" if step else "default") for step in range(15)
    ]
    rewards = [float(reward) for _, reward, _, _ in lines]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])
    assert max(float(difference) for *_, difference in lines) < 1e-4
