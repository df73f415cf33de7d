# SPDX-License-Identifier: Apache-2.0
"""One copy of a model's tokenizer in a process.

vLLM makes two deep copies of a tokenizer of Hugging Face for a renderer, so that no thread waits for another: of one
with 49,000 words 20 MB and 0.3 s each. A stage's process has one thread that tokenizes, and a server one for prompts,
beside which others look up single tokens. So here threads take turns.
"""

import threading
from collections.abc import Callable
from typing import Any

from transformers import TokenizersBackend
from vllm.config import ModelConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

_METHODS = (
    "__call__", "batch_decode", "batch_encode", "convert_ids_to_tokens", "convert_tokens_to_ids",
    "convert_tokens_to_string", "decode", "encode",
)  # fmt: skip
"""Those for which vLLM borrows a copy: some change a tokenizer's settings, which fails while another one runs. Without
`apply_chat_template`: it calls these, and a template that takes long keeps nobody waiting."""


def share_tokenizer(config: ModelConfig) -> None:
    """Makes the tokenizer that vLLM keeps for a model one for several threads. For use before a renderer has it."""
    tokenizer = cached_tokenizer_from_config(config)
    if isinstance(tokenizer, TokenizersBackend) and not isinstance(tokenizer, ThreadSafeHFTokenizerMixin):
        tokenizer.__class__ = _shared_class(type(tokenizer))


def _shared_class(tokenizer_class: type[TokenizersBackend]) -> type[TokenizersBackend]:
    """A class of its own for one tokenizer and its shallow copies, whose methods run one at a time."""
    lock = threading.RLock()

    def method(name: str) -> Callable[..., Any]:
        def call(self: TokenizersBackend, *args: Any, **kwargs: Any) -> Any:
            with lock:
                return getattr(tokenizer_class, name)(self, *args, **kwargs)

        return call

    methods = {name: method(name) for name in _METHODS} | {"__copy__": _shallow_copy}
    return type(f"Shared{tokenizer_class.__name__}", (ThreadSafeHFTokenizerMixin, tokenizer_class), methods)


def _shallow_copy(tokenizer: TokenizersBackend) -> TokenizersBackend:
    """A tokenizer with the same vocabulary. vLLM's own copies list all words again."""
    copied = type(tokenizer).__new__(type(tokenizer))
    vars(copied).update(vars(tokenizer))
    return copied
