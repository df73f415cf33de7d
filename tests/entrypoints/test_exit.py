# SPDX-License-Identifier: Apache-2.0
"""Programs that exit without closing a busy pipeline: they exit at once, and leave nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.entrypoints.fake_pipelines import STAGES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# Its iterator is closed when the interpreter clears the module: the preprocessing thread no longer runs then.
STREAM = """
import sys, time
from tests.entrypoints.fake_pipelines import long_prompt
from vllm_omni import OmniLLM

llm = OmniLLM("", sys.argv[1])
builder = llm._pipeline.builder
build = builder.build
def build_slowly(prompt, *args, **kwargs):
    if prompt["prompt"] == "slow":
        time.sleep(1000)
    return build(prompt, *args, **kwargs)
builder.build = build_slowly
events = llm.generate([long_prompt(), long_prompt("slow")], stream=True, use_tqdm=True)
next(events)
"""

ASYNC = """
import asyncio, sys
from tests.entrypoints.fake_pipelines import long_prompt
from vllm_omni import AsyncOmniLLM

llm = AsyncOmniLLM("", sys.argv[1])
async def main():
    async for event in llm.generate(long_prompt()):
        sys.exit(3)
asyncio.run(main())
"""


def processes_of_session(session: int) -> list[int]:
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            if os.getsid(pid) == session:
                found.append(pid)
        except ProcessLookupError:
            continue
    return found


def test_programs_exit_cleanly_during_a_stream(tmp_path: Path) -> None:
    config = tmp_path / "stages.yaml"
    config.write_text(yaml.safe_dump({"stage_args": list(STAGES)}))
    programs = {
        name: subprocess.Popen(
            [sys.executable, "-c", code, str(config)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for name, code in {"stream": STREAM, "async": ASYNC}.items()
    }
    try:
        stderr = {name: program.communicate(timeout=120)[1] for name, program in programs.items()}
    finally:
        for program in programs.values():
            program.kill()
    for name, program in programs.items():
        assert program.returncode == (3 if name == "async" else 0), stderr[name]
        for noise in ("Traceback", "Exception ignored", "leaked", "Error"):
            assert noise not in stderr[name], stderr[name]
        assert processes_of_session(program.pid) == []
        assert not list(Path("/dev/shm").glob(f"vllm_omni-{program.pid}-*"))
