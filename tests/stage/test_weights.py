# SPDX-License-Identifier: Apache-2.0
"""Folders of new weights: which fit a checkpoint, and the checkpoint that they make."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import CompilationMode

from vllm_omni.control import CheckWeights
from vllm_omni.stage.engines.llm import LLMStageEngine
from vllm_omni.stage.weights import WeightFolder

PLAIN = {"layers.0.weight": torch.zeros(2, 3), "layers.1.weight": torch.zeros(4), "norm.bias": torch.zeros(2)}
SHARED = {"thinker.a": torch.zeros(2), "thinker.b": torch.zeros(3), "talker.a": torch.zeros(2)}


def write(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def ones(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def plain(tmp_path: Path) -> WeightFolder:
    folder = write(tmp_path / "checkpoint", PLAIN)
    (folder / "config.json").write_text("{}")
    return WeightFolder(str(folder))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layers.1.weight": None, "norm.bias": None}, r"layers\.1\.weight is missing"),
        ({"layers.2.weight": torch.zeros(1), "other": torch.zeros(1)}, r"layers\.2\.weight is no tensor of the check"),
        ({"layers.0.weight": torch.zeros(3, 2)}, r"layers\.0\.weight has the shape \[3, 2\], not \[2, 3\]"),
        ({"norm.bias": torch.zeros(2, dtype=torch.int8)}, r"norm\.bias is I8, not F32"),
    ],
)
def test_the_first_tensor_that_is_wrong_is_named(
    plain: WeightFolder, tmp_path: Path, changes: dict[str, torch.Tensor | None], problem: str
) -> None:
    tensors = {name: tensor for name, tensor in (PLAIN | changes).items() if tensor is not None}
    with pytest.raises(ValueError, match=problem):
        plain.check(str(write(tmp_path / "new", tensors)))


def test_a_dtype_is_converted_as_when_it_is_loaded(plain: WeightFolder, tmp_path: Path) -> None:
    half = {name: tensor.to(torch.bfloat16) for name, tensor in PLAIN.items()}
    assert plain.check(str(write(tmp_path / "new", half))) == {("", "")}


@pytest.mark.parametrize("name", ["nowhere", "empty", "damaged"])
def test_what_is_no_folder_of_weights(plain: WeightFolder, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"{}")
    problem = "is damaged" if name == "damaged" else r"there is no such folder with \.safetensors files"
    with pytest.raises(ValueError, match=problem):
        plain.check(str(tmp_path / name))


def test_the_checkpoint_with_new_weights(plain: WeightFolder, tmp_path: Path) -> None:
    new = write(tmp_path / "new", ones(PLAIN), "step-12.safetensors")
    (new / "config.json").write_text("the trainer's")
    with plain.overlay(str(new)) as folder:
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
        assert (folder / "config.json").read_text() == "{}"
        assert load_file(folder / "model.safetensors")["norm.bias"].tolist() == [1, 1]
    assert not folder.exists()


def test_a_stage_of_a_shared_checkpoint(tmp_path: Path) -> None:
    """The weights of one stage alone are complete; those of the others stay, also those in the same file."""
    shared = WeightFolder(str(write(tmp_path / "checkpoint", SHARED)), part="thinker.")
    thinker = {name: tensor for name, tensor in ones(SHARED).items() if name.startswith("thinker.")}
    new = str(write(tmp_path / "new", thinker))
    assert shared.check(new) == {("", "thinker.")}
    with shared.overlay(new) as folder:
        tensors = {name: tensor for file in folder.iterdir() for name, tensor in load_file(file).items()}
    assert {name: int(tensor.max()) for name, tensor in tensors.items()} == {
        "thinker.a": 1,
        "thinker.b": 1,
        "talker.a": 0,
    }

    with pytest.raises(ValueError, match=r"thinker\.b is missing"):
        shared.check(str(write(tmp_path / "less", {"thinker.a": torch.zeros(2)})))
    shared.changed = {("", "thinker.")}
    with pytest.raises(ValueError, match=r"thinker\. is missing, which an earlier update has changed"):
        shared.check(str(write(tmp_path / "other", {"talker.a": torch.zeros(2)})))


def test_networks_of_a_pipeline_of_diffusers(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    for name in ("transformer", "vae"):
        write(checkpoint / name, PLAIN, "diffusion_pytorch_model.safetensors")
        (checkpoint / name / "config.json").write_text(name)
    folder = WeightFolder(str(checkpoint))
    write(tmp_path / "new" / "transformer", ones(PLAIN))
    with folder.overlay(str(tmp_path / "new")) as made:
        values = {
            name: load_file(made / name / "diffusion_pytorch_model.safetensors")["norm.bias"][0].item()
            for name in ("transformer", "vae")
        }
        assert values == {"transformer": 1, "vae": 0} and (made / "transformer/config.json").read_text()
    write(tmp_path / "odd" / "unet", PLAIN)
    with pytest.raises(ValueError, match="the checkpoint has no weights in a folder 'unet'"):
        folder.check(str(tmp_path / "odd"))


@pytest.mark.parametrize(
    ("device", "mode", "problem"),
    [
        ("cuda", CompilationMode.NONE, "on a CPU only"),
        ("cpu", CompilationMode.VLLM_COMPILE, "set enforce_eager: true"),
    ],
)
def test_a_stage_that_keeps_its_weights_says_so_before_they_are_read(
    device: str, mode: CompilationMode, problem: str
) -> None:
    engine = LLMStageEngine.__new__(LLMStageEngine)
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device), compilation_config=SimpleNamespace(mode=mode)
    )
    vars(engine).update(_engine=SimpleNamespace(vllm_config=config), _vllm_config=config)
    with pytest.raises(ValueError, match=problem):
        engine.control(CheckWeights(weights_path="/nowhere"))


@pytest.mark.parametrize("available", [3 << 30, 2 << 30])
def test_weights_that_do_not_fit_beside_the_others_are_refused(
    plain: WeightFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    monkeypatch.setattr("vllm_omni.stage.engines.base.available_memory", lambda: available)
    engine = LLMStageEngine.__new__(LLMStageEngine)
    sizes = SimpleNamespace(collective_rpc=lambda method: {"weight_bytes": [1 << 30, 3 << 29]}[method])
    vars(engine).update(_engine=sizes, _weight_folder=plain)
    verb = CheckWeights(weights_path=str(write(tmp_path / "new", ones(PLAIN))))
    if available > 5 << 29:
        engine.control(verb)
        return
    with pytest.raises(ValueError, match=r"new weights take 2\.50 GiB beside its own, and 2\.00 GiB are free"):
        engine.control(verb)
