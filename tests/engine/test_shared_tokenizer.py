# SPDX-License-Identifier: Apache-2.0
"""A process has one copy of a model's tokenizer, which threads use in turn."""

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from vllm_omni.engine.engine_args import create_config_for_inputs, create_engine_args
from vllm_omni.engine.input_processor import OmniInputProcessor, share_tokenizer

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


class Gate:
    """What a thread enters, and waits in for another one."""

    def __init__(self) -> None:
        self.is_in, self.may_leave = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.is_in.set()
        self.may_leave.wait(60)
        return TEXT


class HeldIds(Gate):
    """Token ids that cannot be read before the gate opens."""

    def __iter__(self) -> Iterator[int]:
        self()
        return iter(())


def test_threads_take_turns(tiny_qwen3: Path) -> None:
    tokenizer: Any = make_processor(tiny_qwen3).renderer.get_tokenizer()
    expected, ids, done = tokenizer.encode(TEXT), HeldIds(), []
    threads = [
        threading.Thread(target=lambda: done.append(tokenizer.convert_ids_to_tokens(ids))),
        threading.Thread(target=lambda: done.append(tokenizer.encode(TEXT))),
    ]
    threads[0].start()
    ids.is_in.wait(60)
    threads[1].start()
    threads[1].join(0.1)
    assert not done
    ids.may_leave.set()
    for thread in threads:
        thread.join()
    assert done == [[], expected]
    assert copy.deepcopy(tokenizer).encode(TEXT) == expected


def test_no_thread_waits_for_a_template(tiny_qwen3: Path) -> None:
    tokenizer: Any = make_processor(tiny_qwen3).renderer.get_tokenizer()
    gate, rendered = Gate(), []

    def render() -> None:
        chat = [{"role": "user", "content": ""}]
        rendered.append(tokenizer.apply_chat_template(chat, chat_template="{{ gate() }}", tokenize=False, gate=gate))

    thread = threading.Thread(target=render)
    thread.start()
    gate.is_in.wait(60)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT and not rendered
    gate.may_leave.set()
    thread.join()
    assert rendered == [TEXT]


def test_a_stage_without_a_tokenizer_has_nothing_to_share() -> None:
    share_tokenizer(SimpleNamespace(skip_tokenizer_init=True))  # type: ignore[arg-type]
