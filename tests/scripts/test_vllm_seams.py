# SPDX-License-Identifier: Apache-2.0
"""`scripts/vllm_seams.py` finds what another version makes of what we take, in a small vLLM of two versions."""

import json
import runpy
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm_seams.py"

OURS = {
    "vllm_omni/__init__.py": "",
    "vllm_omni/engine.py": """
        from vllm import Engine, ops
        from vllm.config import Config as VllmConfig
        from vllm.helpers import helper
        from vllm_omni.vllm_versions import MOVED

        class Mixin:
            def step(self):
                return self.num_steps + super().step()

            def own(self): ...

        class OmniEngine(Mixin, Engine):
            def add(self, request): ...

            def unchanged(self): ...

        def read(config: VllmConfig | None, other):
            return config.size + other.size + ops.norm(1) + Engine.make()
    """,
    "vllm_omni/vllm_versions/__init__.py": "from vllm_omni.vllm_versions.v0_1.names import MOVED",
    "vllm_omni/vllm_versions/v0_1/__init__.py": "",
    "vllm_omni/vllm_versions/v0_1/names.py": "from vllm.old import MOVED",
    "vllm_omni/vllm_versions/v0_2/__init__.py": "",
    "vllm_omni/vllm_versions/v0_2/names.py": "from vllm.new import MOVED",
}
OLD = {
    "vllm/__init__.py": """
        LAZY = {"Engine": ".engine:Engine"}
        def __getattr__(name): ...
    """,
    "vllm/_version.py": "__version__ = version = '0.1.0'",
    "vllm/config/__init__.py": "from .main import *",
    "vllm/config/main.py": """
        class Config:
            size: int
            rank: int = 0
    """,
    "vllm/engine.py": """
        class Base:
            def __init__(self): self.num_steps = 0
            def step(self): return 1
            def unchanged(self):
                '''Once.'''
                return 1

        class Engine(Base):
            @classmethod
            def make(cls): ...
            def add(self, request): ...
    """,
    "vllm/helpers.py": "def helper(x, y=1): ...",
    "vllm/old.py": "MOVED = 1",
    "vllm/ops.py": "def norm(x): ...",
}
NEW = OLD | {
    "vllm/_version.py": "__version__ = version = '0.2.0'",
    "vllm/config/main.py": """
        class Config:
            size: int
            group: int = 0
    """,
    "vllm/engine.py": """
        class Base:
            def __init__(self): self.num_steps = 0
            def step(self): return 2  # changed
            def unchanged(self):
                '''Another text.'''
                return 1  # and a comment
            def own(self): ...

        class Engine(Base):
            @classmethod
            def make(cls, more): ...
            def add(self, request, priority=0): ...
    """,
    "vllm/helpers.py": "",
    "vllm/new.py": "MOVED = 1",
    "vllm/old.py": "",
}
ENGINE, USER = "vllm.engine:Engine", "vllm_omni/engine.py"
REPORT = f"""\
gone: 1
  vllm.helpers:helper
      {USER}
parameters or fields changed: 3
  vllm.config:Config
      lost: rank
      new: group
      {USER}
  {ENGINE}.add
      was (self, request)
      is  (self, request, priority=...)
      {USER}
  {ENGINE}.make
      was (cls)
      is  (cls, more)
      {USER}
bodies below our overrides changed, to be read: 1
  {ENGINE}.step
      {USER}
overrides that do not take vLLM's arguments: 1
  {ENGINE}.add
      {USER}
overridden only now: 1
  {ENGINE}.own
      {USER}"""


def write(files: dict[str, str], folder: Path) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line.removeprefix("        ") for line in text.split("\n")))
    return folder


@pytest.fixture
def script(tmp_path):
    """The script in a repository that has `OURS`."""
    names = runpy.run_path(str(SCRIPT))
    root = write(OURS, tmp_path / "repository")
    namespace = names["main"].__globals__
    namespace.update(ROOT=root, DATA=root / "seams", FOLDERS=("vllm_omni",), CALLED=())
    return SimpleNamespace(**names, namespace=namespace)


def analyse(script, path: Path):
    universe = script.Universe(script.Sources.open(path))
    return universe, script.Seams(universe)


def test_each_kind_of_change_is_reported(script, tmp_path):
    _, before = analyse(script, write(OLD, tmp_path / "old"))
    _, after = analyse(script, write(NEW, tmp_path / "new"))
    assert script.report(before.found, after) == REPORT


def test_what_is_taken(script, tmp_path):
    _, seams = analyse(script, write(OLD, tmp_path / "old"))
    assert seams.found["imports"] == {
        "vllm:Engine": "class (self)",
        "vllm:ops": "module",
        "vllm.config:Config": "class with size rank",
        "vllm.helpers:helper": "function (x, y=...)",
        "vllm.old:MOVED": "value",
        "vllm.ops:norm": "function (x)",
    }
    assert {seam: value.split(") ")[0] for seam, value in seams.found["overrides"].items()} == {
        f"{ENGINE}.add": "(self, request",
        f"{ENGINE}.step": "(self",
        f"{ENGINE}.unchanged": "(self",
    }
    assert seams.found["attributes"] == {
        "vllm.config.main:Config.size": "attribute",
        f"{ENGINE}.make": "(cls)",
        f"{ENGINE}.num_steps": "attribute",
    }


def test_a_version_counts_with_its_own_names_only(script, tmp_path):
    _, seams = analyse(script, write(NEW, tmp_path / "new"))
    assert "vllm.new:MOVED" in seams.found["imports"] and "vllm.old:MOVED" not in seams.found["imports"]


def test_an_attribute_that_is_gone_is_reported(script, tmp_path):
    _, before = analyse(script, write(OLD, tmp_path / "old"))
    without = OLD | {"vllm/engine.py": OLD["vllm/engine.py"].replace("self.num_steps = 0", "...")}
    _, after = analyse(script, write(without, tmp_path / "without"))
    assert f"gone: 1\n  {ENGINE}.num_steps\n" in script.report(before.found, after)


@pytest.mark.parametrize("kind", ["whl", "tar.gz"])
def test_archives_are_read_as_folders_are(script, tmp_path, kind):
    folder = write(NEW, tmp_path / "new")
    archive = tmp_path / f"vllm-0.2.0.{kind}"
    if kind == "whl":
        with zipfile.ZipFile(archive, "w") as file:
            for name in NEW:
                file.write(folder / name, name)
    else:
        with tarfile.open(archive, "w:gz") as file:
            file.add(folder, "vllm-0.2.0")
    (universe, seams), (_, expected) = analyse(script, archive), analyse(script, folder)
    assert universe.version == "0.2.0"
    assert seams.found == expected.found


def test_a_source_without_a_version_is_refused(script, tmp_path):
    folder = write({"vllm/__init__.py": ""}, tmp_path)
    with pytest.raises(SystemExit, match=r"vllm/_version\.py is missing"):
        script.Universe(script.Sources.open(folder))


def test_data_are_written_and_compared_with_the_version_before(script, tmp_path, monkeypatch, capsys):
    for files, name in ((OLD, "old"), (NEW, "new")):
        monkeypatch.setattr(sys, "argv", ["vllm_seams.py", str(write(files, tmp_path / name)), "--write"])
        script.main()
    assert capsys.readouterr().out.endswith(f"since 0.1:\n{REPORT}\n")
    written = script.namespace["DATA"]
    assert sorted(path.name for path in written.iterdir()) == ["0.1.json", "0.2.json"]
    assert list(json.loads((written / "0.2.json").read_text())) == ["attributes", "imports", "overrides"]


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        ("self, x", "self, x=...", True),
        ("self, *args, **kwargs", "self, x, y", True),
        ("self, x, z=...", "self, x", True),
        ("self, x, *, z=...", "self, x", True),
        ("self, x, z", "self, x", False),
        ("self, x", "self, x, y=...", False),
        ("self, y, x", "self, x, y", False),
        ("self, *, x", "self, *, x, y", False),
    ],
)
def test_parameters_that_fit(script, ours, theirs, fits):
    assert script.takes(ours, theirs) == fits
