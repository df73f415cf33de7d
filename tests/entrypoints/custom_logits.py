# SPDX-License-Identifier: Apache-2.0
"""A custom logits processor of vLLM: given by its path, loaded in the stage's process."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class KeepTokens(AdapterLogitsProcessor):
    """Allows only the tokens of `extra_args["keep"]`, if a request has it."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if not isinstance((params.extra_args or {}).get("keep", []), list):
            raise ValueError("keep must be a list of token ids")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        keep: Any = (params.extra_args or {}).get("keep")
        if keep is None:
            return None

        def mask(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            kept = torch.full_like(logits, float("-inf"))
            kept[keep] = logits[keep]
            return kept

        return mask
