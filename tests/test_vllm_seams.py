# SPDX-License-Identifier: Apache-2.0
"""What our code takes from vLLM is there in each supported version, as `scripts/vllm_seams` says.

So an incompatible vLLM fails here and not at run time: docs/upgrading_vllm.md says how one is taken.
"""

import ast
import importlib.util
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_omni.vllm_requirement import VLLM_VERSIONS

ROOT = Path(__file__).parents[1]
SCRIPT = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "vllm_seams.py")))
PAGE = (ROOT / "docs" / "upgrading_vllm.md").read_text()
WRITE = "make seams"
ONLY_IN_ONE = {"vllm.v1.outputs:AsyncModelRunnerOutput.get_kv_connector_output"}
"""Methods that we have for the versions that call them."""

MOVING = ("vllm.entrypoints.", "vllm.renderers")
"""Packages that vLLM rearranges: in 0.33, all names that we import and that are elsewhere were of these."""

NOT_VLLMS = {"_actions", "_from_config", "_make_wrapper_subclass"}
"""Private names of argparse, transformers and torch, which vLLM's code has, too."""


@pytest.fixture(scope="module")
def universe():
    """Ours and the installed vLLM, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    return SCRIPT.Universe(SCRIPT.Sources.open(Path(spec.origin).parents[1]))


@pytest.fixture(scope="module")
def seams(universe):
    return SCRIPT.Seams(universe)


def test_each_supported_version_has_data():
    assert sorted(path.stem for path in SCRIPT.DATA.glob("*.json")) == sorted(VLLM_VERSIONS)


def test_the_data_are_those_of_the_installed_version(universe, seams):
    assert universe.minor in VLLM_VERSIONS
    known = SCRIPT.read_data(universe.minor)
    if seams.found != known:
        pytest.fail(f"Run `{WRITE}`. vLLM {universe.version}, compared with the data:\n{SCRIPT.report(known, seams)}")


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_each_seam_is_in_each_version(version, seams):
    known = SCRIPT.read_data(version)
    needed = {seam for seam in SCRIPT.all_of(seams.found) if not is_of_one_version(seams.users[seam])} - ONLY_IN_ONE
    there = {seam for entries in known.values() for seam, value in entries.items() if value != "gone"}
    missing = {seam: sorted(seams.users[seam]) for seam in needed - there}
    assert missing == {}, f"vLLM {version} does not have them; or run `{WRITE}`"


def is_of_one_version(users: set[str]) -> bool:
    return all(user.startswith("vllm_omni/vllm_versions/v") for user in users)


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_each_override_takes_the_arguments_of_each_version(version, seams):
    assert SCRIPT.not_taken(seams, SCRIPT.read_data(version)) == []


def test_one_module_takes_each_name_that_may_move(seams):
    users = {seam: seams.users[seam] for seam in seams.found["imports"] if seam.startswith(MOVING)}
    assert len(users) > 30
    assert {seam: sorted(files) for seam, files in users.items() if len(files) > 1} == {}


def test_each_private_name_has_a_reason(universe, seams):
    """They change without a word: docs/upgrading_vllm.md says why each is used."""
    names = {re.split(r"[.:]", seam)[-1] for seam in SCRIPT.all_of(seams.found)} | read_of_objects(universe)
    private = set(filter(is_private, names))
    rows = re.findall(r"^\| ((?:`_\w+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    assert private == set(re.findall(r"\w+", " ".join(rows)))


def read_of_objects(universe) -> set[str]:
    """Private names that our code reads of objects of any class, and that vLLM defines while we do not."""
    nodes = [node for _, module in universe.ours() for node in module.nodes]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and len(node.args) > 1]
    read = {it.attr for it in attributes if isinstance(it.ctx, ast.Load)}
    read |= {SCRIPT.text_of(it.args[1]) or "" for it in calls if getattr(it.func, "id", "") == "getattr"}
    defined = {it.attr for it in attributes if isinstance(it.ctx, ast.Store)}
    defined |= {name for node in nodes if isinstance(node, ast.stmt) for name in SCRIPT.defined_names(node)}
    return set(filter(is_private, read - defined)) & defined_by_vllm() - NOT_VLLMS


def defined_by_vllm() -> set[str]:
    """Of functions, of attributes that are set or called, and of names at the begin of a line in a body."""
    used = re.compile(r"(_[a-z]\w*)(?:\(|\s*(?::[^=\n]+)?=[^=])")  # Its first letter is fixed: quick to find.
    before = re.compile(r"(?:\bdef |[\w)\]]\.|^ +)$")
    folder = Path(importlib.util.find_spec("vllm").origin).parent
    texts = [path.read_text() for path in folder.rglob("*.py")]
    found = [(text, match) for text in texts for match in used.finditer(text)]
    return {
        match[1] for text, match in found if before.search(text[text.rfind("\n", 0, match.start()) + 1 : match.start()])
    }


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_each_object_that_becomes_one_of_ours_has_a_reason():
    found = {
        f"{path.relative_to(ROOT / 'vllm_omni')}"
        for path in (ROOT / "vllm_omni").rglob("*.py")
        if re.search(r"\.__class__ = ", path.read_text())
    }
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", PAGE, re.MULTILINE))
    assert found == listed
