# SPDX-License-Identifier: Apache-2.0
"""What a Python package adds to vllm_omni, models above all, and which packages are installed.

A package has an entry point of the group `vllm_omni.models` that names its `ModelPackage`. The models of this package
are declared and found in the same way, and so are those of the other packages that this distribution has. A declaration
consists of names and paths: it is read in every process of vLLM, without importing a model. This file knows neither
torch nor vLLM.
"""

import functools
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

GROUP = "vllm_omni.models"
OWN_PACKAGE = "vllm-omni"
_OWN = EntryPoint(OWN_PACKAGE, "vllm_omni.model_executor.registry:MODELS", GROUP)
_SELECTION = "VLLM_PLUGINS"
PACKAGES_OF_REPOSITORY = {"shapes": "coloured_shapes", "shapes-painter": "coloured_shapes"}
"""Folders in `packages/`, by the names of their checkpoints: for the error where such a package is not installed."""
_GUIDE = "docs/adding_a_model.md"


@dataclass(frozen=True)
class Command:
    """A command of `vllm-omni`.

    Attributes:
        function: Runs it with the words behind its name, as `module:function`. Imported when it runs.
        usage: What follows its name, for the help: `URL [options]`.
        summary: What it does, for the help.
    """

    function: str
    usage: str
    summary: str


@dataclass(frozen=True, kw_only=True)
class ModelPackage:
    """What one Python package adds. Everything is optional; prompt processors and stage input processors need no
    declaration, since stage configurations name them.

    Attributes:
        architectures: vLLM models, by the name that `model_arch` or a checkpoint's `architectures` has, as
            `module:class`. Imported when first used.
        hf_configs: transformers configurations, by `model_type`, as `module:class`. Imported in every process of vLLM:
            their modules import no model.
        stage_configs: The folder of stage configurations. `NAME.yaml` is that of checkpoints with the `model_type`
            NAME; variants for other machines are named `NAME_MACHINE.yaml`.
        pipelines: Names of such files without `.yaml`, by the class in a diffusers checkpoint's `model_index.json`.
        made_checkpoints: Functions of `with_weights: bool` that return the folder of a checkpoint, by the name that a
            stage configuration has for it (`engine_args.model`), as `module:function`. The first call may make the
            folder. Called with False where the configuration is read or shown, which must be quick, and with True
            where the pipeline is opened.
        checkpoints: The folder of the package's checkpoints, each a folder. `OmniLLM(NAME)` runs the one of that name,
            whatever the working directory and the Hugging Face hub have. Its stage configuration may set all keys.
        stage_kinds: Kinds of stages, by the name that `engine_type` has, as `module:class`: a `StageKind`. Imported in
            every process of a pipeline with such a stage.
        speech_adapters: What the declarations of transformers' speech classes do not tell, by the name of the class, as
            `module:class`: a `SpeechModel`. Imported where such a checkpoint is opened.
        transcription_adapters: The same of its classes that transcribe: a `TranscriptionModel`.
        tiny_checkpoints: For `vllm_omni.testing.tiny_checkpoints`, by name: modules with `SIZES`, names of sizes, and
            `write(path: Path, seed: int, size: str)`.
        commands: Commands of `vllm-omni` beside its own, by name.
        demos: Parts of `vllm-omni demo`, functions of a `vllm_omni.entrypoints.cli.demo_results.DemoRun`, as
            `module:function`; with the number of steps that each prints.
        pages: Functions that add a page to the application of `vllm serve`, by the page's name, as `module:function`.
            There is one name: `playground`, for `--playground`. Called with the application and, by name, the server's
            `url` and `api_key`, `description` (the answer of `/v1/pipeline`), `path`, `auth` (NAME:PASSWORD, or None)
            and `root_path`.

    Raises:
        ValueError: A path is not `module:class`, or a file or folder does not exist.
    """

    architectures: Mapping[str, str] = field(default_factory=dict)
    hf_configs: Mapping[str, str] = field(default_factory=dict)
    stage_configs: Path | None = None
    pipelines: Mapping[str, str] = field(default_factory=dict)
    made_checkpoints: Mapping[str, str] = field(default_factory=dict)
    checkpoints: Path | None = None
    stage_kinds: Mapping[str, str] = field(default_factory=dict)
    speech_adapters: Mapping[str, str] = field(default_factory=dict)
    transcription_adapters: Mapping[str, str] = field(default_factory=dict)
    tiny_checkpoints: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, Command] = field(default_factory=dict)
    demos: Mapping[str, int] = field(default_factory=dict)
    pages: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        commands = {name: command.function for name, command in self.commands.items()}
        demos = {path: path for path in self.demos}
        adapters = (self.speech_adapters, self.transcription_adapters)
        of_models = (self.architectures, self.hf_configs, self.made_checkpoints, self.stage_kinds, *adapters)
        for paths in (*of_models, commands, demos, self.pages):
            for name, path in paths.items():
                if path.count(":") != 1:
                    raise ValueError(f"{name}: {path!r} is not module:class")
        for name, folder in (("stage_configs", self.stage_configs), ("checkpoints", self.checkpoints)):
            if folder is not None and not folder.is_dir():
                raise ValueError(f"{name}: there is no folder {folder}; is it part of the wheel?")
        for pipeline, name in self.pipelines.items():
            if name not in self.stage_config_files:
                raise ValueError(f"pipelines: {pipeline}: there is no {name}.yaml in {self.stage_configs}")

    @functools.cached_property
    def stage_config_files(self) -> dict[str, Path]:
        """The stage configurations by name, without `.yaml`."""
        files = () if self.stage_configs is None else sorted(self.stage_configs.glob("*.yaml"))
        return {path.stem: path for path in files}

    @functools.cached_property
    def checkpoint_folders(self) -> dict[str, Path]:
        """The checkpoints' folders by name."""
        folders = () if self.checkpoints is None else sorted(self.checkpoints.iterdir())
        return {path.name: path for path in folders if path.is_dir()}

    @property
    def names(self) -> Iterator[str]:
        """All that only one package can register, as messages show it."""
        kinds: dict[str, Mapping[str, object]] = {
            "architecture": self.architectures,
            "model_type": self.hf_configs,
            "stage configuration": self.stage_config_files,
            "pipeline": self.pipelines,
            "made checkpoint": self.made_checkpoints,
            "checkpoint": self.checkpoint_folders,
            "kind of stages": self.stage_kinds,
            "speech adapter": self.speech_adapters,
            "transcription adapter": self.transcription_adapters,
            "tiny checkpoint": self.tiny_checkpoints,
            "command": self.commands,
            "page": self.pages,
        }
        return (f"{kind} {name!r}" for kind, names in kinds.items() for name in names)


class InstalledModels:
    """The models of all packages.

    Attributes:
        packages: By the package's name and version; this one first.
        broken: The packages whose models are left out, and why.
        stage_configs: Files by `model_type`, and variants by their names.
        checkpoints: Folders by the checkpoint's name.
        pipelines: Files by the class of a diffusers pipeline.

    The others are those of `ModelPackage`, of all packages.
    """

    def __init__(self, packages: Mapping[str, ModelPackage], broken: Mapping[str, str]) -> None:
        self.packages, self.broken = packages, broken
        self.architectures: dict[str, str] = self._all("architectures")
        self.hf_configs: dict[str, str] = self._all("hf_configs")
        self.stage_configs: dict[str, Path] = self._all("stage_config_files")
        self.pipelines: dict[str, Path] = {
            name: each.stage_config_files[file] for each in packages.values() for name, file in each.pipelines.items()
        }
        self.made_checkpoints: dict[str, str] = self._all("made_checkpoints")
        self.checkpoints: dict[str, Path] = self._all("checkpoint_folders")
        self.stage_kinds: dict[str, str] = self._all("stage_kinds")
        self.speech_adapters: dict[str, str] = self._all("speech_adapters")
        self.transcription_adapters: dict[str, str] = self._all("transcription_adapters")
        self.tiny_checkpoints: dict[str, str] = self._all("tiny_checkpoints")
        self.commands: dict[str, Command] = self._all("commands")
        self.demos: dict[str, int] = self._all("demos")
        self.pages: dict[str, str] = self._all("pages")

    def _all(self, field: str) -> dict[str, Any]:
        """A field of all packages."""
        return {name: value for models in self.packages.values() for name, value in getattr(models, field).items()}

    def describe(self) -> str:
        """Describes in lines the packages, those that are left out, and how to add a model that is in none of them."""
        return f"{self.describe_packages()}\nto add a model: {_GUIDE}"

    def describe_packages(self) -> str:
        """Describes in lines the packages, and those that are left out."""
        others = ", ".join(name for name in self.packages if not is_own(name)) or "none"
        left_out = [f"{package} is left out: {reason}" for package, reason in self.broken.items()]
        if (selected := os.environ.get(_SELECTION)) is not None:
            left_out.append(f"{_SELECTION}={selected} leaves out all others")
        return "\n".join([f"installed packages with models: {others}", *left_out])


@functools.cache
def find_models() -> InstalledModels:
    """What this package and all installed ones that `VLLM_PLUGINS` allows add. Looks once in a process."""
    packages, broken = {OWN_PACKAGE: _load(_OWN)}, {}
    for entry_point in _allowed_entry_points():
        name = _describe(entry_point)
        try:
            packages[name] = _load(entry_point)
        except (Exception, SystemExit) as error:  # Code of another package: it must not stop vLLM, or our own models.
            broken[name] = f"{entry_point.value}: {type(error).__name__}: {error}"
    conflicts = _find_conflicts(packages)
    return InstalledModels({name: m for name, m in packages.items() if name not in conflicts}, broken | conflicts)


def is_own(package: str) -> bool:
    """Whether a package of `InstalledModels` is of this distribution."""
    return package.partition(" ")[0] == OWN_PACKAGE


def _allowed_entry_points() -> list[EntryPoint]:
    """Those of this distribution first: it has all of them, whatever `VLLM_PLUGINS` selects."""
    selected = os.environ.get(_SELECTION)  # As vLLM reads it, which may not be installed.
    own, others = [], []
    for point in entry_points(group=GROUP):
        if is_own(_describe(point)):
            own.append(point)
        elif selected is None or point.name in selected.split(","):
            others.append(point)
    return own + others


def _describe(entry_point: EntryPoint) -> str:
    package = entry_point.dist
    return entry_point.name if package is None else f"{package.name} {package.version} ({entry_point.name})"


def _load(entry_point: EntryPoint) -> ModelPackage:
    models = entry_point.load()
    if not isinstance(models, ModelPackage):
        raise TypeError(f"{models!r} is no ModelPackage")
    return models


def _find_conflicts(packages: Mapping[str, ModelPackage]) -> dict[str, str]:
    """The packages that register what another one registers too, and why they are left out: all but our own."""
    owners = defaultdict(list)
    for package, models in packages.items():
        for name in models.names:
            owners[name].append(package)
    return {
        package: f"it registers the {name}, as {' and '.join(o for o in having if o != package)} does; uninstall one"
        for name, having in owners.items()
        for package in having
        if len(having) > 1 and not is_own(package)
    }
