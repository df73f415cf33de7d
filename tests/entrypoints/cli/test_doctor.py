# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni doctor`: its findings on misconfigured machines."""

import subprocess
import sys
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest

from vllm_omni.entrypoints.cli import doctor, doctor_memory
from vllm_omni.entrypoints.cli.findings import Finding, Platform
from vllm_omni.errors import VllmRequirementError
from vllm_omni.placement.memory_needs import StageNeeds

CPU = Platform("cpu", [])
Usage = namedtuple("Usage", "total used free")


def levels(findings) -> list[str]:
    return [finding.level for finding in findings]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the checks that import torch or vLLM in other processes."""
    monkeypatch.setattr(doctor, "check_companions", lambda: [])
    monkeypatch.setattr(doctor, "probe_platform", lambda: (CPU, [Finding("OK", "platform", "cpu")]))


def test_the_platform_of_this_machine(monkeypatch, capsys) -> None:
    def in_this_process(code: str) -> subprocess.CompletedProcess[str]:
        exec(code, {})  # a new process would import vLLM, which takes seconds
        return subprocess.CompletedProcess([], 0, capsys.readouterr().out, "")

    monkeypatch.setattr(doctor, "_python", in_this_process)
    platform, findings = doctor.probe_platform()
    assert platform is not None and levels(findings) == ["OK"]


def test_a_model_that_fits(run, quick, monkeypatch, tiny_qwen3: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = run("doctor", tiny_qwen3, "--max-model-len", "64", "--quantization", "int8", "--enforce-eager")
    assert result.code == 0, result.out
    assert "OK    configuration   stages text (AR)" in result.out
    assert "OK    weights         0.0 GiB; text in int8; " in result.out
    # Without an accelerator: what the stages need on one, and on which common machines they fit.
    assert "OK    memory          on 1 x 24 GB, computed from its configuration" in result.out
    assert "requests of 64" in result.out
    assert "OK    memory          1 x 80 GB: text fits" in result.out
    assert "OK    memory          2 x 80 GB: text fits (leaves 1 unused)" in result.out


def test_a_mistyped_name_is_reported_before_anything_is_imported(run, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "check_companions", lambda: pytest.fail("it imports"))
    result = run("doctor", "shpes")
    assert (
        result.code == 1
        and "FAIL  configuration   there is no checkpoint 'shpes'; did you mean 'shapes'?" in result.out
    )


@pytest.mark.parametrize(("size", "code"), [("24GiB", 0), ("500MiB", 1)])
def test_another_machine(run, quick, tiny_qwen3: Path, size: str, code: int) -> None:
    result = run("doctor", tiny_qwen3, "--gpus", "2", "--gpu-memory", size, "--max-model-len=64")
    assert result.code == code, result.out
    if code == 0:
        assert "OK    memory          fits on 2 x 24.0 GiB; computed from its configuration" in result.out
    else:
        assert "FAIL  memory          does not fit on 2 x 0.5 GiB; " in result.out
        assert "-> text needs 0.5 GiB, and its budget is 0.4 GiB; " in result.out


def test_a_variant_that_fits(run, quick, monkeypatch, tiny_qwen3_omni_moe: Path) -> None:
    needs = StageNeeds(weights=60 << 30, activations=0)
    monkeypatch.setattr(
        doctor_memory, "stage_needs", lambda config, stage, model: needs if stage.name == "thinker" else None
    )
    arguments = ("doctor", tiny_qwen3_omni_moe, "--gpus=2", "--gpu-memory=70GiB")
    result = run(*arguments)
    assert result.code == 1
    assert "thinker needs 60.0 GiB, and its budget is 58.4 GiB" in result.out
    assert "or use one that fits: --stage-configs-path qwen3_omni_moe_2x80gb" in result.out
    assert run(*arguments, "--stage-configs-path", "qwen3_omni_moe_2x80gb").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["MODEL", "--gpus", "2"], "another machine is given as: vllm-omni doctor MODEL --gpus N --gpu-memory SIZE"),
        (["--gpus", "2", "--gpu-memory", "79GiB"], "another machine is given as"),
        (["MODEL", "--gpus", "0", "--gpu-memory", "79GiB"], "another machine is given as"),
        (
            ["MODEL", "--gpu-memory", "much"],
            "--gpu-memory: 'much' is not a number of bytes; write",
        ),
        (["MODEL", "--gpu-memory", "0.5"], "--gpu-memory: '0.5' is not a number of bytes"),
        (["MODEL", "--gpu-memory", "79"], "--gpu-memory 79: has no unit; write e.g. 79GiB"),
    ],
)
def test_wrong_options_of_another_machine(run, arguments: list[str], words: str) -> None:
    result = run("doctor", *arguments)
    assert result.code == 2 and words in result.err


def test_the_remedy_installs_from_a_checkout(monkeypatch) -> None:
    """The package of the same name on a package index is another project."""
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    finding = next(f for f in doctor.check_packages() if "only importable" in f.message)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    (missing,) = doctor.check_python()
    for remedy in (finding.remedy, missing.remedy):
        assert "from a checkout" in remedy and 'pip install ".[cpu]" --extra-index-url' in remedy
        assert "pip install vllm-omni" not in remedy


def test_a_wrong_configuration(run, quick, tiny_qwen3_omni_moe: Path) -> None:
    result = run("doctor", tiny_qwen3_omni_moe, "--stage-configs-path", "/nowhere.yaml")
    assert result.code == 1
    assert "FAIL  configuration   /nowhere.yaml: cannot be read" in result.out


def test_a_missing_vllm(run, quick, monkeypatch) -> None:
    def refuse() -> None:
        raise VllmRequirementError("vllm_omni needs vLLM 0.32, and found no vLLM.\nInstall one of\n    pip install ...")

    monkeypatch.setattr(doctor, "require_vllm", refuse)
    monkeypatch.setattr(doctor, "find_vllm", dict)
    monkeypatch.setattr(doctor, "probe_platform", lambda: (None, [Finding("FAIL", "platform", "no", "fix")]))
    result = run("doctor", "MODEL")
    assert result.code == 1
    assert "FAIL  vllm            vllm_omni needs vLLM 0.32, and found no vLLM." in result.out
    assert "-> Install one of" in result.out
    assert "MODEL is not checked: that needs a working vLLM" in result.out


def test_it_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, vllm_omni.entrypoints.cli.doctor; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_untested_versions(monkeypatch) -> None:
    monkeypatch.setattr(
        metadata, "requires", lambda name: ["nosuch-package>=1", "pyyaml>=99", "pytest>=99; extra == 'x'"]
    )
    findings = {finding.subject: finding for finding in doctor.check_packages()}
    assert findings["nosuch-package"].level == "FAIL"
    assert findings["pyyaml"].level == "WARN" and findings["pyyaml"].remedy == 'pip install "pyyaml>=99"'
    assert "pytest" not in findings


def test_a_torchvision_for_another_torch(monkeypatch) -> None:
    error = "RuntimeError: operator torchvision::nms does not exist"
    monkeypatch.setattr(doctor, "find_spec", lambda name: True)
    monkeypatch.setattr(doctor, "import_error", lambda name: error)
    monkeypatch.setattr(doctor, "_version", lambda name: "2.13.0+cpu")
    findings = list(doctor.check_companions())
    assert levels(findings) == ["FAIL", "WARN", "WARN"]
    assert error in findings[0].message and "--index-url https://download.pytorch.org/whl/cpu" in findings[0].remedy


def test_a_broken_vllm(monkeypatch) -> None:
    broken = subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: libcudart.so.13: cannot open")
    monkeypatch.setattr(doctor, "_python", lambda code: broken)
    platform, (finding,) = doctor.probe_platform()
    assert platform is None
    assert (finding.level, "libcudart.so.13" in finding.message) == ("FAIL", True)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('{"type": "", "devices": []}', "no usable device"),
        ('{"type": "cuda", "devices": []}', "no device is visible"),
    ],
)
def test_no_device(monkeypatch, answer: str, words: str) -> None:
    done = subprocess.CompletedProcess([], 0, f"\nPROBE{answer}\n", "")
    monkeypatch.setattr(doctor, "_python", lambda code: done)
    platform, (finding,) = doctor.probe_platform()
    assert platform is None and finding.level == "FAIL" and words in finding.message


def test_the_kernels_that_the_processor_gets(monkeypatch) -> None:
    answer = '{"type": "cpu", "devices": [], "kernels": "AVX2"}'
    monkeypatch.setattr(doctor, "_python", lambda code: subprocess.CompletedProcess([], 0, f"PROBE{answer}", ""))
    _, (finding,) = doctor.probe_platform()
    assert finding.level == "OK" and "cores, torch's kernels for AVX2" in finding.message


def test_a_platform_that_hangs(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE", "import time; time.sleep(3600)")
    monkeypatch.setattr(doctor, "_PYTHON_TIMEOUT_S", 0.1)
    platform, (finding,) = doctor.probe_platform()
    assert platform is None and finding.level == "FAIL" and "it hangs" in finding.message


@pytest.mark.parametrize(("mib", "level"), [(4096, "OK"), (300, "WARN"), (64, "WARN")])
def test_shared_memory(monkeypatch, tmp_path: Path, mib: int, level: str) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(0, 0, mib << 20))
    (finding,) = doctor.check_shared_memory(512 << 20, tmp_path)
    assert finding.level == level
    assert ("--shm-size" in finding.remedy) == (level != "OK")


@pytest.mark.parametrize(("threads", "level"), [(None, "OK"), ("1", "OK"), ("2", "WARN"), ("all", "WARN")])
def test_threads_of_stages_on_a_cpu(monkeypatch, threads: str | None, level: str) -> None:
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert levels(doctor.check_threads("cpu", 3, {})) == [level]
    assert levels(doctor.check_threads("cuda", 3, {})) == ["OK"]


def test_threads_of_each_stage(monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (finding,) = doctor.check_threads("cpu", 3, {"asr": 1, "llm": 2, "tts": 1})
    assert finding.level == "OK" and finding.message == "asr 1, llm 2, tts 1"


def test_options_of_a_model_without_a_model(run) -> None:
    result = run("doctor", "--max-model-len", "64")
    assert result.code == 2 and "vllm-omni doctor MODEL --max-model-len ..." in result.err


def test_a_failure_is_shown_with_its_remedy(capsys) -> None:
    Finding("FAIL", "port", "one\ntwo", "do this").print()
    assert capsys.readouterr().out.splitlines() == [
        "FAIL  port            one",
        " " * 22 + "two",
        " " * 22 + "-> do this",
    ]
