# SPDX-License-Identifier: Apache-2.0
"""Programs that exit without closing a busy pipeline: they exit at once, and leave nothing behind."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.distributed.test_run_dir import memory  # noqa: F401 (a fixture)
from tests.entrypoints.fake_pipelines import STAGES
from tests.servers import import_path

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

MEMORY = """
import sys
from pathlib import Path
from vllm_omni.distributed import run_dir

run_dir.MEMORY_FILE_SYSTEM = Path(sys.argv[2])
"""

# Its iterator is closed when the interpreter clears the module: the preprocessing thread no longer runs then.
STREAM = """
import time
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
import asyncio
from tests.entrypoints.fake_pipelines import long_prompt
from vllm_omni import AsyncOmniLLM

llm = AsyncOmniLLM("", sys.argv[1])
async def main():
    async for event in llm.generate(long_prompt()):
        sys.exit(3)
asyncio.run(main())
"""


def processes_of_session(session: int) -> list[int]:
    """Those that have not ended; a zombie has, and the system's first process has not read its status yet."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def test_programs_exit_cleanly_during_a_stream(tmp_path: Path, memory: Path) -> None:  # noqa: F811
    config = tmp_path / "stages.yaml"
    config.write_text(yaml.safe_dump({"stage_args": list(STAGES)}))
    programs = {
        name: subprocess.Popen(
            [sys.executable, "-c", MEMORY + code, str(config), str(memory)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": import_path(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for name, code in {"stream": STREAM, "async": ASYNC}.items()
    }
    try:
        stderr = {name: program.communicate()[1] for name, program in programs.items()}
    finally:
        for program in programs.values():
            program.kill()
    for name, program in programs.items():
        assert program.returncode == (3 if name == "async" else 0), stderr[name]
        for noise in ("Traceback", "Exception ignored", "leaked", "Error"):
            assert noise not in stderr[name], stderr[name]
        assert processes_of_session(program.pid) == []
    assert list(memory.iterdir()) == []
