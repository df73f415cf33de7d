# SPDX-License-Identifier: Apache-2.0
"""A model that samples an image's tokens with guidance, and paints them: offline, streamed, aborted, and over HTTP."""

import asyncio
import base64
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image

from tests.entrypoints.conftest import as_async, start
from tests.entrypoints.openai.media_apps import send, server_args
from vllm_omni import OmniLLM
from vllm_omni.entrypoints.openai.api_server import build_omni_app
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.media_input import install
from vllm_omni.errors import InvalidRequestError
from vllm_omni.testing.oracles.janus import JanusReference

pytestmark = pytest.mark.slow
GREEDY = {"default_sampling_params": {"temperature": 0.0, "max_tokens": 512, "ignore_eos": True, "detokenize": False}}
PROMPTS = [f"{color} {thing} by the sea" for color in ("a red", "a blue") for thing in ("cat", "dog", "house", "tree")]


@pytest.fixture(scope="module")
def checkpoint(tiny_diffusion: Callable[[str], Path]) -> Path:
    return tiny_diffusion("janus")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[OmniLLM]:
    with start(checkpoint, max_model_len=512, stage_overrides={"language_model": GREEDY}) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[tuple[str, float], np.ndarray]:
    reference = JanusReference(checkpoint)
    cases = [(prompt, scale) for prompt in PROMPTS for scale in (5.0, 2.0)]
    return {case: reference.paint(reference.image_tokens(*case)).numpy() for case in cases}


@pytest.fixture(scope="module")
def app(llm: OmniLLM, checkpoint: Path) -> FastAPI:
    args = server_args(checkpoint)
    install(args)
    return asyncio.run(build_omni_app(OmniEngineClient(as_async(llm)), args))


def generate(llm: OmniLLM, prompt: str, **fields: Any) -> Any:
    (output,) = llm.generate({"prompt": prompt, "additional_information": fields}, use_tqdm=False)
    return output


def test_requests_at_once(llm: OmniLLM, expected: dict[tuple[str, float], np.ndarray]) -> None:
    with ThreadPoolExecutor(len(expected)) as threads:
        outputs = list(threads.map(lambda case: generate(llm, case[0], guidance_scale=case[1]), expected))
    for output, pixels in zip(outputs, expected.values(), strict=True):
        (image,) = output.images
        np.testing.assert_allclose(image, pixels, rtol=0, atol=1e-4)
        metrics = output.stage_metrics[0]
        # One sequence for the caller: its own prompt, and one token for each part of the image.
        assert metrics.num_output_tokens == 16 and metrics.num_input_tokens < 20


def test_a_client_may_leave(llm: OmniLLM, expected: dict[tuple[str, float], np.ndarray]) -> None:
    stream = llm.generate([{"prompt": prompt} for prompt in PROMPTS], stream=True, use_tqdm=False)
    next(iter(stream))
    stream.close()
    test_requests_at_once(llm, expected)


def test_wrong_requests_are_refused_by_name(llm: OmniLLM) -> None:
    with pytest.raises(InvalidRequestError, match="width 100: this model makes images of 16 x 16 pixels only"):
        generate(llm, "a cat", width=100)
    with pytest.raises(InvalidRequestError, match="negative_prompt"):
        llm.generate({"prompt": "a cat", "negative_prompt": "grey"})


def test_over_http(app: FastAPI, expected: dict[tuple[str, float], np.ndarray]) -> None:
    def ask(**fields: Any) -> Any:
        return send(app, "POST", "/v1/images/generations", json={"prompt": PROMPTS[0], **fields})

    for fields, scale in (({"n": 1, "size": "16x16"}, 5.0), ({"guidance_scale": 2.0, "output_format": "webp"}, 2.0)):
        answer = ask(**fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["size"] == "16x16" and answer.json()["usage"]["output_tokens"] == 16
        with Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))) as image:
            if scale == 5.0:
                assert np.abs(np.asarray(image) / 255 - expected[PROMPTS[0], scale]).max() < 0.6 / 255
            assert image.format == ("PNG" if scale == 5.0 else "WEBP")
    for fields, message in (
        ({"size": "1024x1024"}, "height 1024: this model makes images of 16 x 16 pixels only"),
        ({"n": 2}, "this model's images have no num_outputs_per_prompt; they have guidance_scale, height, seed, width"),
        ({"negative_prompt": "grey"}, "negative_prompt"),
    ):
        refused = ask(**fields)
        assert refused.status_code == 400 and message in refused.text, refused.text
