# SPDX-License-Identifier: Apache-2.0
"""A process has one copy of a model's tokenizer, which threads use in turn."""

import copy
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from vllm_omni.engine.engine_args import create_config_for_inputs, create_engine_args
from vllm_omni.engine.input_processor import OmniInputProcessor
from vllm_omni.engine.shared_tokenizer import share_tokenizer

TEXT = "the red circle"


def make_processor(checkpoint: Path) -> OmniInputProcessor:
    return OmniInputProcessor(create_config_for_inputs(create_engine_args(str(checkpoint))))


def test_a_renderer_makes_no_copy_of_its_tokenizer(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deepcopy, copied = copy.deepcopy, []

    def watch(value: Any, *args: Any) -> Any:
        if isinstance(value, PreTrainedTokenizerBase):
            copied.append(value)
        return deepcopy(value, *args)

    monkeypatch.setattr(copy, "deepcopy", watch)
    tokenizers: list[Any] = [make_processor(tiny_qwen3).renderer.get_tokenizer() for _ in range(2)]
    assert tokenizers[0].decode(tokenizers[1].encode(TEXT)) == TEXT
    assert not copied
    assert tokenizers[0].backend_tokenizer is tokenizers[1].backend_tokenizer


def test_threads_take_turns(tiny_qwen3: Path) -> None:
    tokenizer: Any = make_processor(tiny_qwen3).renderer.get_tokenizer()
    expected, is_in_use, may_end, done = tokenizer.encode(TEXT), threading.Event(), threading.Event(), []

    def hold() -> str:
        is_in_use.set()
        may_end.wait(60)
        return str(tokenizer.decode(expected))  # The thread that has it may use it further.

    def render() -> None:
        chat = [{"role": "user", "content": ""}]
        done.append(tokenizer.apply_chat_template(chat, chat_template="{{ hold() }}", tokenize=False, hold=hold))

    def encode() -> None:
        done.append(tokenizer.encode(TEXT))

    threads = [threading.Thread(target=render), threading.Thread(target=encode)]
    threads[0].start()
    is_in_use.wait(60)
    threads[1].start()
    threads[1].join(0.1)
    assert not done
    may_end.set()
    for thread in threads:
        thread.join()
    assert done == [TEXT, expected]
    assert copy.deepcopy(tokenizer).encode(TEXT) == expected


def test_a_stage_without_a_tokenizer_has_nothing_to_share() -> None:
    share_tokenizer(SimpleNamespace(skip_tokenizer_init=True))  # type: ignore[arg-type]
