# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the server in requests to an image model."""

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from fastapi import FastAPI
from PIL import Image

from tests.entrypoints.openai.media_apps import MODEL, png, send, use, with_flags
from vllm_omni import OmniLLM
from vllm_omni.errors import StageConfigError, StageStartError
from vllm_omni.testing.tiny.diffusion_lora import write_tiny_diffusion_lora

GROUP = "llm"
pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"num_inference_steps": 2, "seed": 1, "height": 32, "width": 32}


@pytest.fixture(scope="module")
def ink(tiny_diffusion: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_diffusion_lora(tiny_diffusion("z_image"), tmp_path_factory.mktemp("ink"), seed=0)


@pytest.fixture(scope="module")
def app(image_app: FastAPI, ink: Path) -> FastAPI:
    return with_flags(image_app, "--lora-modules", f"ink={ink}", f"pen={ink.parent}")


def pixels(b64: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64)))).astype(float)


def generate(app: FastAPI, **fields: Any) -> np.ndarray:
    answer = send(app, "POST", "/v1/images/generations", json={"prompt": "a hen", **SMALL, **fields})
    assert answer.status_code == 200, answer.text
    return pixels(answer.json()["data"][0]["b64_json"])


def chat(app: FastAPI, **fields: Any) -> np.ndarray:
    messages = [{"role": "user", "content": "a hen"}]
    answer = send(app, "POST", "/v1/chat/completions", json={"messages": messages, **SMALL, **fields})
    assert answer.status_code == 200, answer.text
    (part,) = answer.json()["choices"][0]["message"]["images"]
    return pixels(part["image_url"]["url"].partition(",")[2])


def test_an_adapter_is_named_by_model_or_by_lora(app: FastAPI) -> None:
    plain, adapted = generate(app), generate(app, model="ink")

    assert np.abs(plain - adapted).max() > 10
    for way in (
        {"lora": "ink"},
        {"extra_body": {"lora": "ink"}},
        {"model": MODEL, "lora": "ink"},
        {"model": "ink", "lora": "ink", "lora_scale": 1.0},
        {"lora": "pen"},  # the same file
    ):
        np.testing.assert_array_equal(generate(app, **way), adapted)
        np.testing.assert_array_equal(chat(app, **way), adapted)
    weak = generate(app, extra_body={"lora": "ink", "lora_scale": 0.3})
    assert np.abs(weak - adapted).max() > 1 and np.abs(weak - plain).max() > 1
    np.testing.assert_array_equal(chat(app, model="ink", lora_scale=0.3), weak)
    np.testing.assert_array_equal(generate(app, model=MODEL), plain)


def test_an_edit_is_made_with_an_adapter(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> list[np.ndarray]:
        answers = [
            await client.images.edit(model=model, image=png(), prompt="at night", size="32x32", extra_body=SMALL)
            for model in (MODEL, "ink")
        ]
        return [pixels(answer.data[0].b64_json) for answer in answers]

    plain, adapted = use(app, main)
    assert np.abs(plain - adapted).max() > 1


def test_adapters_are_listed(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> list[tuple[str, Any]]:
        return [(model.id, model.parent) async for model in client.models.list()]  # type: ignore[attr-defined]

    assert use(app, main) == [(MODEL, None), ("ink", MODEL), ("pen", MODEL)]


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"model": "oil"}, 404, "`oil` does not exist; this server has tiny, ink, pen"),
        ({"lora": "inc"}, 400, "no adapter 'inc'; did you mean 'ink'? (this server has ink, pen)"),
        ({"lora": "{path}"}, 400, "no adapter"),
        ({"model": "{path}"}, 404, "does not exist"),
        ({"lora": "pen", "model": "ink"}, 400, "two adapters, pen and ink"),
        ({"lora_scale": 0.5}, 400, "lora_scale is for an adapter"),
        ({"lora": "ink", "lora_scale": 1e9}, 400, "lora_scale"),
        ({"extra_body": {"lora": 1}}, 400, "lora must be the name of an adapter"),
        ({"extra_body": {"lora_path": "x"}}, 400, "extra_body has no 'lora_path'"),
    ],
)
def test_only_registered_adapters_can_be_named(
    app: FastAPI, ink: Path, path: str, fields: dict[str, Any], status: int, words: str
) -> None:
    fields = {name: str(ink) if value == "{path}" else value for name, value in fields.items()}
    question = {"prompt": "a hen"} if "images" in path else {"messages": [{"role": "user", "content": "a hen"}]}

    answer = send(app, "POST", path, json={**question, **fields})

    assert answer.status_code == status and words in answer.json()["error"]["message"], answer.text


def test_two_adapters_of_one_name_are_refused(image_app: FastAPI, ink: Path) -> None:
    for name in ("ink", MODEL):
        with pytest.raises(StageConfigError, match=f"the name '{name}' is taken"):
            with_flags(image_app, "--lora-modules", f"ink={ink}", f"{name}={ink}")


def test_an_incompatible_adapter_fails_the_start(tiny_diffusion: Callable[[str], Path], tmp_path: Path) -> None:
    other = write_tiny_diffusion_lora(tiny_diffusion("flux"), tmp_path)

    with pytest.raises(StageStartError, match=r"LoRA adapter 'ink' .* is made for another model"):
        OmniLLM(str(tiny_diffusion("z_image")), lora_modules={"ink": str(other)})
