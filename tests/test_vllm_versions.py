# SPDX-License-Identifier: Apache-2.0
"""What depends on vLLM's version stands in `vllm_omni/vllm_versions`, the same for each version, and nowhere else."""

import ast
from pathlib import Path

import pytest

from vllm_omni import vllm_versions
from vllm_omni.vllm_requirement import VLLM_VERSIONS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_omni" / "vllm_versions"
FOLDERS = [f"v{version.replace('.', '_')}" for version in VLLM_VERSIONS]
OTHERS = [
    path
    for folder in (ROOT / "vllm_omni", ROOT / "packages", ROOT / "benchmarks")
    for path in folder.rglob("*.py")
    if PACKAGE not in path.parents
]


def exported(path: Path) -> list[str]:
    """The names in `__all__`."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def test_the_installed_version_has_a_folder():
    assert vllm_versions.folder() in FOLDERS


def test_each_version_has_the_same_modules_and_names():
    assert sorted(path.name for path in PACKAGE.glob("v*")) == FOLDERS
    first, *others = ({path.name: exported(path) for path in (PACKAGE / folder).glob("*.py")} for folder in FOLDERS)
    assert all(other == first for other in others)
    names = [name for path, exports in first.items() for name in exports if path != "__init__.py"]
    assert sorted(names) == sorted(vllm_versions.__all__) == sorted(vllm_versions._MODULES)


@pytest.mark.parametrize("name", vllm_versions.__all__)
def test_each_name_is_that_of_the_installed_version(name):
    assert vllm_versions.__getattr__(name) is getattr(vllm_versions, name)


def test_a_name_that_no_version_has_is_an_error():
    with pytest.raises(AttributeError, match=r"vllm_omni\.vllm_versions.*'Nothing'"):
        vllm_versions.Nothing  # noqa: B018


def version_code(tree: ast.AST) -> list[str]:
    """Lines of code that read which vLLM is installed, or take something from one version's folder."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        if any(reads_version(name) for name in names):
            found.append(ast.unparse(node))
    return found


def reads_version(name: str) -> bool:
    of_ours = name.partition("vllm_versions.")[2]
    of_vllm = name.removeprefix("vllm.").partition(".")[0] if name.startswith("vllm.") else ""
    return "version" in of_vllm or (bool(of_ours) and of_ours not in vllm_versions.__all__)


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("import vllm\nif vllm.__version__ > '0.32': pass", True),
        ("import vllm\nvllm.version", True),
        ("from vllm import __version__", True),
        ("from vllm.version import __version_tuple__", True),
        ("from vllm._version import version", True),
        ("from vllm_omni.vllm_versions.v0_33.workers import CPULoRARunner", True),
        ("from vllm_omni import vllm_versions\nvllm_versions.folder()", True),
        ("from vllm_omni.vllm_versions import CPULoRARunner", False),
        ("import torch\ntorch.__version__", False),
    ],
)
def test_code_that_reads_the_version_is_found(code, is_found):
    assert bool(version_code(ast.parse(code))) == is_found


def test_no_other_code_depends_on_the_version():
    found = {
        str(path.relative_to(ROOT)): code for path in OTHERS if (code := version_code(ast.parse(path.read_text())))
    }
    assert found == {}
