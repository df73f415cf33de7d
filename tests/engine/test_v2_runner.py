# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner without a GPU."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm.triton_utils import HAS_TRITON

from tests.engine import test_async_scheduling


@pytest.mark.slow
@pytest.mark.skipif(HAS_TRITON or find_spec("triton") is None, reason="needs a Triton that cannot compile here")
def test_steps_that_overlap() -> None:
    """Not with a grammar, whose kernel has masks that the interpreter does not take, nor twice what takes long."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.engine.interpreted_triton", "-p", "no:cacheprovider", "-n0"]
    what = "v2 and not grammar and not sequences and not (loses and not penalties-6)"
    selection = ["-k", what, "--no-header", "-q", test_async_scheduling.__file__]
    root = Path(__file__).parents[2]
    done = subprocess.run([*command, *selection], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    summary = done.stdout.splitlines()[-1]  # Libraries print at their end what they have skipped, too: on stderr.
    assert "passed" in summary and "skipped" not in summary
