# SPDX-License-Identifier: Apache-2.0
"""Chat answers whose text is not all for the ear: tool calls and reasoning are neither spoken nor in the transcript."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.entrypoints.int16_sound import assert_sounds_like
from tests.entrypoints.openai.media_apps import MODEL, app_that_writes, use
from vllm_omni import AsyncOmniLLM

GROUP = "llm"
CALL = '<tool_call>\n{"name": "dive", "arguments": {"sea": "red"}}\n</tool_call>'
TEXT = "Let me look."
TOOL: Any = {"type": "function", "function": {"name": "dive", "parameters": {"type": "object"}}}
BOTH = ["text", "audio"]
QUESTION: Any = {"role": "user", "content": "Is the sea red?"}


def ask(app: FastAPI, *, stream: bool, messages: tuple[Any, ...] = (QUESTION,), **fields: Any) -> dict[str, Any]:
    """The first choice, of a stream joined as clients do."""
    request: dict[str, Any] = {
        "model": MODEL, "messages": list(messages), "audio": {"format": "pcm16", "voice": "alloy"}, "max_tokens": 200,
        "modalities": ["text", "audio"], "stream": stream, **fields,
    }  # fmt: skip

    async def main(client: Any) -> Any:
        answer = await client.chat.completions.create(**request)
        return [chunk async for chunk in answer] if stream else answer

    answer = use(app, main)
    if not stream:
        choice = answer.choices[0].model_dump()
        message = choice["message"]
        if message["audio"]:
            message["audio"]["data"] = base64.b64decode(message["audio"]["data"])
        calls = [call["function"] for call in message["tool_calls"] or ()]
        return {**message, "tool_calls": calls, "finish_reason": choice["finish_reason"]}
    joined: dict[str, Any] = {"content": None, "audio": None, "tool_calls": [], "reasoning": None}
    for chunk in answer:
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            for name in ("content", "reasoning"):
                if delta.get(name):
                    joined[name] = (joined[name] or "") + delta[name]
            if audio := delta.get("audio"):
                joined["audio"] = joined["audio"] or {"data": b"", "transcript": ""}
                joined["audio"]["data"] += base64.b64decode(audio.get("data") or "")
                joined["audio"]["transcript"] += audio.get("transcript") or ""
                joined["audio"] |= {"id": audio["id"]} if audio.get("id") else {}
            for call in delta["tool_calls"] or ():
                if call["index"] == len(joined["tool_calls"]):
                    joined["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                joined["tool_calls"][-1]["arguments"] += call["function"]["arguments"] or ""
            joined["finish_reason"] = choice.finish_reason
    return joined


@pytest.fixture(scope="module")
def speech(realtime_llm: AsyncOmniLLM, realtime_app: FastAPI, tiny_qwen3_omni_moe: Path) -> bytes:
    """Of `TEXT` alone."""
    answer = ask(app_that_writes(realtime_llm, tiny_qwen3_omni_moe, TEXT), stream=False, tools=[TOOL])
    assert answer["content"] == answer["audio"]["transcript"] == TEXT and answer["finish_reason"] in ("stop", "length")
    return answer["audio"]["data"]


@pytest.mark.parametrize(("stream", "modalities"), [(False, ["audio"]), (True, BOTH), (True, ["audio"])])
def test_a_call_is_not_spoken(
    realtime_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Path, stream: bool, modalities: list[str]
) -> None:
    app = app_that_writes(realtime_llm, tiny_qwen3_omni_moe, CALL)
    answer = ask(app, stream=stream, modalities=modalities, tools=[TOOL])
    assert answer["audio"] is None and not answer["content"]
    (call,) = answer["tool_calls"]
    assert call["name"] == "dive" and json.loads(call["arguments"]) == {"sea": "red"}
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("stream", "modalities"), [(False, BOTH), (True, ["audio"])])
def test_text_before_a_call_is_spoken(
    realtime_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Path, speech: bytes, stream: bool, modalities: list[str]
) -> None:
    app = app_that_writes(realtime_llm, tiny_qwen3_omni_moe, f"{TEXT}\n{CALL}")
    answer = ask(app, stream=stream, modalities=modalities, tools=[TOOL])
    assert answer["audio"]["transcript"].strip() == TEXT
    assert_sounds_like(answer["audio"]["data"], speech)
    assert answer["finish_reason"] == "tool_calls" and len(answer["tool_calls"]) == 1
    assert (answer["content"] or "").strip() == (TEXT if "text" in modalities else "")
    # In the next turn, that is what the assistant has said.
    kept = app.state.openai_serving_chat.transcripts.fill_in([{"audio": {"id": answer["audio"]["id"]}}], b"")
    assert kept[0]["content"].strip() == TEXT


@pytest.mark.parametrize(("stream", "modalities"), [(False, ["audio"]), (True, BOTH)])
def test_reasoning_is_not_spoken(
    realtime_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Path, speech: bytes, stream: bool, modalities: list[str]
) -> None:
    text = f"<think>\nIt may be.\n</think>\n\n{TEXT}"
    app = app_that_writes(realtime_llm, tiny_qwen3_omni_moe, text, "--reasoning-parser=qwen3")
    answer = ask(app, stream=stream, modalities=modalities)
    assert answer["audio"]["transcript"].strip() == TEXT and answer["finish_reason"] in ("stop", "length")
    assert answer["audio"]["data"]
    shown = "text" in modalities
    assert (answer.get("reasoning") or "").strip() == ("It may be." if shown else "")
    assert (answer["content"] or "").strip() == (TEXT if shown else "")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_is_not_in_the_transcript(
    realtime_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Path, speech: bytes, stream: bool
) -> None:
    app = app_that_writes(realtime_llm, tiny_qwen3_omni_moe, f"{TEXT}\n{CALL}")
    answer = ask(app, stream=stream, tools=[TOOL], max_tokens=40)
    assert answer["audio"]["transcript"].strip() == TEXT
    assert_sounds_like(answer["audio"]["data"], speech)
    assert answer["finish_reason"] == "length"
