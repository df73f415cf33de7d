# SPDX-License-Identifier: Apache-2.0
"""The tokens of images and videos by their size alone. Needs no engine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vllm_omni.engine.engine_args import create_engine_args
from vllm_omni.engine.input_processor import OmniInputProcessor
from vllm_omni.engine.media_tokens import MediaTokens


@pytest.fixture(scope="module", params=["tiny_qwen3_omni_moe", "tiny_qwen2_5_omni"])
def processor(request: pytest.FixtureRequest) -> Any:
    model: Path = request.getfixturevalue(request.param)
    family = {"tiny_qwen3_omni_moe": "Qwen3OmniMoe", "tiny_qwen2_5_omni": "Qwen2_5Omni"}[request.param]
    # As a pipeline has it. vLLM's own class would be inspected in a process that imports vLLM again.
    arguments = create_engine_args(str(model), model_arch=f"{family}ThinkerForConditionalGeneration", dtype="float32")
    return OmniInputProcessor(arguments.create_engine_config())


@pytest.mark.parametrize(
    ("kind", "num_frames", "height", "width"),
    [("image", 1, 60, 80), ("image", 1, 700, 300), ("video", 4, 64, 64), ("video", 9, 360, 640)],
)
def test_tokens_are_those_that_the_processor_makes(
    processor: OmniInputProcessor, kind: str, num_frames: int, height: int, width: int
) -> None:
    mm_processor: Any = processor.renderer.mm_processor
    text = mm_processor.dummy_inputs.get_dummy_text({kind: 1})
    pixels = np.zeros((num_frames, height, width, 3), np.uint8)
    metadata = {
        "total_num_frames": num_frames, "fps": 2.0, "duration": num_frames / 2, "video_backend": "opencv",
        "frames_indices": list(range(num_frames)), "do_sample_frames": False,
    }  # fmt: skip
    media = Image.fromarray(pixels[0]) if kind == "image" else (pixels, metadata)
    request: Any = processor._render({"prompt": text, "multi_modal_data": {kind: media}}, None)
    counted = MediaTokens(mm_processor, 1000).count(kind, num_frames, height, width)  # type: ignore[arg-type]
    assert counted == len(request["prompt_token_ids"]) > 1


def test_a_size_that_the_processor_refuses_has_no_tokens(processor: OmniInputProcessor) -> None:
    tokens = MediaTokens(processor.renderer.mm_processor, 1000)  # type: ignore[arg-type]
    assert tokens.count("image", 1, 1, 5000) == 0
    assert tokens.count("image", 1, 64, 64) > 0
