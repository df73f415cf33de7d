# SPDX-License-Identifier: Apache-2.0
"""Which package may import which, as docs/architecture.md shows it; imports inside functions count too."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_omni"

ORDER = (
    "__init__",  # the public names, looked up on first use
    "plugin",
    "entrypoints.cli",
    "entrypoints.openai",
    "entrypoints",
    "orchestrator",
    "launch",
    "kinds",
    "stage",
    "placement",
    "executor",
    "worker",
    "model_executor",
    "diffusion",
    "engine",
    "core",
    "distributed",
    "function_stage",
    "events",
    "inputs",
    "outputs",
    "metrics",
    "notebook",
    "media",
    "payloads",
    "sampling_params",
    "checkpoint_weights",
    "config",
    "control",
    "vllm_requirement",
    "vllm_versions",
    "vllm_protocol",
    "extras",
    "errors",
    "testing",  # imports nothing of ours but the declarations of models
    "model_packages",
    "version",
)
"""From the top. Each imports only itself and those below it."""


def layer(module: str) -> str:
    """The entry of `ORDER` that a module, given without `vllm_omni.`, belongs to."""
    names = [name for name in ORDER if module == name or module.startswith(f"{name}.")]
    assert names, f"{module} has no place in the order of the packages"
    return max(names, key=len)


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports, anywhere in it, without `vllm_omni.`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide dependencies"
            if node.module == "vllm_omni":
                found |= {alias.name for alias in node.names}
            elif node.module is not None and is_ours(node.module):
                module = node.module.removeprefix("vllm_omni.")
                found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}  # A name may be a module.
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("vllm_omni.") for alias in node.names if is_ours(alias.name)}
    return found


def is_ours(module: str) -> bool:
    return module.startswith("vllm_omni.")


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("name", ORDER)
def test_a_package_imports_only_those_below_it(name: str) -> None:
    files = [path for path in FILES if layer(module_of(path)) == name]
    assert files, f"{name} is no package or module"
    allowed = ORDER[ORDER.index(name) :]
    upward = {
        str(path.relative_to(PACKAGE)): above
        for path in files
        if (above := sorted(module for module in imports(path) if layer(module) not in allowed))
    }
    assert upward == {}


def module_of(path: Path) -> str:
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return module.removesuffix(".__init__")


def test_no_modules_import_each_other() -> None:
    """Neither two nor more in a circle; imports for annotations count too."""
    modules = {module_of(path) for path in FILES}
    left = {module_of(path): imports(path) & modules for path in FILES}
    while outside := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in outside:
            del left[name]
    assert left == {}, "these are in a circle, or import one that is"


FAMILIES = {
    re.split(r"[\d_]", folder.name)[0] for folder in (PACKAGE / "model_executor/models").iterdir() if folder.is_dir()
} - {""}
"""The first words of the models' names."""


def test_core_code_names_no_model() -> None:
    assert {"csm", "qwen"} <= FAMILIES
    for path in FILES:
        if layer(module_of(path)) not in ("testing", "model_executor", "diffusion"):
            text = path.read_text().lower().replace("qwen/qwen3-omni-30b-a3b-instruct", "")  # an example
            found = re.findall(rf"\b_?(?:omni)?(?:{'|'.join(FAMILIES)})", text)
            assert not found, f"{path} names {found[0]}"


def test_what_serves_every_model_names_no_part_of_one() -> None:
    for path in FILES:
        module = module_of(path)
        core = ("entrypoints", "orchestrator", "launch", "stage", "executor", "worker", "core")
        if module.startswith(core):
            found = re.findall(r"\b(?:thinker|talker|speaker|code2wav|token2wav)s?\b", path.read_text().lower())
            assert not found, f"{path} names a {found[0]}"


OTHERS = ("coloured_shapes", "vllm_omni_playground", "vllm_omni_talk")
"""The packages beside it in this repository."""


def test_the_core_names_no_other_package_of_this_repository() -> None:
    """It finds them by their entry points."""
    assert {path.parent.name for path in ROOT.glob("packages/*/*/__init__.py")} == set(OTHERS)
    for path in FILES:
        if module_of(path) != "model_packages":  # It says how the distribution `coloured_shapes` is installed.
            found = re.findall(rf"\b(?:{'|'.join(OTHERS)})\b", path.read_text())
            assert not found, f"{path} names {found[0]}"


MAY_IMPORT = {
    "playground": {"entrypoints.root_path", "errors", "extras", "metrics.status_line", "model_packages"},
    "talk": {
        *("distributed.locked_folder", "entrypoints.cli.demo_results", "entrypoints.omni_llm", "errors", "extras"),
        *("function_stage", "inputs", "metrics.logs", "model_packages", "outputs"),
    },
}
"""Modules of the core by the folder in `packages/`. The playground is a client, and knows a server by HTTP alone."""


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_package_beside_the_core_imports_what_others_may(name: str) -> None:
    files = list(ROOT.glob(f"packages/{name}/**/*.py"))
    assert {module for path in files for module in imports(path) if is_module(module)} == MAY_IMPORT[name]
    found = set().union(*(imported_packages(ast.parse(path.read_text())) for path in files))
    assert found & {"vllm", *OTHERS} == {f"vllm_omni_{name}"}


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imported_packages(tree: ast.AST) -> set[str]:
    """The top-level names that import statements have, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def test_messages_need_neither_torch_nor_vllm() -> None:
    code = "import sys, vllm_omni.distributed.messages; print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
