# SPDX-License-Identifier: Apache-2.0
"""Who may import whom, as docs/architecture.md draws it; imports inside functions count too."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "vllm_omni"
MODELS = "vllm_omni.model_executor.models"


def imports(path: Path) -> set[str]:
    """Modules of ours that a file names in an import, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "vllm_omni"}


def breaches(*places: str, allowed) -> dict[str, list[str]]:
    """Imports of the files under these places that are not allowed, by file."""
    paths = [path for place in places for path in sorted(PACKAGE.glob(place))]
    assert paths, places
    found = {str(path.relative_to(PACKAGE)): [name for name in imports(path) if not allowed(name)] for path in paths}
    return {path: names for path, names in found.items() if names}


def test_the_runtime_names_no_model():
    assert breaches("orchestrator/**/*.py", "stage/**/*.py", allowed=lambda name: not name.startswith(MODELS)) == {}


def test_core_code_names_no_model():
    for room in ("orchestrator", "stage", "distributed", "config", "engine", "core", "worker", "entrypoints"):
        for path in (PACKAGE / room).rglob("*.py"):
            text = path.read_text().lower().replace("qwen/qwen3-omni-30b-a3b-instruct", "")  # an example
            assert "qwen" not in text, path


def test_the_foundation_imports_nothing_else_of_ours():
    foundation = ("vllm_omni.config", "vllm_omni.errors", "vllm_omni.engine.payloads")
    packages = ("vllm_omni", "vllm_omni.engine")  # where these stand
    places = ("config/*.py", "errors.py", "engine/payloads.py")
    assert breaches(*places, allowed=lambda name: name.startswith(foundation) or name in packages) == {}


def test_only_entrypoints_import_entrypoints():
    rooms = [f"{path.name}/**/*.py" for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    places = [place for place in rooms if not place.startswith("entrypoints/")]
    assert breaches(*places, allowed=lambda name: not name.startswith("vllm_omni.entrypoints")) == {}
