# SPDX-License-Identifier: Apache-2.0
"""What a stage that speaks gets of a reply, with vLLM's parsers and a real tokenizer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from vllm_omni.inputs import ReplyParsers, SpokenText, StageRequest
from vllm_omni.outputs import Completion, StageOutput, merge_stage_outputs
from vllm_omni.stage.spoken_reply import SpokenReply

CALL = '<tool_call>\n{"name": "dive", "arguments": {"sea": "red"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "dive", "parameters": {"type": "object"}}}]
PROMPT = [7, 8, 9]
HERMES: dict[str, Any] = {"tool_parser": "hermes"}
PYTHONIC: dict[str, Any] = {"tool_parser": "pythonic"}
QWEN3: dict[str, Any] = {"reasoning_parser": "qwen3"}


@pytest.fixture(scope="module")
def tokenizer(tiny_qwen3_omni_moe: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_qwen3_omni_moe)


def pieces_of(token_ids: list[int], size: int) -> list[StageOutput]:
    """As a stage sends them: the row of a token is its position, after those of the prompt, and comes with the next."""
    pieces, num_rows = [], 0
    for start in range(0, len(token_ids), size):
        stop = min(start + size, len(token_ids))
        last = stop == len(token_ids)
        rows = torch.arange(num_rows, len(PROMPT) + stop - 1, dtype=torch.float32)[:, None]
        num_rows += len(rows)
        completion = Completion(token_ids=token_ids[start:stop], finish_reason="stop" if last else None)
        pieces.append(
            StageOutput(request_id="r", stage_id=0, completions=[completion], tensors={"rows": rows}, is_last=last)
        )
    return pieces


def select(tokenizer: Any, model: Path, text: str, size: int, parsers: dict[str, Any], **fields: Any) -> str:
    """The text of what is spoken of a reply; checks that its rows are those of its tokens."""
    end = tokenizer.eos_token_id
    token_ids = [*tokenizer(text, add_special_tokens=False).input_ids, end]
    spoken = SpokenText(
        parsers=ReplyParsers(tokenizer=str(model), **parsers),
        request={"tools": TOOLS, "skip_special_tokens": False, **fields},
        rows="rows",
    )
    reply = SpokenReply(StageRequest(request_id="r", prompt_token_ids=PROMPT, spoken_text=spoken))
    selected = [reply.select(piece) for piece in pieces_of(token_ids, size)]
    num_tokens = num_rows = 0
    for piece in selected:
        num_tokens += len(piece.completions[0].token_ids)
        num_rows += len(piece.tensors["rows"])
        assert num_rows == len(PROMPT) + max(0, num_tokens - 1) or not num_tokens
    whole = merge_stage_outputs(selected)
    kept, rows = whole.completions[0].token_ids, whole.tensors["rows"][:, 0].long().tolist()
    assert rows[: len(PROMPT)] == [0, 1, 2]
    assert [token_ids[row - len(PROMPT)] for row in rows[len(PROMPT) :]] == kept[:-1]
    assert kept[-1] == end and whole.completions[0].finish_reason == "stop" and whole.is_last
    return tokenizer.decode(kept[:-1])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "parsers", "spoken"),
    [
        (
            "The sea is blue, s\u00fc\u00df \U0001f433 and deep.",
            HERMES,
            "The sea is blue, s\u00fc\u00df \U0001f433 and deep.",
        ),
        (CALL, HERMES, ""),
        (f"\n{CALL}", HERMES, ""),
        (f"Let me look.\n{CALL}", HERMES, "Let me look."),
        (f"Let me look.\n{CALL}\n{CALL}", HERMES, "Let me look."),
        ('[dive(sea="red")]', PYTHONIC, ""),
        ("[a picture", PYTHONIC, ""),
        ("A < b, and <b> is bold.", HERMES, "A < b, and <b> is bold."),
        ("<think>\nHm, the sea.\n</think>\n\nIt is blue.", QWEN3, "It is blue."),
        (f"<think>\nHm, the sea.\n</think>\n\nI dive.\n{CALL}", HERMES | QWEN3, "I dive."),
        (f"<think>\nThe sea.\n</think>\n\n{CALL}", HERMES | QWEN3, ""),
        ("<think>\nIt is cut in the middle of", QWEN3, ""),
    ],
)
def test_only_content_is_spoken(
    tokenizer: Any, tiny_qwen3_omni_moe: Path, size: int, text: str, parsers: dict[str, Any], spoken: str
) -> None:
    assert select(tokenizer, tiny_qwen3_omni_moe, text, size, parsers).strip() == spoken


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "dive"}}])
def test_a_forced_call_is_not_spoken(tokenizer: Any, tiny_qwen3_omni_moe: Path, choice: Any) -> None:
    """Some parsers have it written as JSON, others with their markup."""
    arguments = '{"sea": "red"}'
    text = f'[{{"name": "dive", "parameters": {arguments}}}]' if choice == "required" else arguments
    assert select(tokenizer, tiny_qwen3_omni_moe, text, 2, PYTHONIC, tool_choice=choice) == ""
    assert select(tokenizer, tiny_qwen3_omni_moe, CALL, 2, HERMES, tool_choice=choice) == ""


def test_with_no_tool_choice_everything_is_content(tokenizer: Any, tiny_qwen3_omni_moe: Path) -> None:
    assert select(tokenizer, tiny_qwen3_omni_moe, CALL, 2, HERMES, tool_choice="none") == CALL
