# SPDX-License-Identifier: Apache-2.0
"""docs/stability.md names what there is."""

import ast
import re
import tomllib
from collections.abc import Iterator

import vllm_omni
from tests.docs.pages import ROOT, snippets
from vllm_omni.entrypoints.cli import main
from vllm_omni.model_packages import find_models

TEXT = (ROOT / "docs" / "stability.md").read_text()


def names(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_stable_names() -> None:
    (imports,) = re.findall(r"^The names of `vllm_omni` are (.*?)\. ", TEXT, re.DOTALL | re.MULTILINE)
    (authors,) = re.findall(r"^## For authors of models\s+(.*?),\s+which\s+are\s+names", TEXT, re.DOTALL | re.MULTILINE)
    assert names(imports) | names(authors) == set(vllm_omni.__all__)
    (commands,) = re.findall(r"^\| commands \| (.*?);", TEXT, re.MULTILINE)
    assert names(commands.partition("those of `vllm-omni`:")[2]) == {*main._COMMANDS, *find_models().commands}
    (extras,) = re.findall(r"^\| extras \| (.*?) \|", TEXT, re.MULTILINE)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert names(extras) == known.keys() - {"test", "lint", "docs"}


def test_programs_import_nothing_else() -> None:
    modules = re.findall(r"`(vllm_omni\.[\w.]+)`", TEXT)
    programs = [(str(snippet), snippet.text) for snippet in snippets("python")]
    programs += [(str(path), path.read_text()) for path in sorted((ROOT / "examples").rglob("*.py"))]
    for where, text in programs:
        tree = compile(text, where, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for module, name in imported(tree):
            is_public = module == "vllm_omni" and name in vllm_omni.__all__
            assert is_public or f"{module}.".startswith(tuple(f"{each}." for each in modules)), f"{where}: {module}"


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The modules of this package that a program imports, and the names from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            pairs = [(node.module or "", alias.name) for alias in node.names]
        else:
            pairs = [(alias.name, "") for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (pair for pair in pairs if pair[0].partition(".")[0] == "vllm_omni")
