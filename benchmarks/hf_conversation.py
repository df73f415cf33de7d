# SPDX-License-Identifier: Apache-2.0
"""HF transformers as a backend of `conversation.py`: the thinker computes new tokens only.

For each conversation keys, values and hidden states of the thinker are kept, and so its media are encoded once. What HF
does after it is unchanged: the talker reads the whole prompt, and the vocoder makes the speech at once.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from vllm_omni.testing.hf_oracle import HFOracle

_MEDIA = ("pixel_values", "image_grid_thw", "input_features", "feature_attention_mask")


class KeptThinker:
    """One conversation's state of an omni model's thinker."""

    def __init__(self, oracle: HFOracle) -> None:
        self._oracle = oracle
        self._thinker: Any = oracle.model.thinker
        self._cache = DynamicCache()
        self._token_ids = torch.empty(0, dtype=torch.long)
        self._rows: tuple[torch.Tensor, ...] = ()
        self._rope_deltas: torch.Tensor | None = None
        self._original: Any = None
        self.first_token = 0.0
        """When the last prompt's first token was there."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The oracle generates with this state."""
        reference = self._oracle._reference
        self._original, reference._thinker_generate = reference._thinker_generate, self._generate
        hook = self._thinker.lm_head.register_forward_hook(self._on_logits)
        self.first_token = 0.0
        try:
            yield
        finally:
            hook.remove()
            reference._thinker_generate = self._original

    def _on_logits(self, *_: Any) -> None:
        self.first_token = self.first_token or time.monotonic()

    def _generate(self, **kwargs: Any) -> Any:
        token_ids = kwargs["input_ids"][0]
        num_kept = self._keep(token_ids)
        if num_kept:
            self._thinker.rope_deltas = self._rope_deltas
            kwargs = {name: value for name, value in kwargs.items() if name not in _MEDIA}
        output = self._original(**kwargs, past_key_values=self._cache)
        first, *others = output.hidden_states
        if num_kept:
            first = tuple(
                torch.cat((kept[:, :num_kept], new), dim=1) for kept, new in zip(self._rows, first, strict=True)
            )
            output.hidden_states = (first, *others)
        self._rows = tuple(torch.cat(layer, dim=1) for layer in zip(*output.hidden_states, strict=True))
        self._token_ids, self._rope_deltas = output.sequences[0, :-1], self._thinker.rope_deltas
        return output

    def _keep(self, token_ids: torch.Tensor) -> int:
        """Removes what is no beginning of the prompt. Returns the tokens that are left."""
        length = min(len(self._token_ids), len(token_ids) - 1)
        differs = (self._token_ids[:length] != token_ids[:length]).nonzero()
        num_kept = int(differs[0]) if len(differs) else length
        if num_kept < len(self._token_ids):
            self._cache.crop(num_kept)
        return num_kept
