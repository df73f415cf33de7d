# SPDX-License-Identifier: Apache-2.0
"""The same questions twice: as bodies of HTTP requests, and as prompts of a pipeline. Greedy, and of fixed length."""

import base64
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np

from serve_parts.http_client import post
from vllm_omni.testing.media import SAMPLE_RATE, make_audio, make_image, make_prompt

KINDS = ("text", "image", "audio")
"""Of questions, in turn. No video: what is sent is compressed, so that the two would not get the same pixels."""

SYSTEM = "You are a helpful voice."  # as `make_prompt` has it
ENDPOINTS = {
    "chat": "/v1/chat/completions",
    "text": "/v1/chat/completions",
    "speech": "/v1/audio/speech",
    "images": "/v1/images/generations",
}


def sampling_params(text_tokens: int, talker_tokens: int) -> list[dict[str, Any] | None]:
    """`sampling_params_list` of Qwen3-Omni: answers are as long as is said here."""
    text = {"temperature": 0.0, "min_tokens": text_tokens, "max_tokens": text_tokens}
    codes = {"temperature": 0.0, "min_tokens": talker_tokens, "max_tokens": talker_tokens, "repetition_penalty": 1.05}
    return [text, {**codes, "detokenize": False}, None]


def make_prompts(checkpoint: Path, count: int) -> list[dict[str, Any]]:
    """For `AsyncOmniLLM`."""
    return [_prompt(checkpoint, seed) for seed in range(count)]


def make_requests(count: int, params: list[dict[str, Any] | None]) -> dict[str, list[bytes]]:
    """For the server: the same questions, by endpoint. Speech: so many different texts."""
    bodies = [_chat_body(seed) for seed in range(count)]
    chat = {"stream": True, "modalities": ["text", "audio"], "sampling_params_list": params}
    text = {"stream": True, "modalities": ["text"], "sampling_params_list": params}
    speech = {"response_format": "pcm", "sampling_params_list": [None, *params[1:]]}
    return {
        "chat": [post(ENDPOINTS["chat"], {**body, **chat}) for body in bodies],
        "text": [post(ENDPOINTS["text"], {**body, **text}) for body in bodies],
        "speech": [post(ENDPOINTS["speech"], {"input": f"The sea is {n} miles wide.", **speech}) for n in range(count)],
    }


def make_image_requests(count: int) -> dict[str, list[bytes]]:
    body = {"size": "32x32", "num_inference_steps": 2, "response_format": "b64_json"}
    bodies = [{**body, "prompt": f"A sea with {seed} islands", "seed": seed} for seed in range(count)]
    return {"images": [post(ENDPOINTS["images"], each) for each in bodies]}


def _kind(seed: int) -> str:
    return KINDS[seed % len(KINDS)]


def _question(seed: int) -> str:
    return f"What is this about, and why are there {seed} of it?"


def _prompt(checkpoint: Path, seed: int) -> dict[str, Any]:
    prompt = make_prompt(checkpoint, _kind(seed), seed, _question(seed))
    if _kind(seed) == "audio":
        prompt["multi_modal_data"] = {"audio": [(_clip(seed) / np.float32(32768), SAMPLE_RATE)]}
    return prompt


def _chat_body(seed: int) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if _kind(seed) == "image":
        content.append({"type": "image_url", "image_url": {"url": _png_uri(seed)}})
    elif _kind(seed) == "audio":
        content.append({"type": "input_audio", "input_audio": {"data": _wav(seed), "format": "wav"}})
    content.append({"type": "text", "text": _question(seed)})
    return {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]}


def _clip(seed: int) -> np.ndarray:
    """int16 `[samples]`: both are to hear the same."""
    return np.rint(make_audio(seed) * 32767).astype("<i2")


def _png_uri(seed: int) -> str:
    buffer = io.BytesIO()
    make_image(seed).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _wav(seed: int) -> str:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(_clip(seed).tobytes())
    return base64.b64encode(buffer.getvalue()).decode()
