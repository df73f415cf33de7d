# SPDX-License-Identifier: Apache-2.0
"""The few of the thinker's embeddings that a talker needs, from the checkpoint that both are loaded from."""

from collections.abc import Iterable, Iterator

import torch

THINKER_EMBEDDING = "thinker.model.embed_tokens.weight"


class ThinkerEmbeds:
    """Puts rows of the thinker's embedding aside while a talker's weights are loaded."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._rows: torch.Tensor | None = None

    def take_from(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Passes all other weights on."""
        for name, tensor in weights:
            if name == THINKER_EMBEDDING:
                self._rows = tensor[self._token_ids].clone()
            else:
                yield name, tensor

    @property
    def rows(self) -> torch.Tensor:
        """`[len(token_ids), thinker_hidden]`, once all weights have passed.

        Raises:
            ValueError: The checkpoint has none.
        """
        if self._rows is None:
            raise ValueError(f"the checkpoint has no {THINKER_EMBEDDING!r}, which the talker's prompt needs")
        return self._rows


def is_unused_by_talker(name: str) -> bool:
    """Whether a weight of the checkpoint is another stage's alone."""
    return not name.startswith("talker.") and name != THINKER_EMBEDDING
