# SPDX-License-Identifier: Apache-2.0
"""Modular pipelines, opened by their folder: what they make is what bare diffusers makes, and what is wrong is refused
before anything runs."""

import copy
import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.hooks import TaylorSeerCacheConfig
from vllm.lora.request import LoRARequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.diffusion.indexes import make_processor
from tests.diffusion.tiny_calls import SMALL_VIDEO, make_image
from tests.diffusion.tiny_modular import CALLS, CLASSES, BareModular, write_modular
from tests.diffusion.watched_engine import WatchedEngine
from vllm_omni import CompletedEvent, ImageProgressEvent, OmniLLM
from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.input_processor import DiffusionInputProcessor
from vllm_omni.diffusion.loader import load_pipeline, weight_bytes
from vllm_omni.diffusion.modular_info import read_pipeline_info
from vllm_omni.errors import StageConfigError
from vllm_omni.inputs import StageRequest
from vllm_omni.sampling_params import DiffusionSamplingParams
from vllm_omni.stage.engines.base import Error, NewRequest, OutboxItem
from vllm_omni.testing.tiny.diffusion_lora import write_tiny_diffusion_lora

DOCUMENT = Path(__file__).parents[2] / "docs" / "diffusion.md"
PROMPTS = ("a red cat", "two ships at night, " * 2, "it")
FAST = ("wan", "z_image", "z_image, image")


@pytest.fixture(scope="session")
def tiny_modular(
    tmp_path_factory: pytest.TempPathFactory, tiny_diffusion: Callable[[str], Path]
) -> Callable[[str], Path]:
    """The folder of a modular checkpoint, by the name of its tiny pipeline; each is written once."""

    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp("modular") / name
        write_modular(name, folder, tiny_diffusion)
        return folder

    return functools.cache(write)


def new_request(
    processor: DiffusionInputProcessor, number: int, prompt: str, media: dict[str, Any], settings: dict[str, Any]
) -> NewRequest:
    """A request as another process gets it."""
    fields = DiffusionSamplingParams.__struct_fields__
    extra = {key: value for key, value in settings.items() if key not in fields}
    own = {"seed": number, "output_format": "np"} | {key: settings[key] for key in settings if key in fields}
    diffusion = processor.process({"prompt": prompt, "multi_modal_data": media}, {**own, "extra_args": extra})
    request = StageRequest(request_id=str(number), prompt=prompt, diffusion=diffusion)
    return NewRequest(MsgpackDecoder(StageRequest).decode(MsgpackEncoder().encode(request)), streams_output=True)


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CALLS])
def test_alone_and_among_others_a_request_equals_diffusers(name: str, tiny_modular: Callable[[str], Path]) -> None:
    source, media, settings = CALLS[name]
    folder = tiny_modular(source)
    bare = BareModular(folder)
    info = read_pipeline_info(str(folder), DiTConfig())
    sound = [name for name in (info.pipeline_class.sound_name,) if name]
    outputs = [f"{info.output_type}s", *sound]
    made_bare = [bare(p, seed, outputs, **media, **settings) for seed, p in enumerate(PROMPTS)]
    expected = [values[outputs[0]][0] for values in made_bare]
    assert sound == (["audio"] if name == "ltx2" else [])
    assert expected[0].std() > 0.01 and np.abs(expected[0] - expected[1]).max() > 1e-3

    processor = make_processor(folder, None, makes=info.output_type)
    requests = [new_request(processor, seed, prompt, media, settings) for seed, prompt in enumerate(PROMPTS)]
    watched = WatchedEngine(folder, max_batch_size=len(PROMPTS))
    for group in (requests[:1], requests):
        batches = watched.run_to_the_end(*group)
        for request in group:
            (made,) = watched.tensors(request.request_id)[info.output_type].numpy()
            one = expected[int(request.request_id)]
            np.testing.assert_allclose(made, one, rtol=0, atol=1e-4, err_msg=request.request_id)
            if sound:
                (made,) = watched.tensors(request.request_id)["audio"].numpy()
                one = made_bare[int(request.request_id)]["audio"][0].numpy()
                assert one.std() > 1e-4
                np.testing.assert_allclose(made, one, rtol=0, atol=1e-4, err_msg=request.request_id)
    assert max(batches) == len(PROMPTS)


@pytest.mark.slow
def test_a_cache_keeps_the_guided_passes_of_a_step_apart_and_nothing_of_another_call(
    tiny_modular: Callable[[str], Path],
) -> None:
    folder = tiny_modular("hunyuan_video_15")
    settings = {**SMALL_VIDEO, "num_inference_steps": 6}
    cache = {"cache_interval": 2, "disable_cache_before_step": 2, "taylor_factors_dtype": "float32"}
    bare = BareModular(folder)
    uncached = bare(PROMPTS[0], 0, "videos", **settings)[0]
    bare.pipe.transformer.enable_cache(TaylorSeerCacheConfig(**{**cache, "taylor_factors_dtype": torch.float32}))
    expected = []
    for seed, prompt in enumerate(PROMPTS):
        expected.append(bare(prompt, seed, "videos", **settings)[0])
        bare.pipe.transformer._reset_stateful_cache()
    assert np.abs(expected[0] - uncached).max() > 1e-3

    processor = make_processor(folder, None, makes="video")
    watched = WatchedEngine(folder, max_batch_size=1, cache_backend="taylorseer_cache", cache_config=cache)
    requests = [new_request(processor, seed, prompt, {}, settings) for seed, prompt in enumerate(PROMPTS)]
    watched.run_to_the_end(*requests)
    for request, one in zip(requests, expected, strict=True):
        (made,) = watched.tensors(request.request_id)["video"].numpy()
        np.testing.assert_allclose(made, one, rtol=0, atol=1e-4, err_msg=request.request_id)


def table() -> str:
    """Of the classes in `CALLS`, in the format of the document."""
    by_media: dict[str, list[str]] = {}
    for source, media, _ in CALLS.values():
        by_media.setdefault(", ".join(f"`{each}`" for each in media) or "none", []).append(f"`{CLASSES[source]}`")
    rows = [f"| {media} | {', '.join(names)} |" for media, names in by_media.items()]
    return "\n".join(["| `multi_modal_data` | diffusers' modular pipelines |", "|---|---|", *rows])


def test_the_document_lists_these_classes() -> None:
    assert f"\n\n{table()}\n\n" in DOCUMENT.read_text()


# One checkpoint, by its folder alone.

SMALL = {"height": 32, "width": 64, "num_inference_steps": 4, "max_sequence_length": 64}


@pytest.fixture(scope="session")
def z_image(tiny_modular: Callable[[str], Path]) -> Path:
    return tiny_modular("z_image")


@pytest.fixture(scope="session")
def bare(z_image: Path) -> BareModular:
    return BareModular(z_image)


def test_the_folder_is_all_that_a_pipeline_needs(
    z_image: Path, bare: BareModular, tiny_diffusion: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also after it has been moved: its index names the old place. With an adapter, previews, and a guidance."""
    moved = shutil.copytree(z_image, tmp_path / "moved")
    adapter = write_tiny_diffusion_lora(tiny_diffusion("z_image"), tmp_path / "adapter", 1)
    settings = {**SMALL, "seed": 3, "output_format": "np", "preview_every": 2, "guidance_scale": 3.0}
    settings["extra_args"] = {"max_sequence_length": settings.pop("max_sequence_length")}
    with OmniLLM(str(moved), preview_size=32) as llm:
        events = list(llm.generate("a hen", settings, stream=True, lora_request=LoRARequest("style", 1, str(adapter))))
        plain = llm.generate("a hen", settings, use_tqdm=False)[0].images[0]

    progress = [event for event in events if isinstance(event, ImageProgressEvent)]
    assert [(event.step, event.num_steps) for event in progress] == [(step, 4) for step in range(4)]
    assert [tuple(event.image.shape) for event in progress if event.image is not None] == [(16, 32, 3)]
    assert isinstance(events[-1], CompletedEvent)

    guided = copy.copy(bare.pipe)
    guided.guider = ClassifierFreeGuidance(guidance_scale=3.0)  # its own is not enabled
    bare_guided = copy.copy(bare)
    bare_guided.pipe = guided
    expected = bare_guided("a hen", 3, "images", **SMALL)[0]
    np.testing.assert_allclose(plain, expected, rtol=0, atol=1e-4)
    assert np.abs(expected - bare("a hen", 3, "images", **SMALL)[0]).max() > 1e-3, "a guidance makes a difference"
    guided.load_lora_weights(str(adapter))
    try:
        expected = bare_guided("a hen", 3, "images", **SMALL)[0]
    finally:
        guided.unload_lora_weights()
    np.testing.assert_allclose(events[-1].outputs[0].images[0], expected, rtol=0, atol=1e-4)
    assert np.abs(expected - plain).max() > 1e-3, "an adapter makes a difference"


def test_each_request_chooses_its_workflow(z_image: Path, bare: BareModular) -> None:
    """Text to image, image to image, and other steps and guidance, all at once on the same components."""
    media, changed = {"image": make_image(0, 64, 32)}, {**SMALL, "num_inference_steps": 5, "strength": 0.6}
    calls: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, SMALL), (media, changed), ({}, {**SMALL, "num_inference_steps": 2}), (media, {**changed, "strength": 1.0}),
    ]  # fmt: skip
    processor = make_processor(z_image, None)
    prompts = [*PROMPTS, "a dog"]
    requests = [new_request(processor, seed, prompts[seed], *call) for seed, call in enumerate(calls)]
    watched = WatchedEngine(z_image, max_batch_size=4)
    watched.run_to_the_end(*requests)
    for seed, (given, settings) in enumerate(calls):
        expected = bare(prompts[seed], seed, "images", **given, **settings)[0]
        (made,) = watched.tensors(str(seed))["image"].numpy()
        np.testing.assert_allclose(made, expected, rtol=0, atol=1e-4, err_msg=str(seed))


def test_latents_are_those_before_decoding(z_image: Path, bare: BareModular) -> None:
    processor = make_processor(z_image, None)
    request = new_request(processor, 3, "a hen", {}, {**SMALL, "output_format": "latent"})
    watched = WatchedEngine(z_image, max_batch_size=2)
    watched.run_to_the_end(request)
    (made,) = watched.tensors("3")["latents"]
    np.testing.assert_allclose(made, bare("a hen", 3, "latents", **SMALL)[0], rtol=0, atol=1e-4)


def test_an_abort_ends_one_request_at_its_next_step(z_image: Path) -> None:
    processor = make_processor(z_image, None)
    requests = [new_request(processor, seed, "a hen", {}, SMALL) for seed in (1, 2)]
    watched = WatchedEngine(z_image, max_batch_size=2)
    watched.run_to_the_end(requests[0])
    alone = watched.tensors("1")["image"]

    def on_item(item: OutboxItem) -> None:
        if item.request_id == "2" and watched.steps("2")[-1:] == [(0, 1)]:
            watched.engine.abort("2")
        watched.stop_after(1)(item)

    watched.run(*requests, on_item=on_item)
    assert watched.steps("2") == [(0, 0), (0, 1)] and watched.steps("1") == [(0, step) for step in range(4)]
    np.testing.assert_allclose(watched.tensors("1")["image"], alone, rtol=0, atol=1e-4)


def test_a_class_opens_the_checkpoint_of_another(tiny_diffusion: Callable[[str], Path], bare: BareModular) -> None:
    """`pipeline_class` names one of diffusers' modular pipelines; the checkpoint has a `model_index.json`."""
    folder = tiny_diffusion("z_image")
    config = DiTConfig(pipeline_class="ZImageModularPipeline")
    pipe = load_pipeline(str(folder), config, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    made = pipe(prompt="a hen", generator=generator, output_type="np", **SMALL)[0][0]
    np.testing.assert_allclose(made, bare("a hen", 3, "images", **SMALL)[0], rtol=0, atol=1e-4)


INT8 = {"quant_backend": "torchao", "quant_type": "Int8WeightOnlyConfig"}


@pytest.mark.parametrize(
    "setting",
    [
        {"attention_backend": "native"},
        {"vae_slicing": True, "vae_tiling": True},
        {"quantization": {"quant_mapping": {"transformer": INT8}}},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_setting_is_that_of_the_components(z_image: Path, bare: BareModular, setting: dict[str, Any]) -> None:
    if "quantization" in setting:
        pytest.importorskip("torchao")
    pipe = load_pipeline(str(z_image), DiTConfig(**setting), torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    made = pipe(prompt="a hen", generator=generator, output_type="np", **SMALL)[0][0]
    vae = bare.pipe.vae
    if "vae_tiling" in setting:
        vae.enable_tiling()
    try:
        difference = np.abs(made - bare("a hen", 3, "images", **SMALL)[0]).max()
    finally:
        vae.disable_tiling()
    assert difference < 1e-4 if "quantization" not in setting else 1e-6 < difference < 0.5


def test_weights_are_counted_without_reading_them(z_image: Path, bare: BareModular) -> None:
    modules = [item for item in bare.pipe.components.values() if isinstance(item, torch.nn.Module)]
    in_memory = sum(tensor.nbytes for module in modules for tensor in module.state_dict().values())
    assert weight_bytes(str(z_image), DiTConfig(dtype="float32"), torch.device("cpu")) == in_memory


# What is wrong.


@pytest.fixture
def copied(z_image: Path, tmp_path: Path) -> Path:
    """Without the place that it was copied from, where its files would be looked for, too."""
    folder = shutil.copytree(z_image, tmp_path / "copied")

    def move(index: dict[str, Any]) -> None:
        for entry in index.values():
            if isinstance(entry, list):
                entry[2]["pretrained_model_name_or_path"] = str(folder)

    change_index(folder, move)
    return folder


def change_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "modular_model_index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def with_type(name: str, library: str, class_name: str) -> Callable[[dict[str, Any]], None]:
    return lambda index: index[name][2].update(type_hint=[library, class_name])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda index: index.update(_class_name="Flux9Pipeline"), "has no modular pipeline 'Flux9Pipeline'"),
        (lambda index: index.pop("_class_name"), "modular_model_index.json has no _class_name"),
        (lambda index: index.update(_blocks_class_name="MyBlocks"), "has no blocks 'MyBlocks'"),
        (with_type("transformer", "diffusers", "NoSuchModel"), "transformer is a NoSuchModel, which diffusers does"),
        (with_type("vae", "no_such_library", "VAE"), "vae is a VAE, which no_such_library does not have"),
        (lambda index: index["vae"][2].pop("type_hint"), "vae has no type_hint"),
        (lambda index: index["vae"][2].update(subfolder="elsewhere", pretrained_model_name_or_path="/nowhere"),
         "names /nowhere/elsewhere for vae, which is not there"),
        (lambda index: index["vae"][2].update(colour="red"), "vae is a AutoencoderKL"),
        (lambda index: index.pop("transformer"), "needs transformer, which modular_model_index.json does not name"),
    ],
)  # fmt: skip
def test_an_index_that_names_what_is_not_there(copied: Path, change: Any, problem: str) -> None:
    change_index(copied, change)
    with pytest.raises(StageConfigError, match=re.escape(problem)):
        read_pipeline_info(str(copied), DiTConfig())


def test_an_index_that_cannot_be_read(copied: Path) -> None:
    (copied / "modular_model_index.json").write_text("{")
    with pytest.raises(StageConfigError, match=r"modular_model_index\.json cannot be read"):
        read_pipeline_info(str(copied), DiTConfig())


def test_weights_that_are_missing(copied: Path) -> None:
    next((copied / "vae").glob("*.safetensors")).unlink()
    with pytest.raises(StageConfigError, match="vae: has no weights"):
        load_pipeline(str(copied), DiTConfig(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"part": "encoder"}, "does not encode prompts in a separate method; set part: pipeline"),
        ({"cache_backend": "first_block_cache"}, "blocks of ZImageModularPipeline do not name the guided passes"),
        ({"pipeline_class": "FluxPipeline"}, "has no modular pipeline 'FluxPipeline'"),
        ({"pipeline_class": "FluxModularPipelin"}, "'FluxModularPipelin'; did you mean 'FluxModularPipeline'"),
    ],
)
def test_a_setting_that_is_refused(z_image: Path, setting: dict[str, Any], problem: str) -> None:
    with pytest.raises(StageConfigError, match=re.escape(problem)):
        load_pipeline(str(z_image), DiTConfig(**setting), torch.device("cpu"))


def test_a_part_is_a_list_of_networks(z_image: Path) -> None:
    pipe = load_pipeline(str(z_image), DiTConfig(part=["transformer"]), torch.device("cpu"))
    assert pipe.transformer.device.type != "meta"
    with pytest.raises(RuntimeError, match=r"text_encoder is not loaded: this stage has part: \['transformer'\]"):
        pipe(prompt="a hen", **SMALL)


@pytest.mark.parametrize(
    ("media", "settings", "problem"),
    [
        ({}, {"max_sequence_length": "long"}, "ZImageModularPipeline: max_sequence_length: Expected `int`, got `str`"),
        ({}, {"sigmas": [1.0, "x"]}, "ZImageModularPipeline: sigmas: Expected `float`, got `str`"),
        ({}, {"latents": [1.0]}, "ZImageModularPipeline: latents: takes tensors, and a request has plain values"),
        ({"image": "cat.png"}, {}, "image 0 is a str; give a PIL image"),
        ({"mask_image": make_image(0)}, {}, "ZImageModularPipeline takes no 'mask_image'"),
        ({}, {"true_cfg_scale": 2.0}, "ZImageModularPipeline does not take 'true_cfg_scale'"),
        ({}, {"colour": "red"}, "ZImageModularPipeline does not take 'colour'"),
        ({}, {"num_images_per_prompt": 2}, "'num_images_per_prompt' is set by the stage"),
        ({"image": [make_image(0), make_image(1)]}, {}, "takes one input image for a prompt, not 2"),
    ],
)
def test_an_input_that_is_wrong(z_image: Path, media: Any, settings: Any, problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(problem)):
        new_request(make_processor(z_image, None), 1, "a hen", media, settings)


@pytest.mark.slow
def test_an_input_that_is_missing(tiny_modular: Callable[[str], Path]) -> None:
    """Image to video without an image; Stable Diffusion XL with a control image and without its network."""
    processor = make_processor(tiny_modular("wan_i2v"), None, makes="video")
    with pytest.raises(ValueError, match="WanImage2VideoModularPipeline needs an input image"):
        new_request(processor, 1, "a hen", {}, {})
    processor = make_processor(tiny_modular("StableDiffusionXLPipeline"), None)
    with pytest.raises(ValueError, match="control_image: this needs controlnet, which this checkpoint does not have"):
        new_request(processor, 1, "a hen", {"control_image": make_image(0)}, {})
    with pytest.raises(ValueError, match=r"needs image \(in multi_modal_data\) with prompt, mask_image"):
        new_request(processor, 1, "a hen", {"mask_image": make_image(0)}, {})


def test_a_size_that_the_blocks_choose_has_a_limit(z_image: Path) -> None:
    processor = make_processor(z_image, None)
    watched = WatchedEngine(z_image, max_batch_size=1, max_pixels=128 * 128)
    request = new_request(processor, 1, "a hen", {}, {"num_inference_steps": 2})
    watched.run_to_the_end(request)
    (error,) = watched.outbox.items["1"]
    assert isinstance(error, Error) and error.invalid
    assert re.search(r"\d+ x \d+ is \d+ pixels; this stage makes at most 16384", error.error), error.error


# Blocks that are code of the checkpoint.

CODE = """
from pathlib import Path
import torch
from diffusers.modular_pipelines import (
    ComponentSpec, InputParam, ModularPipelineBlocks, OutputParam, SequentialPipelineBlocks)
from PIL import Image
import numpy as np

Path({trace!r}).write_text("ran")

class PaintStep(ModularPipelineBlocks):
    @property
    def inputs(self):
        return [InputParam("prompt", type_hint=str, required=True), InputParam("grey", type_hint=int, required=True),
                InputParam("generator")]

    @property
    def intermediate_outputs(self):
        return [OutputParam("images")]

    def __call__(self, components, state):
        block_state = self.get_block_state(state)
        noise = torch.randint(0, 9, (8, 8, 3), generator=block_state.generator).numpy().astype(np.uint8)
        block_state.images = [Image.fromarray(noise + block_state.grey)]
        self.set_block_state(state, block_state)
        return components, state
"""


@pytest.fixture
def with_code(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint whose blocks are its own code, and the file that this code writes."""
    folder, trace = tmp_path / "own", tmp_path / "trace"
    folder.mkdir()
    (folder / "paint.py").write_text(CODE.replace("{trace!r}", repr(str(trace))))
    (folder / "modular_config.json").write_text(json.dumps({"auto_map": {"ModularPipelineBlocks": "paint.PaintStep"}}))
    index = {"_class_name": "ModularPipeline", "_blocks_class_name": "PaintStep", "_diffusers_version": "0.42.1"}
    (folder / "modular_model_index.json").write_text(json.dumps(index))
    return folder, trace


def test_code_of_the_checkpoint_runs_only_if_it_is_trusted(with_code: tuple[Path, Path]) -> None:
    folder, trace = with_code
    with pytest.raises(StageConfigError, match=r"its blocks are code of the checkpoint \(modular_config\.json\)"):
        read_pipeline_info(str(folder), DiTConfig())
    assert not trace.exists()

    processor = make_processor(folder, None, engine_args={"trust_remote_code": True})
    assert trace.exists()
    with pytest.raises(ValueError, match=r"needs grey \(in extra_args\) with prompt"):
        new_request(processor, 1, "a hen", {}, {})
    watched = WatchedEngine(folder, max_batch_size=2, trust_remote_code=True)
    watched.run_to_the_end(*(new_request(processor, seed, "a hen", {}, {"grey": 100}) for seed in (1, 2)))
    for seed in (1, 2):
        noise = torch.randint(0, 9, (8, 8, 3), generator=torch.Generator().manual_seed(seed)).numpy()
        (made,) = watched.tensors(str(seed))["image"].numpy()
        np.testing.assert_allclose(made * 255, noise + 100, rtol=0, atol=1e-3)


def test_a_tensor_that_no_request_can_have_is_refused(with_code: tuple[Path, Path]) -> None:
    code = with_code[0] / "paint.py"
    code.write_text(code.read_text().replace('"grey", type_hint=int', '"grey_latents", type_hint=torch.Tensor'))
    with pytest.raises(StageConfigError, match="needs grey_latents, which other pipelines make"):
        make_processor(with_code[0], None, engine_args={"trust_remote_code": True})


def test_code_that_fails_is_named(with_code: tuple[Path, Path]) -> None:
    folder, _ = with_code
    (folder / "paint.py").write_text("raise RuntimeError('out of paint')")
    with pytest.raises(StageConfigError, match="its blocks cannot be imported: out of paint"):
        read_pipeline_info(str(folder), DiTConfig(trust_remote_code=True))
