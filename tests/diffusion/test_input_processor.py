# SPDX-License-Identifier: Apache-2.0
"""The requests of a diffusion stage: completed by the stage's defaults, or refused."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from tests.diffusion.indexes import make_processor
from vllm_omni.diffusion.input_processor import DiffusionInputProcessor
from vllm_omni.errors import StageConfigError
from vllm_omni.sampling_params import DiffusionRequest, DiffusionSamplingParams

IMAGE = Image.new("RGB", (8, 4), "red")
TURNED = Image.Exif()
TURNED[ExifTags.Base.Orientation] = 6
PAINTERS = {"text": "ZImagePipeline", "edit": "QwenImageEditPipeline", "klein": "Flux2KleinPipeline"}
PAINTERS |= {"video": "WanPipeline", "audio": "StableAudioPipeline", "flux": "FluxPipeline"}
PAINTERS |= {"layered": "QwenImageLayeredPipeline"}


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DiffusionInputProcessor]:
    folder = tmp_path_factory.mktemp("indexes")
    limits = {"max_pixels": 1 << 20, "max_steps": 60, "max_frames": 81, "max_outputs": 4}
    return {
        name: make_processor(folder / name, class_name, limits, makes=name if name in ("video", "audio") else "image")
        for name, class_name in PAINTERS.items()
    }


def process(
    processor: DiffusionInputProcessor, params: Any = None, image: Any = None, **prompt: Any
) -> DiffusionRequest:
    prompt = {"prompt": "a hen"} | prompt
    if image is not None:
        prompt["multi_modal_data"] = {"image": image}
    return processor.process(prompt, params)  # type: ignore[arg-type]


def test_a_stage_that_could_serve_no_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageConfigError, match=r"SanaWMLTX2Refiner needs sana_latent, which other pipelines make"):
        make_processor(tmp_path, "SanaWMLTX2Refiner")
    make_processor(tmp_path, "SanaWMLTX2Refiner", sources=(0,))  # which may make the latents


@pytest.mark.parametrize("positions", [None, 514])
def test_a_checkpoint_for_the_first_and_the_last_frame_needs_both(tmp_path: Path, positions: int | None) -> None:
    """It is of the same class as those for the first frame alone."""
    index = {"_class_name": "WanImageToVideoPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({"pos_embed_seq_len": positions}))
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    if positions is None:
        make_processor(tmp_path, None, makes="video")
        return
    processor = make_processor(tmp_path, None, makes="video")
    with pytest.raises(ValueError, match=r"WanImageToVideoPipeline needs last_image; give .*'last_image': \.\.\.\}"):
        process(processor, image=IMAGE)
    frames = {"image": IMAGE, "last_image": IMAGE}
    assert list(process(processor, multi_modal_data=frames).media) == ["last_image"]


def test_settings_may_be_a_dict_or_an_object(processors: dict[str, DiffusionInputProcessor]) -> None:
    settings = {"height": 64, "guidance_scale": 3, "seed": 5, "num_outputs_per_prompt": 2}
    as_dict = process(processors["text"], settings)

    assert as_dict == process(processors["text"], DiffusionSamplingParams(**settings))
    assert (as_dict.params.height, as_dict.params.width, as_dict.seeds) == (64, None, [5, 6])
    assert as_dict.params.output_format == "pil"  # the default is set here, and nowhere else
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(as_dict), type=DiffusionRequest) == as_dict


def test_a_schedule_that_has_no_single_step(tiny_diffusion: Callable[[str], Path]) -> None:
    """Its pixels would not be numbers."""
    painter = make_processor(tiny_diffusion("qwen_image"), None)
    with pytest.raises(ValueError, match="num_inference_steps 1: this model's scheduler needs 2 or more"):
        process(painter, {"num_inference_steps": 1})
    assert process(painter, {"num_inference_steps": 2}).params.num_inference_steps == 2
    assert process(painter, {"num_inference_steps": 1, "extra_args": {"sigmas": [0.5]}})
    assert process(make_processor(tiny_diffusion("z_image"), None), {"num_inference_steps": 1})


def test_the_stages_defaults_apply_to_unset_fields(tmp_path: Path) -> None:
    defaults = {"height": 64, "seed": 9, "num_outputs_per_prompt": 2, "extra_args": {"cfg_truncation": 0.5}}
    processor = make_processor(tmp_path, "ZImagePipeline", defaults=defaults)
    extra = {"max_sequence_length": 8}

    nothing = process(processor)
    assert (nothing.params.height, nothing.seeds) == (64, [9, 10])
    some = process(processor, {"height": 32, "seed": None, "num_outputs_per_prompt": 1, "extra_args": extra})
    assert (some.params.height, some.seeds) == (32, [9])
    assert some.params.extra_args == {"cfg_truncation": 0.5, "max_sequence_length": 8}
    assert process(processor, DiffusionSamplingParams(width=16)).params.num_outputs_per_prompt == 2


def test_seeds_are_random_without_a_seed(processors: dict[str, DiffusionInputProcessor]) -> None:
    seeds = [process(processors["text"], {"num_outputs_per_prompt": 4}).seeds for _ in range(2)]

    assert len({*seeds[0], *seeds[1]}) == 8
    assert process(processors["text"], {"seed": [4, 4], "num_outputs_per_prompt": 2}).seeds == [4, 4]


def test_a_negative_prompt_can_be_in_the_prompt(processors: dict[str, DiffusionInputProcessor], tmp_path: Path) -> None:
    processor = make_processor(tmp_path, "ZImagePipeline", defaults={"negative_prompt": "blurred"})

    assert process(processor).params.negative_prompt == "blurred"
    assert process(processor, negative_prompt="").params.negative_prompt == ""
    assert process(processor, {"negative_prompt": "ox"}, negative_prompt="ox").params.negative_prompt == "ox"
    with pytest.raises(ValueError, match="remove one of them"):
        process(processor, {"negative_prompt": "ox"}, negative_prompt="cow")


def test_the_settings_depend_on_input_images(processors: dict[str, DiffusionInputProcessor]) -> None:
    request = process(processors["text"], {"strength": 0.5}, image=IMAGE)
    assert request.images[0].shape == (4, 8, 3) and request.params.strength == 0.5
    assert len(process(processors["klein"], image=[IMAGE, IMAGE]).images) == 2
    with pytest.raises(ValueError, match="ZImageImg2ImgPipeline does not take 'cfg_truncaton'"):
        process(processors["text"], {"extra_args": {"cfg_truncaton": 1.0}}, image=IMAGE)


def test_rows_of_images_are_a_medium_of_their_own(tmp_path: Path) -> None:
    processor = make_processor(tmp_path, "VisualClozePipeline")
    texts = {"extra_args": {"task_prompt": "the second is the first at night", "content_prompt": "a hen"}}
    rows = [[IMAGE, IMAGE], [IMAGE, None]]
    request = processor.process({"multi_modal_data": {"image": rows}}, texts)
    kinds = [[place.kind for place in row.items] for row in request.media["image"].items]
    assert request.images == [] and kinds == [["image", "image"], ["image", "plain"]]
    with pytest.raises(ValueError, match="VisualClozePipeline needs an input image"):
        processor.process({}, texts)
    for image in (IMAGE, [IMAGE, None], [[IMAGE, IMAGE]], [[IMAGE], [IMAGE, None]], [[IMAGE, None], IMAGE]):
        with pytest.raises(ValueError, match="image must be rows of as many images each"):
            processor.process({"multi_modal_data": {"image": image}}, texts)


@pytest.mark.parametrize(("channels", "shown"), [(3, [255] * 3), (4, [255, 0, 0, 0])])
def test_only_a_model_that_encodes_alpha_gets_it(channels: int, shown: list[int], tmp_path: Path) -> None:
    index = {"_class_name": "QwenImageLayeredPipeline", "vae": ["diffusers", "AutoencoderKLQwenImage"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps({"input_channels": channels}))
    processor = make_processor(tmp_path, None)

    (pixels,) = process(processor, image=Image.new("RGBA", (96, 64), (255, 0, 0, 0))).images

    assert pixels.shape == (64, 96, channels) and pixels[0, 0].tolist() == shown


def test_a_photo_is_upright(processors: dict[str, DiffusionInputProcessor]) -> None:
    file = io.BytesIO()
    Image.new("RGB", (96, 64)).save(file, "JPEG", exif=TURNED)
    assert process(processors["text"], image=Image.open(file)).images[0].shape == (96, 64, 3)


def test_an_adapter_is_passed_by_name_and_path(processors: dict[str, DiffusionInputProcessor], tmp_path: Path) -> None:
    request = processors["text"].process({"prompt": "a hen"}, None, LoRARequest("ink", 1, str(tmp_path)))

    assert (request.lora_name, request.lora_path) == ("ink", str(tmp_path))
    with pytest.raises(ValueError, match=r"'/no/file' does not exist"):
        processors["text"].process({"prompt": "a hen"}, None, LoRARequest("ink", 1, "/no/file"))
    with pytest.raises(ValueError, match="StableAudioPipeline takes no LoRA adapters"):
        processors["audio"].process(
            {"prompt": "a hen"}, {"num_inference_steps": 2}, LoRARequest("ink", 1, str(tmp_path))
        )
    with pytest.raises(TypeError, match="must be a LoRARequest, not str"):
        processors["text"].process({"prompt": "a hen"}, None, str(tmp_path))  # type: ignore[arg-type]


def test_a_stage_with_sources_needs_no_prompt_and_reads_images_if_configured(tmp_path: Path) -> None:
    prompt: Any = {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": IMAGE, "audio": None}}

    blind = make_processor(tmp_path / "a", "FluxPipeline", sources=(0,))
    seeing = make_processor(tmp_path / "b", "FluxPipeline", sources=(0,), requires_multimodal_data=True)

    assert not blind.reads_images and blind.process(prompt, None).images == []
    assert seeing.reads_images and len(seeing.process(prompt, None).images) == 1


BAD_SETTINGS: list[tuple[str, Any, list[str]]] = [
    ("text", {"heigth": 64}, ["unknown sampling parameter 'heigth'", "did you mean 'height'"]),
    ("text", {"num_images_per_prompt": 2}, ["give it in extra_args"]),
    ("text", {"max_sequence_length": 2}, ["'max_sequence_length'", "extra_args: {'max_sequence_length': ...}"]),
    ("text", {"temperature": 0.0}, ["'temperature'", "known: negative_prompt"]),
    ("text", SamplingParams(), ["DiffusionSamplingParams", "not SamplingParams"]),
    ("text", [{}], ["not list"]),
    ("text", {"height": "64"}, ["height: Expected `int", "got `str`"]),
    ("text", {"height": 64.5}, ["height: Expected `int"]),
    ("text", {"height": True}, ["height: Expected `int"]),
    ("text", {"seed": [1, "2"], "num_outputs_per_prompt": 2}, ["seed[1]: Expected `int`"]),
    ("text", {"negative_prompt": ["a"]}, ["negative_prompt: Expected `str"]),
    ("text", {"extra_args": [1]}, ["extra_args: Expected `object`"]),
    ("text", DiffusionSamplingParams(height="64"), ["height: Expected `int"]),  # type: ignore[arg-type]
    ("text", {"height": 0}, ["height 0", "1 or more"]),
    ("text", {"width": -8}, ["width -8", "1 or more"]),
    ("text", {"num_inference_steps": 0}, ["num_inference_steps 0", "1 or more"]),
    ("text", {"num_outputs_per_prompt": 0}, ["num_outputs_per_prompt 0", "1 or more"]),
    ("text", {"guidance_scale": -1.0}, ["guidance_scale -1.0", "0 or more"]),
    ("text", {"guidance_scale": 1e300}, ["guidance_scale 1e+300", "1000 or less"]),
    ("text", {"guidance_scale": float("nan")}, ["guidance_scale nan", "finite"]),
    ("text", {"lora_scale": float("inf")}, ["lora_scale inf", "finite"]),
    ("text", {"output_quality": 101}, ["output_quality 101", "100 or less"]),
    ("text", {"preview_every": -1}, ["preview_every -1", "0 or more"]),
    ("text", {"negative_prompt": "\ud800"}, ["negative_prompt is not valid Unicode"]),
    ("text", {"output_format": "bmp"}, ["output_format"]),
    ("text", {"output_format": "mp4"}, ["'mp4'", "png"]),
    ("video", {"output_format": "png"}, ["'png'", "mp4"]),
    ("text", {"seed": -1}, ["seed -1", "omit it for a random one"]),
    ("text", {"seed": 2**63 - 1, "num_outputs_per_prompt": 2}, [f"seed {2**63}"]),
    ("text", {"seed": [1, 2, 3], "num_outputs_per_prompt": 2}, ["3 entries", "num_outputs_per_prompt is 2"]),
    ("text", {"seed": [1, 2]}, ["2 entries", "num_outputs_per_prompt is 1"]),
    ("text", {"height": 2048, "width": 1024}, ["2048 x 1024", "2097152 pixels", "at most 1048576", "max_pixels"]),
    ("text", {"height": 2**21}, ["at most 1048576"]),
    ("video", {"height": 2048}, ["2048 x 832 (the pipeline's own default)", "max_pixels"]),
    ("text", {"num_inference_steps": 61}, ["num_inference_steps 61", "at most 60", "max_steps"]),
    ("video", {"num_frames": 85}, ["num_frames 85", "at most 81", "max_frames"]),
    ("layered", {"extra_args": {"layers": 5}}, ["layers 5", "at most 4", "max_outputs"]),
    ("layered", {}, ["QwenImageLayeredPipeline needs an input image"]),
    ("text", {"num_outputs_per_prompt": 5}, ["num_outputs_per_prompt 5", "at most 4", "max_outputs"]),
    ("audio", {}, ["num_inference_steps 100 (the pipeline's own default)", "at most 60"]),
    ("text", {"true_cfg_scale": 2.0}, ["ZImagePipeline does not take 'true_cfg_scale'", "guidance_scale"]),
    ("text", {"num_frames": 5}, ["does not take 'num_frames'"]),
    ("text", {"fps": 8}, ["fps is for videos", "ZImagePipeline makes image"]),
    ("video", {"fps": 0}, ["fps 0", "above 0"]),
    ("video", {"strength": 0.5}, ["WanPipeline does not take 'strength'"]),
    ("text", {"strength": 0.5}, ["strength", "needs an input image"]),
    ("klein", {"negative_prompt": "x"}, ["Flux2KleinPipeline does not take 'negative_prompt'"]),
    ("audio", {"num_inference_steps": 2, "preview_every": 1}, ["preview_every", "audio"]),
    ("text", {"extra_args": {"sigmas": torch.ones(2)}}, ["extra_args: 'sigmas' must be"]),
    ("text", {"extra_args": {"sigmas": [2**80]}}, ["extra_args: 'sigmas' must be"]),
    ("text", {"extra_args": {"height": 64}}, ["'height' is a field of its own"]),
]


@pytest.mark.parametrize(("pipeline", "params", "words"), BAD_SETTINGS)
def test_bad_settings_are_refused(
    processors: dict[str, DiffusionInputProcessor], pipeline: str, params: Any, words: list[str]
) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        process(processors[pipeline], params, IMAGE if pipeline == "layered" and params else None)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("pipeline", "prompt", "words"),
    [
        ("text", {"prompt": ""}, ["prompt is empty"]),
        ("text", {"prompt": " \n"}, ["prompt is empty"]),
        ("text", {"prompt": None}, ["must be a string, not missing"]),
        ("text", {"prompt": ["a"]}, ["must be a string, not a list"]),
        ("text", {"prompt": "a\ud800"}, ["prompt is not valid Unicode", "position 1"]),
        ("text", {"prompt_token_ids": [1]}, ["not prompt_token_ids"]),
        ("text", {"prompt_embeds": torch.ones(1, 4)}, ["not prompt_embeds"]),
        ("text", {"mm_processor_kwargs": {"size": 1}}, ["not mm_processor_kwargs"]),
        ("text", {"negative_prompt": ["a"]}, ["negative_prompt must be a string, not a list"]),
        ("text", {"additional_information": {"x": torch.ones(1)}}, ["'x' is a tensor"]),
        ("text", {"additional_information": [1]}, ["additional_information must be a dict"]),
        (
            "text",
            {"multi_modal_data": {"audio": np.ones(4)}},
            ["ZImagePipeline takes no 'audio' (it takes image, mask_image)"],
        ),
        ("text", {"multi_modal_data": {"image": "cat.png"}}, ["image 0 is a str", "PIL.Image.open"]),
        ("text", {"multi_modal_data": {"image": [IMAGE, IMAGE]}}, ["one input image for a prompt, not 2"]),
        ("text", {"multi_modal_data": {"image": Image.new("RGB", (2048, 1024))}}, ["image 0", "max_pixels"]),
        ("video", {"multi_modal_data": {"image": IMAGE}}, ["WanPipeline takes no 'image' (it takes video)"]),
        ("edit", {}, ["QwenImageEditPipeline needs an input image"]),
        ("edit", {"multi_modal_data": {"image": []}}, ["needs an input image"]),
    ],
)
def test_bad_prompts_are_refused(
    processors: dict[str, DiffusionInputProcessor], pipeline: str, prompt: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        process(processors[pipeline], None, **prompt)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ({"defaults": {"heigth": 64}}, ["default_sampling_params", "did you mean 'height'"]),
        ({"defaults": {"height": 0}}, ["default_sampling_params: height 0"]),
        ({"defaults": {"true_cfg_scale": 2.0}}, ["default_sampling_params", "does not take 'true_cfg_scale'"]),
        ({"defaults": {"output_format": "mp4"}}, ["default_sampling_params", "'mp4'"]),
        ({"makes": "video"}, ["final_output_type 'video'", "ZImagePipeline makes 'image'"]),
        ({"engine_args": {"max_stepz": 3}}, ["'max_stepz'", "did you mean 'max_steps'"]),
    ],
)
def test_a_stage_that_contradicts_its_checkpoint_is_refused(
    tmp_path: Path, stage: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(StageConfigError) as error:
        make_processor(tmp_path, "ZImagePipeline", **stage)
    assert [word for word in ["stage 0 (diffusion)", *words] if word not in str(error.value)] == []
