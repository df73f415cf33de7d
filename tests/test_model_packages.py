# SPDX-License-Identifier: Apache-2.0
"""Packages with models: found, broken, in conflict."""

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import vllm_omni_talk
from vllm_omni import plugin
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.entrypoints.resolve import read_pipeline
from vllm_omni.errors import MissingPackageError, StageConfigError
from vllm_omni.model_executor.registry import MODELS
from vllm_omni.model_packages import OWN_PACKAGE, PACKAGES_OF_REPOSITORY, Command, ModelPackage, find_models, is_own

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution `NAME 1.0` with a module that has this code."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, code: str) -> None:
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[vllm_omni.models]\n{name} = {name}_models:MODELS\n")
        (tmp_path / f"{name}_models.py").write_text(
            f"from pathlib import Path\nfrom vllm_omni.model_packages import ModelPackage\n{code}\n"
        )
        monkeypatch.delitem(sys.modules, f"{name}_models", raising=False)
        find_models.cache_clear()

    yield install
    find_models.cache_clear()


def added(packages: Iterable[str]) -> list[str]:
    """Those of a test: the environment has others."""
    return [name for name in packages if " 1.0 " in name]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == plugin.logger.name]


def test_our_own_models_are_found_in_the_same_way() -> None:
    models = find_models()
    assert next(iter(models.packages.items())) == (OWN_PACKAGE, MODELS)
    assert models.stage_configs["csm"].name == "csm.yaml" and "qwen3_omni_moe_2x80gb" in models.stage_configs
    assert models.architectures["CsmCodec"].endswith(".codec:OmniCsmCodec")


def test_a_package_is_found(install: Install, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    for name in ("tune", "tune_2x80gb"):
        (tmp_path / "configs" / f"{name}.yaml").touch()
    install(
        "tune",
        "MODELS = ModelPackage(architectures={'TuneModel': 'tune.model:Tune'}, pipelines={'TunePipeline': 'tune'}, "
        "stage_configs=Path(__file__).with_name('configs'), tiny_checkpoints={'tune': 'tune.tiny'})",
    )
    models = find_models()
    assert added(models.packages) == ["tune 1.0 (tune)"] and not models.broken
    assert models.architectures["TuneModel"] == "tune.model:Tune"
    assert models.stage_configs["tune_2x80gb"] == tmp_path / "configs" / "tune_2x80gb.yaml"
    assert models.pipelines["TunePipeline"] == models.stage_configs["tune"]
    assert models.tiny_checkpoints == {"tune": "tune.tiny"}


PIPELINE = """
stage_args:
  - {stage_id: 0, engine_type: function, function: tune_models.play, final_output: true, final_output_type: audio,
     engine_args: {model_stage: play}}
"""


def test_a_checkpoint_of_a_package_is_found_by_its_name(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path / "checkpoints" / "tune-small", tmp_path / "tune-small"):
        folder.mkdir(parents=True)
        (folder / "stage_config.yaml").write_text(PIPELINE)
    (tmp_path / "checkpoints" / "README.md").touch()
    install("tune", "MODELS = ModelPackage(checkpoints=Path(__file__).with_name('checkpoints'))\ndef play(*_): ...")
    monkeypatch.chdir(tmp_path)
    args = OmniArgs(model="tune-small")
    assert find_models().packages["tune 1.0 (tune)"].checkpoint_folders.keys() == {"tune-small"}
    assert Path(args.model) == tmp_path / "checkpoints" / "tune-small", "a folder of the name does not hide it"
    assert read_pipeline(args).loaded.stages[0].function == "tune_models.play"
    with pytest.raises(StageConfigError, match=r"tune_models\.play"):
        read_pipeline(OmniArgs(model="./tune-small"))


def test_a_checkpoint_is_of_one_package(install: Install, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "talk").mkdir(parents=True)
    install("taker", "MODELS = ModelPackage(checkpoints=Path(__file__).with_name('checkpoints'))")
    models = find_models()
    reason = models.broken["taker 1.0 (taker)"]
    assert reason.startswith("it registers the checkpoint 'talk', as vllm-omni ") and " (talk) does;" in reason
    assert models.checkpoints["talk"] == vllm_omni_talk.MODELS.checkpoint_folders["talk"]


def test_commands_demos_and_pages_of_a_package_are_found(install: Install) -> None:
    install(
        "tool",
        "from vllm_omni.model_packages import Command\n"
        "MODELS = ModelPackage(commands={'tune': Command('tool.tune:run', 'FILE', 'tunes a file')}, "
        "demos={'tool.demo:run': 2}, pages={'mixer': 'tool.page:add'})",
    )
    models = find_models()
    assert models.commands["tune"] == Command("tool.tune:run", "FILE", "tunes a file")
    assert next(iter(models.demos)) == "vllm_omni_talk.demo:answer_sentence" and models.demos["tool.demo:run"] == 2
    assert models.pages.keys() == {"playground", "mixer"}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import sys; sys.exit('needs a licence')", "SystemExit: needs a licence"),
        ("MODELS = {}", "TypeError: {} is no ModelPackage"),
        ("MODELS = ModelPackage(architectures={'A': 'a.b.C'})", "ValueError: A: 'a.b.C' is not module:class"),
        ("MODELS = ModelPackage(stage_kinds={'k': 'a.b.C'})", "ValueError: k: 'a.b.C' is not module:class"),
        ("MODELS = ModelPackage(demos={'a.b.c': 1})", "ValueError: a.b.c: 'a.b.c' is not module:class"),
        ("MODELS = ModelPackage(stage_configs=Path('/no/where'))", "there is no folder /no/where"),
        ("MODELS = ModelPackage(checkpoints=Path('/no/where'))", "checkpoints: there is no folder /no/where"),
        (
            "MODELS = ModelPackage(stage_configs=Path(__file__).parent, pipelines={'P': 'p'})",
            "pipelines: P: there is no p.yaml in",
        ),
    ],
)
def test_a_broken_package_is_one_warning_that_names_it(
    install: Install, caplog: pytest.LogCaptureFixture, code: str, reason: str
) -> None:
    install("broken", code)
    install("sound", "MODELS = ModelPackage(architectures={'SoundModel': 'sound:Sound'})")
    from vllm import ModelRegistry

    try:
        plugin.register()
        assert {"SoundModel", "CsmCodec"} <= ModelRegistry.get_supported_archs()
    finally:
        ModelRegistry.models.pop("SoundModel", None)
    (message,) = warnings(caplog)
    assert message.startswith("vllm_omni leaves out the models of broken 1.0 (broken): ") and reason in message


@pytest.mark.parametrize(
    ("code", "reason"),
    [("", "has no attribute 'No'"), ("def __getattr__(name): raise SystemExit('needs a licence')", "needs a licence")],
)
def test_a_broken_configuration_is_one_warning(
    install: Install, caplog: pytest.LogCaptureFixture, code: str, reason: str
) -> None:
    install("broken", f"MODELS = ModelPackage(hf_configs={{'a_model_type': 'broken_models:No'}})\n{code}")
    plugin.register()
    (message,) = warnings(caplog)
    assert message.startswith("vllm_omni leaves out broken_models:No, the configuration of a_model_type: ")
    assert reason in message


def test_two_packages_with_the_same_name_are_both_named(install: Install) -> None:
    for name in ("first", "second"):
        install(name, "MODELS = ModelPackage(architectures={'SameModel': 'a:B'})")
    install("ours", "MODELS = ModelPackage(architectures={'CsmCodec': 'a:B'})")
    install("kind", "MODELS = ModelPackage(stage_kinds={'DiT': 'a:B'})")
    models = find_models()
    assert added(models.packages) == []
    assert models.broken == {
        "first 1.0 (first)": "it registers the architecture 'SameModel', as second 1.0 (second) does; uninstall one",
        "second 1.0 (second)": "it registers the architecture 'SameModel', as first 1.0 (first) does; uninstall one",
        "ours 1.0 (ours)": "it registers the architecture 'CsmCodec', as vllm-omni does; uninstall one",
        "kind 1.0 (kind)": "it registers the kind of stages 'DiT', as vllm-omni does; uninstall one",
    }
    assert all(text in models.describe() for text in models.broken.values())


def test_vllm_plugins_selects_packages(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        install(name, f"MODELS = ModelPackage(architectures={{'{name}': 'a:B'}})")
    monkeypatch.setenv("VLLM_PLUGINS", "omni,second")
    assert [name for name in find_models().packages if not is_own(name)] == ["second 1.0 (second)"]
    assert {"talk"} == find_models().checkpoints.keys(), "ours need no selection"
    assert "installed packages with models: second 1.0 (second)\nVLLM_PLUGINS=omni,second" in find_models().describe()


def test_without_its_package_a_checkpoint_of_this_repository_names_it(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("other", "MODELS = ModelPackage()")
    monkeypatch.setenv("VLLM_PLUGINS", "omni,other")
    for name, package in PACKAGES_OF_REPOSITORY.items():
        with pytest.raises(MissingPackageError) as error:
            OmniArgs(model=name)
        message, installed = str(error.value).split("\n", 1)
        assert f"the checkpoint {name!r}; in a checkout of vllm_omni: pip install ./packages/{package}" in message
        assert (
            installed
            == "installed packages with models: other 1.0 (other)\nVLLM_PLUGINS=omni,other leaves out all others"
        )
        assert OmniArgs(model=f"./{name}").model == f"./{name}"


def test_the_packages_of_this_repository_have_the_checkpoints_that_are_said_to_be_theirs() -> None:
    found = {name: folder.parents[1].name for name, folder in find_models().checkpoints.items()}
    assert {name: found.get(name) for name in PACKAGES_OF_REPOSITORY} == PACKAGES_OF_REPOSITORY
    assert found.keys() - PACKAGES_OF_REPOSITORY == {"talk"}


def test_an_architecture_of_vllm_is_kept_with_a_warning(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    from vllm import ModelRegistry

    theirs = ModelRegistry.models["Qwen3ForCausalLM"]
    install("taker", "MODELS = ModelPackage(architectures={'Qwen3ForCausalLM': 'taker:Taken'})")
    plugin.register()
    assert ModelRegistry.models["Qwen3ForCausalLM"] is theirs
    assert warnings(caplog) == ["taker:Taken is not used: vLLM has a model Qwen3ForCausalLM, which is not replaced"]


def test_finding_packages_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, vllm_omni.model_packages as m; print(len(m.find_models().packages) > 2); "
        "print({'gradio', 'numpy', 'torch', 'transformers', 'vllm'} & sys.modules.keys())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "True\nset()\n"


def test_the_doctor_lists_packages(install: Install) -> None:
    from vllm_omni.entrypoints.cli.doctor import check_model_packages
    from vllm_omni.entrypoints.cli.findings import Finding

    installed = list(check_model_packages())
    assert not any(" 1.0 " in finding.message for finding in installed)
    install("tune", "MODELS = ModelPackage(architectures={'TuneModel': 'tune:Tune'})")
    install("broken", "MODELS = 1")
    assert [finding for finding in check_model_packages() if finding not in installed] == [
        Finding("OK", "models", "tune 1.0 (tune): TuneModel"),
        Finding(
            "WARN",
            "models",
            "broken 1.0 (broken) is left out: broken_models:MODELS: TypeError: 1 is no ModelPackage",
            "fix it, or uninstall it",
        ),
    ]


def test_a_declaration_is_checked() -> None:
    with pytest.raises(ValueError, match=r"a: 'b' is not module:class"):
        ModelPackage(hf_configs={"a": "b"})
