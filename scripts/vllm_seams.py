# SPDX-License-Identifier: Apache-2.0
"""What we take from vLLM, and what another version makes of it: `vllm_seams.py VERSION-OR-PATH [--write]`.

Nothing is imported, and the other vLLM need not be installed: sources are parsed. A *seam* is a name that we import
from vLLM, a method of vLLM's that a class of ours overrides, or an attribute of a vLLM class that our code reads. Of
each, `scripts/vllm_seams/MINOR.json` has what that version makes of it: parameters, fields, and of an overridden method
a hash of its body.

    python scripts/vllm_seams.py 0.34                 # downloads the wheel, and compares it with the version before it
    python scripts/vllm_seams.py vllm-0.34.0.tar.gz   # or a wheel, or a folder with the folder `vllm`
    python scripts/vllm_seams.py 0.34 --since 0.32    # compares it with another version
    python scripts/vllm_seams.py build/vllm-0.33 --write   # writes the data of that version; `make seams`: of all

The report names what is gone, whose parameters or fields changed, which bodies below our overrides changed and are to
be read, and what our classes override only now; each with the files of ours. docs/upgrading_vllm.md says what to do
with it.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
import tarfile
import tempfile
import textwrap
import tokenize
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "scripts" / "vllm_seams"
FOLDERS = (
    "vllm_omni",
    "packages/coloured_shapes/coloured_shapes",
    "packages/playground/vllm_omni_playground",
    "packages/talk/vllm_omni_talk",
    "benchmarks",
)
"""Packages of ours. A test that takes something from vLLM fails by itself."""

VERSIONS = "vllm_omni.vllm_versions"
"""Has a package for each version; only that of the analysed version counts."""

CALLED = (
    "vllm.lora.worker_manager:WorkerLoRAManager._adapter_manager",
    "vllm.model_executor.model_loader.weight_utils:filter_safetensors_files_by_weight_name",
    "vllm.model_executor.models.interfaces:SupportsEagle3.set_aux_hidden_state_layers",
    "vllm.model_executor.models.qwen3_moe:Qwen3MoeModel.forward",
    "vllm.parser.abstract_parser:Parser.parse_delta",
    "vllm.renderers:BaseRenderer._mm_processor_only_cache",
    "vllm.renderers:BaseRenderer.render_cmpl",
    "vllm.renderers:BaseRenderer.shutdown",
    "vllm.sampling_params:StructuredOutputsParams._backend",
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks",
    "vllm.v1.core.kv_cache_utils:get_request_block_hasher",
    "vllm.v1.engine.core:EngineCore.reset_encoder_cache",
    "vllm.v1.engine.core_client:InprocClient.add_request",
    "vllm.v1.engine.core_client:InprocClient.shutdown",
    "vllm.v1.structured_output.request:StructuredOutputRequest._grammar",
    "vllm.v1.worker.gpu.block_table:BlockTables.apply_staged_writes",
    "vllm.v1.worker.gpu.model_states.interface:ModelState.apply_staged_writes",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.apply_staged_writes",
    "vllm.v1.worker.gpu.states:RequestState.apply_staged_writes",
)
"""What our code calls through objects whose class it does not name."""

OURS_ONLY = (
    "vllm.model_executor.models.llama:LlamaDecoderLayer.forward",
    "vllm.model_executor.models.llama:LlamaModel.forward",
)
"""Overrides that our code calls and vLLM's does not: they may have other parameters. So may constructors."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Found = dict[str, dict[str, str]]
"""Of each kind of seam: what a version makes of each."""


# -- source code ------------------------------------------------------------------------------------------------------


class Sources:
    """Python files by their path, below the folder that has `vllm`."""

    def __init__(self, texts: Mapping[str, bytes | Path | tuple[zipfile.ZipFile, str]]) -> None:
        self._texts = texts

    @classmethod
    def open(cls, path: Path) -> Sources:
        """A folder with the folder `vllm`, a wheel, or a source archive."""
        if path.is_dir():
            return cls({str(file.relative_to(path)): file for file in (path / "vllm").rglob("*.py")})
        if path.suffix == ".whl":
            wheel = zipfile.ZipFile(path)
            return cls({name: (wheel, name) for name in wheel.namelist() if name.endswith(".py")})
        with tarfile.open(path) as archive:
            members = [it for it in archive if it.isfile() and re.match(r"[^/]+/vllm/.*\.py$", it.name)]
            texts = {it.name.partition("/")[2]: archive.extractfile(it) for it in members}
            return cls({name: text.read() for name, text in texts.items() if text is not None})

    def read(self, path: str) -> str | None:
        text = self._texts.get(path)
        if isinstance(text, Path):
            return text.read_text()
        if isinstance(text, tuple):
            text = text[0].read(text[1])
        return None if text is None else text.decode()

    def version(self) -> str:
        """Raises SystemExit where the source does not tell it, as that of a repository."""
        found = re.search(r"__version__ = version = '([\d.]+)", self.read("vllm/_version.py") or "")
        if found is None:
            sys.exit("vllm/_version.py is missing: give a wheel or a source archive of a release")
        return found[1]


@dataclass(eq=False)
class Module:
    name: str
    is_package: bool
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def names(self) -> dict[str, ast.stmt]:
        """What its top level defines, also within `if` and `try`. The last one counts."""
        return {name: node for node in statements(self.tree.body) for name in defined_names(node)}

    @cached_property
    def stars(self) -> list[ast.ImportFrom]:
        imports = [node for node in statements(self.tree.body) if isinstance(node, ast.ImportFrom)]
        return [node for node in imports if node.names[0].name == "*"]

    @cached_property
    def lazy(self) -> dict[str, str]:
        """Names that its `__getattr__` imports: a dictionary of `module:name`."""
        if "__getattr__" not in self.names:
            return {}
        dictionaries = [node for node in ast.walk(self.tree) if isinstance(node, ast.Dict)]
        pairs = [pair for node in dictionaries for pair in zip(node.keys, node.values, strict=True)]
        texts = [(text_of(key), text_of(value)) for key, value in pairs]
        return {key: value for key, value in texts if key and value and re.fullmatch(r"\.?[\w.]+:\w+", value)}

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that `node` imports from."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *filter(None, [node.module])])


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in (node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])):
                yield from statements(part)
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def defined_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | Function):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [it.id for target in node.targets for it in ast.walk(target) if isinstance(it, ast.Name)]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [bound_name(alias) for alias in node.names]
    return []


def bound_name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def text_of(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


# -- names and classes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """Where a name is defined in the end, through all modules that pass it on. Without a name: a module."""

    module: str
    name: str
    node: ast.stmt | None = field(compare=False, default=None)

    def __str__(self) -> str:
        return f"{self.module}:{self.name}" if self.name else self.module


class Universe:
    """vLLM and our packages, as one space of modules."""

    def __init__(self, vllm: Sources) -> None:
        self._vllm = vllm
        self.version = vllm.version()
        self.minor = ".".join(self.version.split(".")[:2])
        self._classes: dict[Definition, type] = {}
        # A version without a folder is compared through that of the last one before it.
        folders = sorted((it.name for it in (ROOT / "vllm_omni/vllm_versions").glob("v*")), key=natural)
        self._folder = [it for it in folders if natural(it) <= natural(self.minor)][-1]
        self.module = cache(self._module)
        self.find = cache(self._find)

    def ours(self) -> Iterator[tuple[Path, Module]]:
        for folder in FOLDERS:
            for path in sorted((ROOT / folder).rglob("*.py")):
                relative = path.relative_to((ROOT / folder).parent).with_suffix("")
                module = self.module(".".join(relative.parts).removesuffix(".__init__"))
                if module is not None and self._in_version(module.name) == module.name:
                    yield path.relative_to(ROOT), module

    def _in_version(self, module: str) -> str:
        """The module of this version for one of any version's folder."""
        return re.sub(rf"^({re.escape(VERSIONS)})\.v\d+_\d+", rf"\1.{self._folder}", module)

    def _module(self, name: str) -> Module | None:
        path = name.replace(".", "/")
        for file, is_package in ((f"{path}.py", False), (f"{path}/__init__.py", True)):
            text = self._vllm.read(file) if is_vllms(name) else read_ours(file)
            if text is not None:
                return Module(name, is_package, text)
        return None

    def _find(self, module_name: str, name: str) -> Definition | None:
        """None if there is no such name, or if another package than vLLM's and ours has it."""
        module = self.module(module_name)
        if module is None:
            return None
        node = module.names.get(name)
        if isinstance(node, ast.ImportFrom):
            original = next(it.name for it in node.names if bound_name(it) == name)
            source = self._in_version(module.absolute(node))
            found = self.find(source, original) if source != module_name else None
            return found or self._submodule(source, original)
        if isinstance(node, ast.Import):
            alias = next(it for it in node.names if bound_name(it) == name)
            target = alias.name if alias.asname else name
            return Definition(target, "") if self.module(target) else None
        if node is not None:
            return Definition(module_name, name, node)
        if name in module.lazy:
            target, _, original = module.lazy[name].partition(":")
            return self.find(module_name + target if target.startswith(".") else target, original)
        through_stars = (self.find(module.absolute(star), name) for star in module.stars)
        return next(filter(None, through_stars), None) or self._submodule(module_name, name)

    def _submodule(self, module: str, name: str) -> Definition | None:
        return Definition(f"{module}.{name}", "") if self.module(f"{module}.{name}") else None

    def resolve(self, module: Module, expression: ast.AST | None) -> Definition | None:
        """What an expression such as `core.Request`, `Base[int]` or `"Request | None"` names."""
        if text := text_of(expression):
            try:
                expression = ast.parse(text, mode="eval").body
            except SyntaxError:
                return None
        if isinstance(expression, ast.Subscript):
            return self.resolve(module, expression.value)
        if isinstance(expression, ast.BinOp):  # X | None
            return self.resolve(module, expression.left)
        if isinstance(expression, ast.Name):
            return self.find(module.name, expression.id)
        if isinstance(expression, ast.Attribute):
            owner = self.resolve(module, expression.value)
            return self.find(owner.module, expression.attr) if owner and not owner.name else None
        return None

    def type_of(self, definition: Definition | None) -> type | None:
        """An empty class with the bases of that class, for Python's own order of bases; None if it is no class."""
        if definition is None or not isinstance(definition.node, ast.ClassDef):
            return None
        if definition not in self._classes:
            module = self.module(definition.module)
            assert module is not None
            bases = [self.type_of(self.resolve(module, base)) for base in definition.node.bases]
            made = type(definition.name, tuple(filter(None, bases)) or (object,), {"definition": definition})
            self._classes[definition] = made
        return self._classes[definition]


def is_vllms(module: str) -> bool:
    return module.partition(".")[0] == "vllm"


def natural(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def read_ours(file: str) -> str | None:
    for folder in FOLDERS:
        if file.startswith(f"{Path(folder).name}/"):
            path = (ROOT / folder).parent / file
            return path.read_text() if path.exists() else None
    return None


def definition_of(made: type) -> Definition:
    return vars(made)["definition"]


@cache
def members(made: type) -> dict[str, ast.AST]:
    """What the body of a class defines, and the attributes that its methods set."""
    node = definition_of(made).node
    assert isinstance(node, ast.ClassDef)
    found: dict[str, ast.AST] = {}
    for statement in statements(node.body):
        if isinstance(statement, Function):
            for it in ast.walk(statement):
                if isinstance(it, ast.Attribute) and isinstance(it.ctx, ast.Store) and is_self(it.value):
                    found.setdefault(it.attr, it)
        for name in defined_names(statement):
            found[name] = statement
    return found


@cache
def reads(made: type) -> list[tuple[str, bool]]:
    """The attributes of itself that the body of a class reads, and whether through `super()`."""
    nodes = ast.walk(definition_of(made).node or ast.Module([], []))
    attributes = [it for it in nodes if isinstance(it, ast.Attribute)]
    return sorted({(it.attr, is_super(it.value)) for it in attributes if is_self(it.value) or is_super(it.value)})


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


@cache
def of_vllm(made: type) -> list[type]:
    return [base for base in made.__mro__ if "definition" in vars(base) and is_vllms(definition_of(base).module)]


def lookup(made: type, name: str) -> tuple[type, ast.AST] | None:
    """The class of vLLM that has this member, in the order of bases."""
    return next(((base, members(base)[name]) for base in of_vllm(made) if name in members(base)), None)


# -- seams ------------------------------------------------------------------------------------------------------------


class Seams:
    """Those of our code on one vLLM.

    Attributes:
        found: What this vLLM makes of each.
        users: The files of ours that use each.
        taken: The parameters of each override of ours, by its seam and file.
    """

    def __init__(self, universe: Universe) -> None:
        self._universe = universe
        self._user = ""
        self.found: Found = {"imports": {}, "overrides": {}, "attributes": {}}
        self.users: dict[str, set[str]] = defaultdict(set)
        self.taken: dict[tuple[str, str], str] = {}
        self._paths = {module.name: str(path) for path, module in universe.ours()}
        for _, module in universe.ours():
            self._read(module)
        self._user = "scripts/vllm_seams.py"
        for name in CALLED:
            self._call(name)

    def _read(self, module: Module) -> None:
        for node in module.nodes:
            self._user = self._paths[module.name]
            match node:
                case ast.Import():
                    for alias in node.names:
                        if is_vllms(alias.name):
                            known = self._universe.module(alias.name)
                            self._add("imports", alias.name, "module" if known else "gone")
                case ast.ImportFrom() if is_vllms(source := module.absolute(node)):
                    for alias in node.names:
                        self._add("imports", f"{source}:{alias.name}", self._describe(source, alias.name))
                case ast.Attribute():
                    self._attribute_of_name(module, node)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self._annotated(module, node)
                case ast.ClassDef():
                    self._class(self._universe.type_of(self._universe.find(module.name, node.name)))

    def _add(self, kind: str, seam: str, value: str) -> None:
        self.found[kind][seam] = value
        self.users[seam].add(self._user)

    def _attribute_of_name(self, module: Module, node: ast.Attribute) -> None:
        """Something of a module or class of vLLM's that the code names."""
        owner = self._universe.resolve(module, node.value)
        if owner is None or not is_vllms(owner.module):
            return
        if not owner.name:
            self._add("imports", f"{owner.module}:{node.attr}", self._describe(owner.module, node.attr))
        elif (made := self._universe.type_of(owner)) is not None:
            self._attribute(made, node.attr)

    def _annotated(self, module: Module, function: Function) -> None:
        """Attributes of parameters that are annotated with a class of vLLM."""
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        annotated = {it.arg: it.annotation for it in arguments if it.annotation is not None}
        types = {name: self._universe.type_of(self._universe.resolve(module, it)) for name, it in annotated.items()}
        known = {name: made for name, made in types.items() if made is not None and of_vllm(made)}
        for node in ast.walk(function) if known else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
                self._attribute(known[node.value.id], node.attr)

    def _class(self, made: type | None) -> None:
        """What a class of ours, with those of our classes that it inherits, takes from its bases in vLLM."""
        if made is None or not of_vllm(made):
            return
        ours = [base for base in made.__mro__ if "definition" in vars(base) and base not in of_vllm(made)]
        for base in ours:
            self._user = self._paths.get(definition_of(base).module, self._user)
            for name, node in members(base).items():
                found = lookup(made, name) if isinstance(node, Function) else None
                if found is not None and made.__mro__.index(base) < made.__mro__.index(found[0]):
                    self._override(made, name, node, *found)
            for name, is_through_super in reads(base):
                if is_through_super or not any(name in members(it) for it in ours):
                    self._attribute(made, name)

    def _override(self, made: type, name: str, ours: ast.AST, owner: type, overridden: ast.AST) -> None:
        if isinstance(ours, Function) and isinstance(overridden, Function):
            seam = f"{name_for(made, owner)}.{name}"
            self.found["attributes"].pop(seam, None)
            module = self._universe.module(definition_of(owner).module)
            assert module is not None
            self._add("overrides", seam, f"({parameters(overridden)}) {body_hash(overridden, module.lines)}")
            self.taken[seam, self._user] = parameters(ours)

    def _attribute(self, made: type, name: str) -> None:
        if found := lookup(made, name):
            owner, node = found
            seam = f"{name_for(made, owner)}.{name}"
            self.users[seam].add(self._user)
            if seam not in self.found["overrides"]:
                self.found["attributes"][seam] = as_attribute(node)

    def _call(self, name: str) -> None:
        module, _, path = name.partition(":")
        owner, _, attribute = path.partition(".")
        if not attribute:
            self._add("imports", name, self._describe(module, owner))
            return
        node = self._member(name)
        self._add("attributes", name, "gone" if node is None else as_attribute(node))

    def _member(self, seam: str) -> ast.AST | None:
        module, _, path = seam.partition(":")
        owner, _, attribute = path.partition(".")
        made = self._universe.type_of(self._universe.find(module, owner))
        found = None if made is None else lookup(made, attribute)
        return None if found is None else found[1]

    def is_there(self, seam: str) -> bool:
        """Whether this vLLM has a method or attribute of a class."""
        return self._member(seam) is not None

    def _describe(self, module: str, name: str) -> str:
        found = self._universe.find(module, name)
        if found is None:
            return "gone"
        if not found.name:
            return "module"
        if isinstance(found.node, Function):
            return f"function ({parameters(found.node)})"
        made = self._universe.type_of(found)
        if made is None:
            return "value"
        if (init := lookup(made, "__init__")) and isinstance(init[1], Function):
            return f"class ({parameters(init[1])})"
        fields = [it for base in reversed(of_vllm(made)) for it, node in members(base).items() if is_field(node)]
        return " ".join(["class", *(["with", *dict.fromkeys(fields)] if fields else [])])


def name_for(made: type, owner: type) -> str:
    """The first class of vLLM that `made` is, and that inherits what `owner` has: the name that we know it by."""
    return str(definition_of(next(base for base in of_vllm(made) if issubclass(base, owner))))


def as_attribute(node: ast.AST) -> str:
    return f"({parameters(node)})" if isinstance(node, Function) else "attribute"


def is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign)


def parameters(function: Function) -> str:
    """Their names in order; `=...` stands for any default."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    first_default = len(named) - len(arguments.defaults)
    shown = [it.arg + "=..." * (index >= first_default) for index, it in enumerate(named)]
    if arguments.vararg:
        shown.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        shown.append("*")
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    shown += [it.arg + "=..." * (default is not None) for it, default in keywords]
    if arguments.kwarg:
        shown.append(f"**{arguments.kwarg.arg}")
    return ", ".join(shown)


def takes(ours: str, theirs: str) -> bool:
    """Whether a method with the parameters `ours` can be called as one with `theirs`; each as from `parameters`."""
    if any(name.startswith("*") and name != "*" for name in ours.split(", ")):
        return True
    (own, own_keywords), (other, other_keywords) = positional_and_keywords(ours), positional_and_keywords(theirs)
    further = [*own[len(other) :], *(name for name in own_keywords if plain(name) not in map(plain, other_keywords))]
    return (
        list(map(plain, own[: len(other)])) == list(map(plain, other))
        and {plain(name) for name in other_keywords} <= {plain(name) for name in own_keywords}
        and all(name.endswith("=...") for name in further)
    )


def positional_and_keywords(text: str) -> tuple[list[str], list[str]]:
    names = text.split(", ")
    index = names.index("*") if "*" in names else len(names)
    return names[:index], names[index + 1 :]


def plain(name: str) -> str:
    return name.removesuffix("=...")


def body_hash(function: Function, lines: list[str]) -> str:
    """Of what it does: docstring, comments and white space do not count, nor does the Python that runs this.

    Args:
        lines: Of its module.
    """
    body = function.body[1:] if text_of(getattr(function.body[0], "value", None)) is not None else function.body
    text = "\n".join(lines[body[0].lineno - 1 : function.end_lineno]) if body else ""
    code = textwrap.dedent(text).splitlines(keepends=True)
    for token in list(tokenize.generate_tokens(iter(code).__next__)):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            code[row - 1] = code[row - 1][:column]
    return hashlib.sha256("".join("".join(code).split()).encode()).hexdigest()[:12]


# -- report -----------------------------------------------------------------------------------------------------------


def report(before: Found, seams: Seams) -> str:
    """What changed since the data of another version."""
    gone, changed, bodies = [], [], []
    for kind, entries in seams.found.items():
        for seam, value in sorted(entries.items()):
            old = before[kind].get(seam, value)
            if value == "gone":
                gone.append(shown(seam, seams))
            elif without_hash(old) != without_hash(value):
                changed.append(shown(seam, seams, *difference(without_hash(old), without_hash(value))))
            elif old != value:
                bodies.append(shown(seam, seams))
    old = {seam for kind in ("overrides", "attributes") for seam in before[kind]}
    gone += [f"  {seam}" for seam in sorted(old - all_of(seams.found)) if not seams.is_there(seam)]
    new = [shown(seam, seams) for seam in sorted(seams.found["overrides"].keys() - all_of(before))]
    sections = {
        "gone": gone,
        "parameters or fields changed": changed,
        "bodies below our overrides changed, to be read": bodies,
        "overrides that do not take vLLM's arguments": [f"  {seam}\n      {user}" for seam, user in not_taken(seams)],
        "overridden only now": new,
    }
    return "\n".join("\n".join([f"{title}: {len(lines) or 'none'}", *lines]) for title, lines in sections.items())


def not_taken(seams: Seams, found: Found | None = None) -> list[tuple[str, str]]:
    """The seams, with the file, that vLLM calls with other arguments than our override has.

    Args:
        found: The data of another version.
    """
    theirs = {seam: without_hash(value)[1:-1] for seam, value in (found or seams.found)["overrides"].items()}
    called = {pair: ours for pair, ours in seams.taken.items() if pair[0] in theirs and pair[0] not in OURS_ONLY}
    return [pair for pair, ours in called.items() if not (pair[0].endswith("__") or takes(ours, theirs[pair[0]]))]


def without_hash(value: str) -> str:
    return re.sub(r"\) [0-9a-f]{12}$", ")", value)


def difference(old: str, new: str) -> list[str]:
    if " with " in old and " with " in new:
        names = [text.split()[2:] for text in (old, new)]
        lost, added = ([it for it in names[i] if it not in names[1 - i]] for i in (0, 1))
        return [f"{what}: {' '.join(it)}" for what, it in (("lost", lost), ("new", added)) if it] or ["another order"]
    return [f"was {old}", f"is  {new}"]


def shown(seam: str, seams: Seams, *lines: str) -> str:
    return "\n      ".join([f"  {seam}", *lines, *sorted(seams.users[seam])])


def all_of(found: Found) -> set[str]:
    return {seam for entries in found.values() for seam in entries}


def read_data(minor: str) -> Found:
    return json.loads((DATA / f"{minor}.json").read_text())


def write_data(universe: Universe, seams: Seams) -> None:
    DATA.mkdir(exist_ok=True)
    text = json.dumps(seams.found, indent=1, sort_keys=True)
    (DATA / f"{universe.minor}.json").write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a version, a wheel, a source archive, or a folder with the folder `vllm`")
    parser.add_argument("--since", help="the version to compare with (default: the one before it)")
    parser.add_argument("--write", action="store_true", help="write the data of this version")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as download:
        path = Path(arguments.source)
        if not path.exists():
            from vllm_overlay import fetch_wheel

            path = fetch_wheel(arguments.source, Path(download))
        universe = Universe(Sources.open(path))
        seams = Seams(universe)
    if arguments.write:
        write_data(universe, seams)
    known = sorted((it.stem for it in DATA.glob("*.json") if natural(it.stem) < natural(universe.minor)), key=natural)
    since = arguments.since or (known[-1] if known else None)
    print(f"vLLM {universe.version}:", ", ".join(f"{len(entries)} {kind}" for kind, entries in seams.found.items()))
    if since is not None:
        print(f"since {since}:\n{report(read_data(since), seams)}")


if __name__ == "__main__":
    main()
