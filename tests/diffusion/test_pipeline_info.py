# SPDX-License-Identifier: Apache-2.0
"""What a diffusers checkpoint is found to be, from its `model_index.json` and diffusers' own declarations."""

import importlib
import json
import sys
from pathlib import Path

import diffusers
import pytest
from diffusers import ZImagePipeline

import vllm_omni
from tests.diffusion.indexes import write_index
from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion import pipeline_info
from vllm_omni.diffusion.pipeline_info import PipelineInfo, is_diffusers_model, load_model_index, takes_several_images
from vllm_omni.errors import StageConfigError


def load(folder: Path, class_name: object, **config: object) -> PipelineInfo:
    return PipelineInfo.load(write_index(folder, class_name), DiTConfig(**config))


@pytest.mark.parametrize(
    ("class_name", "made", "with_images", "needs_images", "several"),
    [
        ("ZImagePipeline", "image", "ZImageImg2ImgPipeline", False, False),
        ("QwenImagePipeline", "image", "QwenImageImg2ImgPipeline", False, False),
        ("QwenImageEditPipeline", "image", "QwenImageEditPipeline", True, False),
        ("QwenImageEditPlusPipeline", "image", "QwenImageEditPlusPipeline", True, True),
        ("QwenImageLayeredPipeline", "image", "QwenImageLayeredPipeline", True, False),
        ("FluxPipeline", "image", "FluxImg2ImgPipeline", False, False),
        ("FluxImg2ImgPipeline", "image", "FluxImg2ImgPipeline", True, False),
        ("Flux2KleinPipeline", "image", "Flux2KleinPipeline", False, True),
        ("StableDiffusion3Pipeline", "image", "StableDiffusion3Img2ImgPipeline", False, False),
        ("WanPipeline", "video", None, False, False),
        ("LTX2Pipeline", "video", None, False, False),
        ("WanImageToVideoPipeline", "video", "WanImageToVideoPipeline", True, False),
        ("WanVideoToVideoPipeline", "video", None, False, False),  # its call has no num_frames
        ("SanaVideoPipeline", "video", None, False, False),  # nor has this one's
        ("Cosmos3OmniPipeline", "video", "Cosmos3OmniPipeline", False, False),  # its module imports BaseOutput
        ("StableDiffusionAdapterPipeline", "image", "StableDiffusionAdapterPipeline", True, True),
        ("StableAudioPipeline", "audio", None, False, False),
        ("StableAudio3Pipeline", "audio", None, False, False),  # its call has no argument about audio
    ],
)
def test_what_a_pipeline_makes_and_takes(
    tmp_path: Path, class_name: str, made: str, with_images: str | None, needs_images: bool, several: bool
) -> None:
    info = load(tmp_path, class_name)

    assert (info.output_type, info.needs_images, info.takes_images) == (made, needs_images, with_images is not None)
    assert info.class_for([]) is info.pipeline_class
    if with_images is None:
        with pytest.raises(ValueError, match=rf"{class_name} takes no 'image' \(it takes"):
            info.class_for(["image"])
    else:
        assert info.class_for(["image"]).__name__ == with_images
        assert takes_several_images(info.class_for(["image"])) == several


def test_lists_of_one_prompt_and_of_a_batch_are_several_images() -> None:
    assert takes_several_images(diffusers.JoyImageEditPlusPipeline, "images")


def test_a_configuration_can_name_another_class(tmp_path: Path) -> None:
    info = load(tmp_path, "FluxPipeline", pipeline_class="FluxImg2ImgPipeline")

    assert info.pipeline_class.__name__ == "FluxImg2ImgPipeline"


@pytest.mark.parametrize(
    ("class_name", "needed"),
    [
        ("FluxFillPipeline", ["image", "mask_image"]),
        ("StableDiffusionXLControlNetInpaintPipeline", ["image", "mask_image", "control_image"]),
        ("WanVideoToVideoPipeline", ["video"]),
        ("WanAnimatePipeline", ["image", "pose_video", "face_video"]),
        ("KandinskyPipeline", ["image_embeds", "negative_image_embeds"]),
        ("StableAudio3AudioToAudioPipeline", ["audio"]),
        ("StableVideoDiffusionPipeline", ["image"]),
        ("MarigoldDepthPipeline", ["image"]),
        # The others can be left out, or given in extra_args.
        ("WanVACEPipeline", []),
        ("OmniGenPipeline", []),
        ("Cosmos2VideoToWorldPipeline", []),
        ("LTXConditionPipeline", []),
        ("StableDiffusionAttendAndExcitePipeline", []),
        ("FluxPipeline", []),
    ],
)
def test_what_a_request_must_have(tmp_path: Path, class_name: str, needed: list[str]) -> None:
    info = load(tmp_path, class_name)
    assert info.needed_media(info.pipeline_class) == needed and info.missing_inputs == []


@pytest.mark.parametrize(
    ("class_name", "media", "runs"),
    [
        ("FluxPipeline", ["image"], "FluxImg2ImgPipeline"),
        ("FluxPipeline", ["image", "mask_image"], "FluxInpaintPipeline"),
        ("StableDiffusionXLImg2ImgPipeline", ["mask_image", "image"], "StableDiffusionXLInpaintPipeline"),
        ("WanPipeline", ["video"], "WanVideoToVideoPipeline"),
        ("LTX2ConditionPipeline", ["conditions"], "LTX2ConditionPipeline"),
    ],
)
def test_the_class_that_runs_a_request_takes_its_media(
    tmp_path: Path, class_name: str, media: list[str], runs: str
) -> None:
    assert load(tmp_path, class_name).class_for(media).__name__ == runs


def test_a_class_that_would_leave_out_a_network_is_not_taken(tmp_path: Path) -> None:
    """Wan 2.2 has two transformers, of which diffusers' video to video reads one."""
    index = {"_class_name": "WanPipeline", "transformer_2": ["diffusers", "WanTransformer3DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"WanPipeline takes no 'video' \(it takes none\)"):
        PipelineInfo.load(str(tmp_path), DiTConfig()).class_for(["video"])


class MyPipeline(ZImagePipeline):
    """A pipeline of somebody's own package."""


def test_a_configuration_can_name_a_class_of_any_package(tmp_path: Path) -> None:
    assert load(tmp_path, "ZImagePipeline", pipeline_class=f"{__name__}.MyPipeline").pipeline_class is MyPipeline
    with pytest.raises(StageConfigError, match=r"pipeline_class: .* has no 'MyPipelin'; did you mean 'MyPipeline'"):
        load(tmp_path, "ZImagePipeline", pipeline_class=f"{__name__}.MyPipelin")
    with pytest.raises(StageConfigError, match=r"no pipeline 'pathlib\.Path'"):
        load(tmp_path, "ZImagePipeline", pipeline_class="pathlib.Path")


def test_a_checkpoint_names_classes_of_diffusers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code_that_is_installed.py").write_text("from diffusers import ZImagePipeline as Own")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(StageConfigError, match=r"_class_name 'code_that_is_installed\.Own' .*trust_remote_code: true"):
        load(tmp_path, "code_that_is_installed.Own")

    assert "code_that_is_installed" not in sys.modules
    trusted = load(tmp_path, "code_that_is_installed.Own", trust_remote_code=True)
    assert trusted.pipeline_class.__name__ == "ZImagePipeline"
    sys.modules.pop("code_that_is_installed")


@pytest.mark.parametrize(
    ("class_name", "words"),
    [
        ("ZImagPipeline", ["diffusers 0.", "'ZImagPipeline'", "did you mean 'ZImagePipeline'", "pipeline_class"]),
        ("AutoencoderKL", ["no pipeline 'AutoencoderKL'"]),
        ("RFD4ProteinaPipeline", ["takes no prompt and makes", "makes images, videos and sound"]),
        ("LLaDA2Pipeline", ["LLaDA2Pipeline makes text"]),
        ("LEditsPPPipelineStableDiffusion", ["needs a call of its `invert` before each of its own"]),
        ("FluxPriorReduxPipeline", ["makes pooled_prompt_embeds, prompt_embeds, which another", "no image"]),
        ("KandinskyPriorPipeline", ["makes image_embeds, negative_image_embeds, which another"]),
        ("KandinskyV22PriorPipeline", ["makes image_embeds, negative_image_embeds"]),
        ("StableCascadePriorPipeline", ["makes image_embeddings, "]),
        (["painting", "MyPipeline"], ["MyPipeline", "painting.py", "trust_remote_code: true"]),
        ("", ["has no _class_name"]),
    ],
)
def test_unsupported_checkpoints_are_refused(tmp_path: Path, class_name: object, words: list[str]) -> None:
    with pytest.raises(StageConfigError) as error:
        load(tmp_path, class_name)
    assert [word for word in [str(tmp_path), *words] if word not in str(error.value)] == []


def test_code_of_the_checkpoint_runs_if_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = "from diffusers import WanPipeline\nclass Own(WanPipeline):\n    pass\n"
    (tmp_path / "painting.py").write_text(code)

    info = load(tmp_path, ["painting", "Own"], trust_remote_code=True)

    assert (info.pipeline_class.__name__, info.output_type) == ("Own", "video")
    with pytest.raises(StageConfigError, match=r"Other cannot be imported from painting\.py"):
        load(tmp_path, ["painting", "Other"], trust_remote_code=True)


def test_a_folder_is_a_diffusers_model_by_its_index(tmp_path: Path, tiny_qwen3: Path) -> None:
    assert is_diffusers_model(write_index(tmp_path, "FluxPipeline"))
    assert not is_diffusers_model(str(tiny_qwen3))
    assert not is_diffusers_model("nobody/has-this")  # tests are offline
    assert not is_diffusers_model("no: name")


def test_a_modular_checkpoint_is_opened_by_its_own_index_unless_it_has_both(tmp_path: Path) -> None:
    (tmp_path / "modular_model_index.json").write_text('{"_class_name": "FluxModularPipeline"}')

    assert is_diffusers_model(str(tmp_path))
    assert load_model_index(str(tmp_path))["_class_name"] == "FluxModularPipeline"
    assert load(tmp_path, "FluxPipeline").pipeline_class.__name__ == "FluxPipeline", "it is both"


@pytest.mark.parametrize(("content", "words"), [(None, "cannot be read"), ("{", "cannot be read"), ("[]", "no class")])
def test_an_invalid_index_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "model_index.json").write_text(content)

    with pytest.raises(StageConfigError, match=words.replace("no class", "has no _class_name")):
        load_model_index(str(tmp_path))


def test_a_name_that_is_not_in_the_cache_is_refused_offline() -> None:
    with pytest.raises(StageConfigError, match=r"nobody/has-this.*model_index\.json cannot be read.*in the cache"):
        load_model_index("nobody/has-this")


def test_recognizing_a_checkpoint_does_not_import_diffusers(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("vllm_omni.diffusion")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(vllm_omni, "diffusion", vllm_omni.diffusion)  # The import changes it.
    monkeypatch.setitem(sys.modules, "diffusers", None)  # An import of it fails.
    module = importlib.import_module("vllm_omni.diffusion.pipeline_info")
    assert module is not pipeline_info and not module.is_diffusers_model(str(tiny_qwen3))
