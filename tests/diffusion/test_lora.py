# SPDX-License-Identifier: Apache-2.0
"""Adapters of one pipeline, against bare diffusers with the same files."""

import shutil

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from vllm_omni.diffusion.lora import AdapterManager
from vllm_omni.testing.tiny.diffusion_lora import write_tiny_diffusion_lora


def load(path):
    pipe = DiffusionPipeline.from_pretrained(path)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe):
    """float32 `[3, 32, 32]`; it changes with every weight."""
    generator = torch.Generator().manual_seed(3)
    call = {"height": 32, "width": 32, "num_inference_steps": 2, "generator": generator, "output_type": "pt"}
    return pipe("a red cat", **call).images[0]


@pytest.fixture(scope="module")
def model(tiny_diffusion):
    return tiny_diffusion("z_image")


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory):
    """Three files, by seed."""
    folder = tmp_path_factory.mktemp("adapters")
    return [str(write_tiny_diffusion_lora(model, folder / str(seed), seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def images(model, adapters):
    """Images of diffusers itself: without an adapter (None), and for (adapter, scale)."""
    pipe = load(model)
    expected = {None: generate(pipe)}
    for index, path in enumerate(adapters):
        pipe.load_lora_weights(path, adapter_name=f"bare{index}")
        for scale in (0.5, 1.0):
            pipe.set_adapters([f"bare{index}"], [scale])
            expected[index, scale] = generate(pipe)
    return expected


@pytest.fixture
def pipe(model):
    return load(model)


def same(image, expected):
    torch.testing.assert_close(image, expected, atol=1e-6, rtol=0)


def test_switching_adapters_restores_the_model(pipe, adapters, images):
    manager = AdapterManager(pipe, max_loras=8)
    for turn in [None, (0, 1.0), (1, 0.5), None, (0, 0.5), (0, 1.0), (1, 1.0), None]:
        index, scale = turn or (None, 1.0)
        manager.activate(*((f"style{index}", adapters[index]) if turn else (None, None)), scale)
        same(generate(pipe), images[turn])
    differences = [(images[None] - images[turn]).abs().max() for turn in [(0, 1.0), (1, 1.0), (0, 0.5)]]
    assert min(differences) > 0.02, "adapters that change nothing would prove nothing"


def test_an_active_adapter_is_not_activated_again(pipe, adapters, monkeypatch):
    manager = AdapterManager(pipe, max_loras=8)
    manager.activate("style", adapters[0], 1.0)
    for method in ("load_lora_weights", "set_adapters", "enable_lora", "disable_lora"):
        monkeypatch.setattr(pipe, method, None)  # cannot be called
    manager.activate("style", adapters[0], 1.0)
    manager.activate("the same under another name", adapters[0], 1.0)


def test_the_least_recently_used_adapter_is_removed_and_loaded_again(pipe, adapters, images):
    manager = AdapterManager(pipe, max_loras=2)
    for index in (0, 1, 0, 2):  # 1 is the one that is older
        manager.activate("style", adapters[index], 1.0)
        same(generate(pipe), images[index, 1.0])
    assert len(pipe.get_list_adapters()["transformer"]) == 2
    manager.activate("style", adapters[0], 0.5)
    manager.activate("style", adapters[1], 1.0)
    same(generate(pipe), images[1, 1.0])
    assert len(pipe.get_list_adapters()["transformer"]) == 2
    manager.activate(None, None, 1.0)
    same(generate(pipe), images[None])


def test_one_name_for_two_files_is_two_adapters(pipe, adapters, images):
    manager = AdapterManager(pipe, max_loras=8)
    for index in (0, 1, 0):
        manager.activate("style", adapters[index], 1.0)
        same(generate(pipe), images[index, 1.0])


def test_a_folder_is_read_as_its_only_file(pipe, adapters, images):
    AdapterManager(pipe, max_loras=1).activate("style", adapters[0].rpartition("/")[0], 1.0)
    same(generate(pipe), images[0, 1.0])


def changed(source, path, change):
    """A copy of an adapter's file with `change(tensors)` in it."""
    tensors = load_file(source)
    save_file(change(tensors), path)
    return str(path)


def wider(tensors):
    return {key: torch.cat([t, t], dim=1) if "lora_A" in key else t for key, t in tensors.items()}


def renamed(old, new):
    return lambda tensors: {key.replace(old, new, 1): tensor for key, tensor in tensors.items()}


def of_two_ranks(tensors):
    return {key: torch.cat([t, t]) if "lora_A" in key else t for key, t in tensors.items()}


def with_a_norm(tensors):
    return tensors | {"transformer.layers.0.attention.norm_q.weight": torch.ones(16)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (wider, "features, the layer has"),
        (renamed("layers.", "blocks."), "no such layer"),
        (renamed("transformer.", "unet."), "has no weights for transformer"),
        (with_a_norm, "it would change the model for every request"),
        (lambda tensors: dict(list(tensors.items())[1:]), "has half of a pair"),
        (of_two_ranks, "are of different ranks"),
        (lambda tensors: {key: tensor.flatten() for key, tensor in tensors.items()}, "is not a matrix"),
    ],
    ids=["sizes", "layers", "component", "weights that are no LoRA", "half of a pair", "two ranks", "vectors"],
)
def test_an_adapter_of_another_model_is_refused_and_changes_nothing(pipe, adapters, images, tmp_path, change, problem):
    manager = AdapterManager(pipe, max_loras=8)
    bad = changed(adapters[0], tmp_path / "bad.safetensors", change)
    for turn in (None, (1, 1.0)):
        if turn:
            manager.activate("good", adapters[1], 1.0)
        with pytest.raises(ValueError, match=f"LoRA adapter 'bad' .*{problem}"):
            manager.activate("bad", bad, 1.0)
        same(generate(pipe), images[turn])
    manager.activate("good", adapters[0], 1.0)
    same(generate(pipe), images[0, 1.0])


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(RuntimeError("odd file"), ValueError), (torch.OutOfMemoryError("no room"), torch.OutOfMemoryError)],
    ids=["file", "memory"],
)
def test_a_failed_load_keeps_the_active_adapter(pipe, adapters, images, monkeypatch, failure, raised):
    manager = AdapterManager(pipe, max_loras=8)
    manager.activate("good", adapters[1], 0.5)
    load_lora_weights = pipe.load_lora_weights

    def fail_late(*args, **kwargs):
        load_lora_weights(*args, **kwargs)
        raise failure

    monkeypatch.setattr(pipe, "load_lora_weights", fail_late)
    with pytest.raises(raised, match=str(failure)):
        manager.activate("bad", adapters[0], 1.0)
    same(generate(pipe), images[1, 0.5])
    assert pipe.get_list_adapters() == {"transformer": ["adapter_0"]}
    monkeypatch.undo()
    manager.activate("good now", adapters[0], 1.0)
    same(generate(pipe), images[0, 1.0])


def test_paths_without_an_adapter_are_refused(pipe, adapters, tmp_path):
    manager = AdapterManager(pipe, max_loras=8)
    (tmp_path / "none").mkdir()
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        shutil.copy(adapters[0], tmp_path / "two" / f"{name}.safetensors")
    torch.save(load_file(adapters[0]), tmp_path / "pickle.bin")
    for path, problem in {
        "missing": "no such file or folder",
        "none": "holds 0 .safetensors files",
        "name" * 100: "no such file or folder",
        "two": "holds 2 .safetensors files",
        "pickle.bin": "is no safetensors file",
    }.items():
        with pytest.raises(ValueError, match=rf"LoRA adapter 'style' \(.*{path}\): .*{problem}"):
            manager.activate("style", str(tmp_path / path), 1.0)


def test_a_name_that_cannot_be_downloaded_is_refused(pipe):
    with pytest.raises(
        ValueError, match=r"LoRA adapter 'style' \(nobody/nothing\): .*could not be downloaded from the hub"
    ):
        AdapterManager(pipe, max_loras=8).activate("style", "nobody/nothing", 1.0)


def test_a_stage_without_adapters_refuses_them(pipe, adapters):
    with pytest.raises(ValueError, match=r"style.*on several devices"):
        AdapterManager(pipe, max_loras=0).activate("style", adapters[0], 1.0)


def test_a_pipeline_that_takes_no_adapters_is_named(adapters):
    odd = type("OddPipeline", (), {})()
    manager = AdapterManager(odd, max_loras=8)
    manager.activate(None, None, 1.0)
    with pytest.raises(ValueError, match="OddPipeline takes no LoRA adapters"):
        manager.activate("style", adapters[0], 1.0)


def test_an_adapter_of_text_encoder_and_denoiser_applies_to_both(tiny_diffusion, tmp_path):
    model = tiny_diffusion("flux")
    path = str(write_tiny_diffusion_lora(model, tmp_path, 1, components=("transformer", "text_encoder")))
    ours, bare = load(model), load(model)
    plain = generate(bare)
    bare.load_lora_weights(path, adapter_name="bare")
    manager = AdapterManager(ours, max_loras=1)
    for scale in (1.0, 0.5):
        bare.set_adapters(["bare"], [scale])
        manager.activate("style", path, scale)
        same(generate(ours), generate(bare))
    assert ours.get_list_adapters() == {"transformer": ["adapter_0"], "text_encoder": ["adapter_0"]}
    manager.activate(None, None, 1.0)
    same(generate(ours), plain)
