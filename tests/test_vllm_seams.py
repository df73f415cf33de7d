# SPDX-License-Identifier: Apache-2.0
"""What our code takes from vLLM is there in each supported version, as `scripts/vllm_seams` says.

So an incompatible vLLM fails here and not at run time: docs/upgrading_vllm.md says how one is taken.
"""

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


def test_each_private_name_has_a_reason(seams):
    """They change without a word: docs/upgrading_vllm.md says why each is used."""
    names = {re.split(r"[.:]", seam)[-1] for seam in SCRIPT.all_of(seams.found)}
    private = {name for name in names if name.startswith("_") and not name.startswith("__")}
    rows = re.findall(r"^\| ((?:`_\w+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    assert private == set(re.findall(r"\w+", " ".join(rows)))


def test_each_object_that_becomes_one_of_ours_has_a_reason():
    found = {
        f"{path.relative_to(ROOT / 'vllm_omni')}"
        for path in (ROOT / "vllm_omni").rglob("*.py")
        if re.search(r"\.__class__ = ", path.read_text())
    }
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", PAGE, re.MULTILINE))
    assert found == listed
