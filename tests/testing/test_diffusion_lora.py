# SPDX-License-Identifier: Apache-2.0
"""Tiny adapters: reproducible and complete; tests/diffusion shows their effect on images."""

import pytest
from safetensors.torch import load_file

from vllm_omni.testing.tiny.diffusion_lora import RANK, write_tiny_diffusion_lora


def test_equal_seeds_give_identical_files_and_others_do_not(tiny_diffusion, tmp_path):
    model = tiny_diffusion("z_image")
    first, second, other = (
        write_tiny_diffusion_lora(model, tmp_path / name, seed) for name, seed in [("a", 1), ("b", 1), ("c", 2)]
    )
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()


def test_every_attention_layer_has_both_factors(tiny_diffusion, tmp_path):
    tensors = load_file(write_tiny_diffusion_lora(tiny_diffusion("z_image"), tmp_path))
    layers = {key.rpartition(".lora_")[0] for key in tensors}
    assert {layer.rpartition("attention.")[2] for layer in layers} == {"to_q", "to_k", "to_v", "to_out.0"}
    assert len(tensors) == 2 * len(layers)
    assert all(RANK in tensor.shape for tensor in tensors.values())


def test_a_component_without_attention_is_named(tiny_diffusion, tmp_path):
    with pytest.raises(ValueError, match=r"scheduler of .* has no attention layers"):
        write_tiny_diffusion_lora(tiny_diffusion("z_image"), tmp_path, components=("scheduler",))
