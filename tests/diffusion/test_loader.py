# SPDX-License-Identifier: Apache-2.0
"""A pipeline is loaded with the stage's settings: the same image as diffusers with the same setting, or a clear
error."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

from tests.hub_cache import NAME, HubCache
from vllm_omni.config.dit_config import DiTConfig, parse_dit_config
from vllm_omni.diffusion.loader import load_pipeline, weight_bytes
from vllm_omni.errors import StageConfigError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def z_image(tiny_diffusion: Callable[[str], Path]) -> Path:
    return tiny_diffusion("z_image")


@pytest.fixture
def copied(z_image: Path, tmp_path: Path) -> Path:
    """A checkpoint that may be damaged."""
    return Path(shutil.copytree(z_image, tmp_path / "model"))


def load(model: Path, **engine_args: Any) -> DiffusionPipeline:
    return load_pipeline(str(model), parse_dit_config(engine_args, "stage 0 (dit)"), CPU)


def bare(model: Path, **arguments: Any) -> DiffusionPipeline:
    pipe = DiffusionPipeline.from_pretrained(model, **arguments)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: DiffusionPipeline, **arguments: Any) -> torch.Tensor:
    """An image, float32 `[1, 3, 64, 64]`."""
    defaults = {"prompt": "a red cat", "height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 4.0}
    generator = torch.Generator().manual_seed(3)
    return pipe(**(defaults | arguments), generator=generator, output_type="pt").images.float()


def refusal(model: Path, **engine_args: Any) -> str:
    """Why a pipeline with these settings cannot be had."""
    with pytest.raises(StageConfigError) as caught:
        load(model, **engine_args)
    return str(caught.value)


@pytest.fixture
def no_weights_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were read before the mistake was noticed")

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", refuse)


# Settings that have an effect on a CPU.


def tile(pipe: DiffusionPipeline) -> None:
    pipe.vae.enable_tiling()


def slice_vae(pipe: DiffusionPipeline) -> None:
    pipe.vae.enable_slicing()


def no_more(pipe: DiffusionPipeline) -> None:
    pass


@pytest.mark.parametrize(
    ("engine_args", "arguments", "change"),
    [
        ({}, {}, no_more),
        ({"dtype": "bfloat16"}, {"dtype": torch.bfloat16}, no_more),
        ({"dtype": "float16"}, {"dtype": torch.float16}, no_more),
        ({"vae_tiling": True}, {}, tile),
        ({"vae_slicing": True}, {}, slice_vae),
        ({"attention_backend": "_native_math"}, {}, no_more),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_has_the_effect_that_it_has_in_diffusers(
    z_image: Path, engine_args: dict[str, Any], arguments: dict[str, Any], change: Callable
) -> None:
    expected = bare(z_image, **arguments)
    change(expected)
    pipe = load(z_image, **engine_args)
    assert pipe.transformer.dtype == expected.transformer.dtype
    assert (pipe.vae.use_tiling, pipe.vae.use_slicing) == (expected.vae.use_tiling, expected.vae.use_slicing)
    assert (generate(pipe) - generate(expected)).abs().max() < 1e-4


def test_a_loaded_pipeline_is_ready_and_prints_nothing(z_image: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pipe = load(z_image)
    generate(pipe)
    assert "it/s" not in capfd.readouterr().err
    assert not any(module.training for module in (pipe.transformer, pipe.vae, pipe.text_encoder))


def test_an_attention_backend_is_that_of_one_pipeline(z_image: Path) -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    pipe = load(z_image, attention_backend="_native_math")
    assert pipe.transformer.layers[0].attention.processor._attention_backend == AttentionBackendName._NATIVE_MATH
    active, _ = _AttentionBackendRegistry.get_active_backend()
    assert active == AttentionBackendName.NATIVE


@pytest.mark.usefixtures("no_weights_read")
@pytest.mark.parametrize(
    ("engine_args", "words"),
    [
        ({"offload": "model"}, ["engine_args.offload: model", "CPU", "remove it"]),
        ({"offload": "group"}, ["engine_args.offload: group"]),
        ({"offload": "sequential"}, ["engine_args.offload: sequential"]),
        ({"attention_backend": "nativ"}, ["attention_backend", "did you mean 'native'?", "known here: flash"]),
        ({"attention_backend": "flash"}, ["attention_backend: flash", "cpu", "flash-attn", "use native"]),
        ({"attention_backend": "_native_cudnn"}, ["attention_backend: _native_cudnn", "cpu"]),
        ({"cache_backend": "first"}, ["cache_backend", "no 'first'", "known here: ", "first_block_cache"]),
        ({"cache_backend": "first_block_cache"}, ["cache_backend", "no caching for transformer (ZImageTransf"]),
        (
            {"cache_backend": "first_block_cache", "cache_config": {"treshold": 1}},
            ["cache_config: first_block_cache has no 'treshold'", "did you mean 'threshold'?"],
        ),
        ({"cache_backend": "mag_cache"}, ["cache_config: mag_cache: `mag_ratios` must be provided"]),
        (
            {"cache_backend": "pyramid_attention_broadcast", "cache_config": {"current_timestep_callback": 1}},
            ["has no 'current_timestep_callback'"],
        ),
        ({"quantization": {"bits": 4}}, ["engine_args.quantization", "'bits'"]),
        (
            {"quantization": {"quant_backend": "bitsandbytes_4bit", "quant_kwargs": {"load_in_4bit": True}}},
            ["engine_args.quantization", "bitsandbytes"],
        ),
        (
            {"quantization": {"quant_mapping": {"transfrmer": {"quant_backend": "torchao"}}}},
            ["no model 'transfrmer'", "did you mean 'transformer'?"],
        ),
        (
            {"quantization": {"quant_mapping": {"transformer": {"quant_backend": "torch"}}}},
            ["quant_mapping.transformer", "'torch' is none", "known here: "],
        ),
        ({"pipeline_class": "ZImagePipelin"}, ["no pipeline 'ZImagePipelin'", "did you mean 'ZImagePipeline'?"]),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused_before_loading(
    z_image: Path, engine_args: dict[str, Any], words: list[str]
) -> None:
    message = refusal(z_image, **engine_args)
    for word in words:
        assert word in message, message


def test_a_broken_compiler_is_refused(z_image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(function: Callable) -> None:
        raise RuntimeError("no C++ compiler was found\nand so on")

    monkeypatch.setattr(torch, "compile", compile_nothing)
    message = refusal(z_image, compile=True)
    assert message.startswith("engine_args.compile") and "no C++ compiler was found" in message


def test_quantized_weights(z_image: Path) -> None:
    pytest.importorskip("torchao")
    method = {"quant_backend": "torchao", "quant_type": "Int8WeightOnlyConfig"}
    pipe = load(z_image, quantization={"quant_mapping": {"transformer": method}})
    assert 0 < (generate(pipe) - generate(load(z_image))).abs().max() < 0.1


# Parts.


def test_two_parts_make_the_image_of_the_whole(z_image: Path) -> None:
    encoder, denoiser = load(z_image, part="encoder"), load(z_image, part="denoiser")
    assert all(value.is_meta for value in (*encoder.transformer.parameters(), *encoder.vae.parameters()))
    assert all(value.is_meta for value in denoiser.text_encoder.parameters())
    embeds, negative = encoder.encode_prompt("a red cat", do_classifier_free_guidance=True)
    image = generate(denoiser, prompt=None, prompt_embeds=embeds, negative_prompt_embeds=negative)
    assert torch.equal(image, generate(load(z_image)))


@pytest.mark.parametrize("name", ["z_image", "qwen_image", "flux", "stable_diffusion_3", "wan", "wan_i2v"])
@pytest.mark.parametrize("part", ["encoder", "denoiser"])
def test_a_part_reads_only_its_own_weights(
    tiny_diffusion: Callable[[str], Path], tmp_path: Path, name: str, part: str
) -> None:
    folder = Path(shutil.copytree(tiny_diffusion(name), tmp_path / name))
    for weights in folder.glob("*/*.safetensors"):
        if ("text_encoder" in weights.parent.name) != (part == "encoder"):
            weights.unlink()
    pipe, whole = load(folder, part=part, dtype="bfloat16"), load(tiny_diffusion(name), dtype="bfloat16")
    for component, module in whole.components.items():
        if isinstance(module, torch.nn.Module):
            assert (pipe.components[component].dtype, pipe.components[component].device) == (module.dtype, CPU)
    assert pipe._execution_device == CPU


def test_a_component_without_weights_raises(z_image: Path) -> None:
    with pytest.raises(RuntimeError, match="text_encoder is not loaded: this stage has part: denoiser"):
        generate(load(z_image, part="denoiser"))
    with pytest.raises(RuntimeError, match="vae is not loaded: this stage has part: encoder"):
        load(z_image, part="encoder").vae.decode(torch.zeros(1, 16, 4, 4))


def test_a_part_is_a_list_of_components(tiny_diffusion: Callable[[str], Path], tmp_path: Path) -> None:
    whole = tiny_diffusion("glm_image")
    folder = Path(shutil.copytree(whole, tmp_path / "glm_image"))
    (folder / "vision_language_encoder" / "model.safetensors").unlink()
    part = ["text_encoder", "transformer", "vae"]

    pipe = load(folder, part=part)

    assert all(value.is_meta for value in pipe.vision_language_encoder.parameters())
    assert not any(value.is_meta for name in part for value in pipe.components[name].parameters())
    sizes = [weight_bytes(str(whole), parse_dit_config({"part": each}, "dit"), CPU) for each in (part, "pipeline")]
    left_out = load_file(whole / "vision_language_encoder" / "model.safetensors")
    assert sizes[1] - sizes[0] == sum(tensor.nbytes for tensor in left_out.values())
    with pytest.raises(RuntimeError, match="vision_language_encoder is not loaded"):
        pipe.vision_language_encoder(input_ids=torch.zeros(1, 1, dtype=torch.int64))


def test_a_part_names_components_of_the_pipeline(z_image: Path) -> None:
    assert "ZImagePipeline has no model 'trasformer'; did you mean 'transformer'?" in refusal(
        z_image, part=["trasformer"]
    )


# Checkpoints.


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    message = refusal(tmp_path)
    assert str(tmp_path) in message and "model_index.json" in message


@pytest.mark.usefixtures("no_weights_read")
class TestFiles:
    def test_pickled_weights(self, copied: Path) -> None:
        pickle(copied)
        message = refusal(copied)
        assert str(copied / "transformer") in message
        assert "pickled (diffusion_pytorch_model.bin)" in message and "use_safetensors: false" in message

    def test_no_weights(self, copied: Path) -> None:
        (copied / "vae" / "diffusion_pytorch_model.safetensors").unlink()
        assert f"{copied / 'vae'}: has no weights" in refusal(copied)

    def test_a_missing_component(self, copied: Path) -> None:
        shutil.rmtree(copied / "tokenizer")
        assert f"{copied / 'tokenizer'}: is missing; model_index.json names it" in refusal(copied)

    def test_a_truncated_file(self, copied: Path) -> None:
        file = copied / "transformer" / "diffusion_pytorch_model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        message = refusal(copied)
        assert message.startswith(f"{file}: is damaged") and "download it again" in message

    def test_a_missing_shard(self, copied: Path) -> None:
        index = copied / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"x": "diffusion_pytorch_model-00002-of-00002.safetensors"}}))
        message = refusal(copied)
        assert "diffusion_pytorch_model-00002-of-00002.safetensors: is missing" in message and index.name in message

    def test_a_damaged_index(self, copied: Path) -> None:
        index = copied / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
        index.write_text("{")
        assert f"{index}: is damaged" in refusal(copied)

    def test_an_unknown_class(self, copied: Path) -> None:
        change_index(copied, transformer=["diffusers", "ZImageTransformer9DModel"])
        message = refusal(copied)
        assert "transformer is a ZImageTransformer9DModel, which diffusers does not have here" in message
        assert "trust_remote_code" in message

    def test_a_component_missing_in_the_index(self, copied: Path) -> None:
        change_index(copied, vae=[None, None])
        assert "ZImagePipeline needs a vae; model_index.json has [None, None]" in refusal(copied)

    def test_code_of_the_checkpoint(self, copied: Path, tmp_path: Path) -> None:
        add_code(copied, tmp_path / "has_run")
        message = refusal(copied)
        assert "transformer is a OwnTransformer" in message and "trust_remote_code: true" in message
        assert not (tmp_path / "has_run").exists()


def test_pickled_weights_that_are_allowed(copied: Path, z_image: Path) -> None:
    pickle(copied)
    assert torch.equal(generate(load(copied, use_safetensors=False)), generate(load(z_image)))


def test_trusted_code(copied: Path, z_image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    add_code(copied, tmp_path / "has_run")
    assert torch.equal(generate(load(copied, trust_remote_code=True)), generate(load(z_image)))
    assert (tmp_path / "has_run").exists()


def test_weights_of_another_shape(copied: Path) -> None:
    config = copied / "vae" / "config.json"
    config.write_text(config.read_text().replace('"latent_channels": 16', '"latent_channels": 8'))
    message = refusal(copied)
    assert message.startswith(f"{copied}: cannot be loaded as ZImagePipeline")


def test_incomplete_weights(copied: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = copied / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights.pop("layers.0.attention.to_q.weight")
    save_file(weights, file)
    message = refusal(copied)
    assert str(copied) in message and "layers.0.attention.to_q.weight" in message


def test_a_missing_variant(z_image: Path) -> None:
    assert "variant=fp16" in refusal(z_image, variant="fp16")


def pickle(folder: Path) -> None:
    """Replaces the denoiser's weights by pickled ones."""
    from safetensors.torch import load_file

    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()


def add_code(folder: Path, trace: Path) -> None:
    """Gives the denoiser a class of the checkpoint's own; when it is imported, a file appears."""
    change_index(folder, transformer=["own", "OwnTransformer"])
    code = f"from diffusers import ZImageTransformer2DModel as OwnTransformer\nopen({str(trace)!r}, 'w').close()\n"
    (folder / "transformer" / "own.py").write_text(code)


def change_index(folder: Path, **entries: Any) -> None:
    file = folder / "model_index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_auto_is_bfloat16_on_an_accelerator() -> None:
    from vllm_omni.diffusion.loader import resolve_dtype

    assert resolve_dtype(DiTConfig(), torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype(DiTConfig(), CPU) == torch.float32


@pytest.mark.parametrize("part", ["pipeline", "encoder", "denoiser"])
def test_weights_are_counted_without_reading_them(z_image: Path, tmp_path: Path, part: str) -> None:
    pipe = load(z_image, part=part)
    loaded = [m for m in pipe.components.values() if isinstance(m, torch.nn.Module)]
    expected = sum(t.nbytes for m in loaded for t in m.state_dict().values() if not t.is_meta)
    bare_folder = shutil.copytree(z_image, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))

    assert weight_bytes(str(bare_folder), parse_dit_config({"part": part}, "dit"), CPU) == expected
    half = weight_bytes(str(bare_folder), parse_dit_config({"part": part, "dtype": "bfloat16"}, "dit"), CPU)
    assert half == pytest.approx(expected / 2, rel=0.01)


def test_offloaded_weights_are_not_counted(z_image: Path) -> None:
    with pytest.raises(StageConfigError, match="cannot be estimated"):
        weight_bytes(str(z_image), parse_dit_config({"offload": "group"}, "dit"), CPU)


@pytest.mark.parametrize("part", ["pipeline", "encoder", "denoiser"])
def test_only_the_given_revision_is_loaded(
    z_image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    cache = HubCache(tmp_path, monkeypatch)
    (cache.add(z_image, "main") / "model_index.json").write_text("{}")  # Reading it fails.
    cache.add(z_image, "v2")

    pipe = load(Path(NAME), revision="v2", part=part)

    assert type(pipe).__name__ == "ZImagePipeline"
