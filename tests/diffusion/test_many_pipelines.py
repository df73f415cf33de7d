# SPDX-License-Identifier: Apache-2.0
"""Many of diffusers' pipeline classes in one process: each request makes what bare diffusers makes, alone and among
others. `docs/diffusion.md` lists these classes: `python -m tests.diffusion.test_many_pipelines` prints its tables."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.joyimage.image_processor import BUCKETS
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.diffusion.indexes import make_processor
from tests.diffusion.tiny_calls import make_image
from tests.diffusion.tiny_pipelines import build
from tests.diffusion.watched_engine import WatchedEngine
from tests.executor.test_diffusers_executor import Harness
from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.job import RunningJob
from vllm_omni.diffusion.media_inputs import call_parameters
from vllm_omni.diffusion.pipeline_info import PipelineInfo
from vllm_omni.executor.diffusers_executor import DiffusersPipelineExecutor
from vllm_omni.inputs import StageRequest
from vllm_omni.sampling_params import DiffusionSamplingParams
from vllm_omni.stage.engines.base import NewRequest

DOCUMENT = Path(__file__).parents[2] / "docs" / "diffusion.md"

SMALL = {"height": 64, "width": 64, "num_inference_steps": 2}
WITH_IMAGE = {"image": make_image(0, 64, 64), "num_inference_steps": 3, "strength": 0.7}
CONTROLLED = {**SMALL, "image": make_image(0, 64, 64)}
CALLS: dict[str, dict[str, Any]] = {
    "StableDiffusionPipeline": SMALL,
    "StableDiffusionImg2ImgPipeline": WITH_IMAGE,
    "StableDiffusionInstructPix2PixPipeline": {"image": make_image(0, 64, 64), "num_inference_steps": 2},
    "StableDiffusionControlNetPipeline": CONTROLLED,
    "StableDiffusionAdapterPipeline": CONTROLLED,
    "StableDiffusionPAGPipeline": SMALL,
    "StableDiffusionPAGImg2ImgPipeline": WITH_IMAGE,
    "StableDiffusionControlNetPAGPipeline": CONTROLLED,
    "LatentConsistencyModelPipeline": SMALL,
    "LatentConsistencyModelImg2ImgPipeline": WITH_IMAGE,
    "StableDiffusionXLPipeline": SMALL,
    "StableDiffusionXLImg2ImgPipeline": WITH_IMAGE,
    "StableDiffusionXLInstructPix2PixPipeline": CONTROLLED,
    "StableDiffusionXLControlNetPipeline": CONTROLLED,
    "StableDiffusionXLAdapterPipeline": CONTROLLED,
    "StableDiffusionXLPAGPipeline": SMALL,
    "StableDiffusionXLPAGImg2ImgPipeline": WITH_IMAGE,
    "AnimateDiffPipeline": {**SMALL, "num_frames": 2},
    "PixArtAlphaPipeline": {**SMALL, "use_resolution_binning": False},
    "PixArtSigmaPipeline": {**SMALL, "use_resolution_binning": False},
    "PixArtSigmaPAGPipeline": {**SMALL, "use_resolution_binning": False},
    "LattePipeline": {**SMALL, "video_length": 2},
    "OmniGenPipeline": SMALL,
    "KandinskyV22CombinedPipeline": {**SMALL, "prior_num_inference_steps": 2},
    "KandinskyV22Img2ImgCombinedPipeline": {**SMALL, **WITH_IMAGE, "prior_num_inference_steps": 2},
    "Kandinsky3Pipeline": SMALL,
    "IFPipeline": {**SMALL, "height": 32, "width": 32},
    "PRXPixelPipeline": {**SMALL, "use_resolution_binning": False},
    "BriaPipeline": {**SMALL, "max_sequence_length": 64},
    "Cosmos3OmniPipeline": {
        **{"height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 2},
        **dict.fromkeys(("use_system_prompt", "add_resolution_template", "add_duration_template"), False),
    },
}
"""Class of diffusers -> arguments of its call."""

GREY = Image.fromarray(np.kron(np.eye(2, dtype=np.uint8) * 255, np.ones((32, 32), np.uint8)))
"""A mask: half of it is white."""
MASK = {"image": make_image(0, 64, 64), "mask_image": GREY}
MASK_32 = {"image": make_image(0, 32, 32), "mask_image": GREY.resize((32, 32))}
CONTROL = {"control_image": make_image(1, 64, 64)}
FRAMES = [make_image(seed, 64, 64) for seed in range(5)]
FIRST_AND_LAST = {"image": FRAMES[0], "last_image": FRAMES[1]}
CHANGED = {"num_inference_steps": 3, "strength": 0.7}
BY_SIZE = {**SMALL, **CHANGED}
CONDITIONS = [{"frames": FRAMES[0]}, {"frames": FRAMES[1], "index": -1, "strength": 0.8}]
ROWS = [[FRAMES[0], FRAMES[1]], [FRAMES[2], None]]
TEXTS = {"task_prompt": "the second is the first at night", "content_prompt": "a red cat"}
SMALL_LTX2 = {**SMALL, "num_frames": 9, "stg_scale": 0.0, "audio_stg_scale": 0.0, "max_sequence_length": 64}
MEDIA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "StableDiffusionInpaintPipeline": (MASK, BY_SIZE),
    "StableDiffusionXLInpaintPipeline": (MASK, BY_SIZE),
    "StableDiffusion3InpaintPipeline": (MASK, BY_SIZE),
    "FluxInpaintPipeline": (MASK, BY_SIZE),
    "FluxFillPipeline": (MASK, SMALL),
    "QwenImageInpaintPipeline": (MASK, {**BY_SIZE, "negative_prompt": "dark"}),
    "ZImageInpaintPipeline": (MASK, BY_SIZE),
    "Flux2KleinInpaintPipeline": (MASK, {**BY_SIZE, "max_sequence_length": 64}),
    "StableDiffusionPAGInpaintPipeline": (MASK, BY_SIZE),
    "FluxControlPipeline": (CONTROL, SMALL),
    "FluxControlImg2ImgPipeline": ({"image": FRAMES[0], **CONTROL}, BY_SIZE),
    "FluxControlInpaintPipeline": ({**MASK, **CONTROL}, BY_SIZE),
    "StableDiffusionControlNetImg2ImgPipeline": ({"image": FRAMES[0], **CONTROL}, BY_SIZE),
    "StableDiffusionControlNetInpaintPipeline": ({**MASK, **CONTROL}, {**BY_SIZE, "padding_mask_crop": 8}),
    "StableDiffusionXLControlNetImg2ImgPipeline": ({"image": FRAMES[0], **CONTROL}, BY_SIZE),
    "StableDiffusionXLControlNetInpaintPipeline": ({**MASK, **CONTROL}, BY_SIZE),
    "MultiStableDiffusionControlNetPipeline": ({"image": FRAMES[:2]}, SMALL),
    "MultiStableDiffusionXLControlNetImg2ImgPipeline": ({"image": FRAMES[0], "control_image": FRAMES[1:3]}, BY_SIZE),
    "AnimateDiffVideoToVideoPipeline": ({"video": FRAMES[:2]}, {**BY_SIZE}),
    "CogVideoXVideoToVideoPipeline": ({"video": FRAMES}, {**BY_SIZE, "use_dynamic_cfg": False}),
    "WanVideoToVideoPipeline": ({"video": FRAMES}, BY_SIZE),
    "LucyEditPipeline": ({"video": FRAMES}, {**SMALL, "num_frames": 5}),
    "AnimateDiffControlNetPipeline": ({"conditioning_frames": FRAMES[:2]}, {**SMALL, "num_frames": 2}),
    "WanImageToVideoPipeline": (FIRST_AND_LAST, {**SMALL, "num_frames": 5}),
    "WanVACEPipeline": ({"video": FRAMES, "mask": [GREY] * 5}, {**SMALL, "num_frames": 5}),
    "LTX2ConditionPipeline": ({"conditions": CONDITIONS}, SMALL_LTX2),
    "IFInpaintingPipeline": (MASK_32, CHANGED),
    "StableVideoDiffusionPipeline": ({"image": FRAMES[0]}, {**SMALL, "num_frames": 2, "decode_chunk_size": 2}),
    "StableDiffusionImageVariationPipeline": ({"image": FRAMES[0]}, SMALL),
    "MarigoldDepthPipeline": ({"image": FRAMES[0]}, {"num_inference_steps": 2, "processing_resolution": 64}),
    "MarigoldIntrinsicsPipeline": ({"image": FRAMES[0]}, {"num_inference_steps": 2, "processing_resolution": 64}),
    "JoyImageEditPlusPipeline": (
        {"images": [make_image(seed, 32, 32) for seed in range(2)]},
        {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 64},
    ),
    "VisualClozePipeline": (
        {"image": ROWS},
        {"num_inference_steps": 2, "upsampling_height": 64, "upsampling_width": 64, "max_sequence_length": 64, **TEXTS},
    ),
}
"""Class of diffusers, `Multi` before it: with two ControlNets -> media, and other arguments, of its call."""

ALONE = {
    **dict.fromkeys([name for name in CALLS if "PAG" in name], "unet"),
    "PixArtSigmaPAGPipeline": "transformer",
    "OmniGenPipeline": "transformer",
}
"""Those with a network that mixes requests, or that the pipeline changes: it gets one request at a time."""
BY_LENGTH = ("Cosmos3OmniPipeline",)
"""Those whose network computes prompts of one length together."""

PROMPTS = ("a red cat", "two ships at night, " * 2, "it")


@pytest.fixture(autouse=True)
def in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job that has waited longest is next. By slowdowns it would depend on measured times which calls meet."""

    def order(executor: Any, running: list[RunningJob]) -> list[RunningJob]:
        return sorted(running, key=lambda job: sys.maxsize if job.has_started else job.num_calls)

    monkeypatch.setattr(DiffusersPipelineExecutor, "_order", order)


class Bare:
    """Diffusers alone."""

    def __init__(self, name: str, path: Path) -> None:
        self.pipe = getattr(diffusers, name).from_pretrained(path, dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)

    def __call__(self, prompt: str, seed: int, call: dict[str, Any]) -> np.ndarray:
        generator = torch.Generator().manual_seed(seed)
        prompts = {"prompt": prompt} if prompt else {}
        output_type = "pil" if "padding_mask_crop" in call else "np"
        made = self.pipe(**prompts, generator=generator, **call, output_type=output_type)[0]
        has_batch = len(made) == 1  # Cosmos 3 returns the frames of one video, Marigold's intrinsics several pictures.
        made = made[0] if has_batch else made
        return np.asarray(made) if output_type == "np" else np.asarray(made, np.float32) / 255


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_alone_and_among_others_a_request_equals_diffusers(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    bare, call = Bare(name, tmp_path), CALLS[name]
    expected = [bare(prompt, seed, call) for seed, prompt in enumerate(PROMPTS)]
    assert np.abs(expected[0] - bare(PROMPTS[1], 0, call)).max() > 1e-3, "the output depends on the prompt"
    assert PipelineInfo.load(str(tmp_path), DiTConfig()).output_type == ("image" if expected[0].ndim == 3 else "video")

    harness = Harness(tmp_path, max_batch_size=len(PROMPTS))
    for number in (1, len(PROMPTS)):
        for seed, prompt in enumerate(PROMPTS[:number]):
            harness.add_job(prompt, {"prompt": prompt, **call}, seed)
        harness.run()
        for prompt, one in zip(PROMPTS[:number], expected, strict=False):
            end = harness.ends[prompt]
            assert end.error is None, end.traceback
            np.testing.assert_allclose(end.output.numpy(), one, rtol=0, atol=1e-4, err_msg=prompt)
    alone = ALONE.get(name)
    assert harness.executor.unbatched == ([] if alone is None else [alone])
    if name in BY_LENGTH:
        assert max(harness.batches) > 1, "the calls for the empty negative prompts"
    else:
        assert max(harness.batches) == (1 if "PAG" in name else len(PROMPTS))


def as_diffusers_has_it(name: str, media: dict[str, Any]) -> dict[str, Any]:
    """The media of a bare call: our plain dicts are its dataclasses."""
    if name != "LTX2ConditionPipeline":
        return media
    return {"conditions": [LTX2VideoCondition(**fields) for fields in media["conditions"]]}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEDIA)
def test_media_give_what_they_give_in_diffusers(
    name: str, tmp_path: Path, tiny_diffusion: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUCKETS, 1024, [(32, 32)])  # JoyImage Edit scales its inputs to a million pixels.
    build(name, tiny_diffusion).save_pretrained(tmp_path)
    media, settings = MEDIA[name]
    bare = Bare(name.removeprefix("Multi"), tmp_path)
    takes_prompt = "prompt" in call_parameters(type(bare.pipe))
    prompts = PROMPTS if takes_prompt else ("",) * len(PROMPTS)
    call = {**settings, **as_diffusers_has_it(name, media)}
    expected = [bare(prompt, seed, call) for seed, prompt in enumerate(prompts)]
    made_type = PipelineInfo.load(str(tmp_path), DiTConfig()).output_type
    assert expected[0].std() > 0.01 and np.abs(expected[0] - expected[1]).max() > 1e-3

    processor = make_processor(tmp_path, None, makes=made_type)
    extra = {key: value for key, value in settings.items() if key not in DiffusionSamplingParams.__struct_fields__}
    own = {key: value for key, value in settings.items() if key not in extra}
    requests = {}
    for seed, prompt in enumerate(prompts):
        given = {"multi_modal_data": media, **({"prompt": prompt} if takes_prompt else {})}
        diffusion = processor.process(given, {**own, "extra_args": extra, "seed": seed, "output_format": "np"})
        request = StageRequest(request_id=str(seed), prompt=prompt or None, diffusion=diffusion)
        sent = MsgpackDecoder(StageRequest).decode(MsgpackEncoder().encode(request))  # as another process gets it
        requests[str(seed)] = NewRequest(sent)

    watched = WatchedEngine(tmp_path, max_batch_size=len(PROMPTS))
    for group in (["0"], list(requests)):
        batches = watched.run_to_the_end(*(requests[request_id] for request_id in group))
        for request_id in group:
            made = watched.tensors(request_id)[made_type].numpy()
            made = made[0] if len(made) == 1 else made  # Marigold's intrinsics are several pictures.
            step = 1 / 255 if "padding_mask_crop" in settings else 0  # It is put back into the image as bytes.
            np.testing.assert_allclose(made, expected[int(request_id)], rtol=0, atol=step + 1e-4, err_msg=request_id)
    assert max(batches) == (1 if "PAG" in name else len(PROMPTS))


def table() -> str:
    """Of the classes in `CALLS`, in the format of the document."""
    apart = {"all": "together", "length": "together, if their prompts have one length"}
    apart |= {"network": "one request at a time in one network", "job": "one request at a time"}
    kinds = {name: "job" if "PAG" in name else "network" if name in ALONE else "all" for name in CALLS}
    kinds |= dict.fromkeys(BY_LENGTH, "length")
    listed = {kind: ", ".join(f"`{name}`" for name in CALLS if kinds[name] == kind) for kind in apart}
    rows = [f"| {words} | {listed[kind]} |" for kind, words in apart.items()]
    return "\n".join(["| requests are computed | diffusers' pipelines |", "|---|---|", *rows])


def table_of_media() -> str:
    """Of the classes in `MEDIA`, in the format of the document."""
    by_media: dict[str, list[str]] = {}
    for name, (media, _) in MEDIA.items():
        words = f"`{name.removeprefix('Multi')}`{' with several ControlNets' if name.startswith('Multi') else ''}"
        by_media.setdefault(", ".join(f"`{each}`" for each in media), []).append(words)
    rows = [f"| {media} | {', '.join(names)} |" for media, names in by_media.items()]
    return "\n".join(["| `multi_modal_data` | diffusers' pipelines |", "|---|---|", *rows])


def test_the_document_lists_these_classes() -> None:
    text = DOCUMENT.read_text()
    assert f"\n\n{table()}\n\n" in text and f"\n\n{table_of_media()}\n\n" in text


if __name__ == "__main__":
    print(table(), table_of_media(), sep="\n\n")
