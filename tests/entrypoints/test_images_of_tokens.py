# SPDX-License-Identifier: Apache-2.0
"""A model that makes an image's tokens before the image: offline, streamed, aborted, and over HTTP."""

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
from tests.model_executor.models.glm_image.cases import CASES
from vllm_omni import ImageProgressEvent, OmniLLM
from vllm_omni.entrypoints.openai.api_server import build_omni_app
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.media_input import install
from vllm_omni.errors import InvalidRequestError
from vllm_omni.events import CompletedEvent
from vllm_omni.testing.oracles.glm_image import GlmImageReference

pytestmark = pytest.mark.slow
STEPS = 2
GREEDY = {"default_sampling_params": {"temperature": 0.0}}
SEEDS = {name: seed for seed, name in enumerate(CASES)}
SAMPLED = {"temperature": 1.0}


@pytest.fixture(scope="module")
def checkpoint(tiny_diffusion: Callable[[str], Path]) -> Path:
    return tiny_diffusion("glm_image")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[OmniLLM]:
    with start(checkpoint, max_model_len=1024, stage_overrides={"prior": GREEDY}) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, np.ndarray]:
    reference = GlmImageReference(checkpoint)
    return {
        name: reference.generate(
            case.prompt,
            seed=SEEDS[name],
            images=case.images,
            height=case.height,
            width=case.width,
            num_inference_steps=STEPS,
        ).numpy()
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def app(llm: OmniLLM, checkpoint: Path) -> FastAPI:
    args = server_args(checkpoint)
    install(args)
    return asyncio.run(build_omni_app(OmniEngineClient(as_async(llm)), args))


def settings(name: str, **others: Any) -> dict[str, Any]:
    case = CASES[name]
    size = {"height": case.height, "width": case.width, "num_inference_steps": STEPS}
    return {**size, "seed": SEEDS[name], "output_format": "np", **others}


def generate(llm: OmniLLM, name: str, prior: dict[str, Any] | None = None, **others: Any) -> list[Any]:
    prompt: Any = CASES[name].omni_prompt
    (output,) = llm.generate(prompt, [prior, settings(name, **others)], use_tqdm=False)
    return output.images


def check(image: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(image, expected, rtol=0, atol=1e-4)


def test_requests_of_every_kind_at_once(llm: OmniLLM, expected: dict[str, np.ndarray]) -> None:
    with ThreadPoolExecutor(len(CASES)) as threads:
        made = dict(zip(CASES, threads.map(lambda name: generate(llm, name), CASES), strict=True))
    for name, (image,) in made.items():
        check(image, expected[name])


def test_several_images_have_the_same_tokens(llm: OmniLLM, expected: dict[str, np.ndarray]) -> None:
    first, second = generate(llm, "one image", num_outputs_per_prompt=2)
    check(first, expected["one image"])
    assert np.abs(second - first).mean() > 0.01


def test_the_seed_is_that_of_the_tokens_too(llm: OmniLLM) -> None:
    (one,), (again,), (other,) = (generate(llm, "text", SAMPLED, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_allclose(again, one, rtol=0, atol=1e-4)
    assert np.abs(other - one).mean() > 0.01
    (own,), (same,) = (generate(llm, "text", {**SAMPLED, "seed": 5}, seed=seed) for seed in (3, 3))
    np.testing.assert_allclose(same, own, rtol=0, atol=1e-4)
    assert np.abs(own - one).mean() > 0.001, "the stage's own seed wins"


def test_a_streaming_client_gets_the_steps_and_may_leave(llm: OmniLLM, expected: dict[str, np.ndarray]) -> None:
    prompt: Any = CASES["wide"].omni_prompt
    *events, last = llm.generate(prompt, [None, settings("wide")], stream=True, use_tqdm=False)
    steps = [(event.step, event.num_steps) for event in events if isinstance(event, ImageProgressEvent)]
    assert steps == [(step, STEPS) for step in range(STEPS)]
    assert isinstance(last, CompletedEvent)
    check(last.outputs[0].images[0], expected["wide"])
    for event in llm.generate([prompt] * 3, [None, settings("wide", num_inference_steps=50)], stream=True):
        if isinstance(event, ImageProgressEvent):
            break  # aborts all three
    test_requests_of_every_kind_at_once(llm, expected)


def test_wrong_requests_are_refused_by_name(llm: OmniLLM) -> None:
    for changes, message in (
        ({"height": 72}, "height 72: this model makes multiples of 32"),
        ({"negative_prompt": "grey"}, "GlmImagePipeline does not take 'negative_prompt'"),
        ({"height": 4096, "width": 4096}, "max_pixels"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            generate(llm, "text", **changes)
    with pytest.raises(InvalidRequestError, match="reads no 'speaker' of additional_information"):
        llm.generate({"prompt": "a cat", "additional_information": {"speaker": "ada"}})


def over_http(app: FastAPI, path: str, name: str, **fields: Any) -> Any:
    case = CASES[name]
    body = {"prompt": case.prompt, "size": f"{case.width}x{case.height}", "seed": SEEDS[name]}
    return send(app, "POST", path, json={**body, "num_inference_steps": STEPS, **fields})


def check_file(answer: Any, expected: np.ndarray) -> None:
    assert answer.status_code == 200, answer.text
    with Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))) as image:
        assert np.abs(np.asarray(image) / 255 - expected).max() < 0.6 / 255


def test_over_http(app: FastAPI, expected: dict[str, np.ndarray]) -> None:
    check_file(over_http(app, "/v1/images/generations", "glyphs"), expected["glyphs"])
    urls = []
    for image in CASES["several images"].images:
        file = io.BytesIO()
        image.save(file, "PNG")
        urls.append(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
    check_file(over_http(app, "/v1/images/edits", "several images", image=urls), expected["several images"])
    refused = over_http(app, "/v1/images/generations", "text", size="100x64")
    assert refused.status_code == 400 and "width 100" in refused.text
