# SPDX-License-Identifier: Apache-2.0
"""The repetition penalty on a CPU, for the tokens that a request has.

vLLM's computes with some ten tensors as wide as the vocabulary for each request, which takes as long as several layers
of a small model. The same numbers, to the bit, come of the tokens of the prompt and of the output alone.
"""

from typing import Any

import torch
from vllm.utils.torch_utils import make_tensor_with_pad
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class CPUSampler(CPUModelRunner):
    """A base of our runners."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sampler = SparseSampler(self.sampler.logprobs_mode, self.sampler.use_fp64_gumbel)


class SparseSampler(Sampler):
    @staticmethod
    def apply_penalties(
        logits: torch.Tensor, sampling_metadata: SamplingMetadata, output_token_ids: list[list[int]]
    ) -> torch.Tensor:
        """`logits` `[num_requests, vocab]`, which are changed."""
        metadata = sampling_metadata
        has_others = not metadata.no_penalties and (
            metadata.frequency_penalties.any() or metadata.presence_penalties.any()
        )
        if metadata.no_penalties or has_others:  # These count how often a token came.
            return Sampler.apply_penalties(logits, metadata, output_token_ids)
        assert metadata.prompt_token_ids is not None
        repeat_tokens(logits, metadata.prompt_token_ids, output_token_ids, metadata.repetition_penalties)
        return logits


def repeat_tokens(
    logits: torch.Tensor, prompt_token_ids: torch.Tensor, output_token_ids: list[list[int]], penalties: torch.Tensor
) -> None:
    """Makes tokens that a request has less likely, by its penalty.

    Args:
        logits: `[num_requests, vocab]`, which are changed.
        prompt_token_ids: `[num_requests, longest prompt]`, with `vocab` behind shorter ones.
        output_token_ids: Those that it has written; -1 is none.
        penalties: `[num_requests]`
    """
    vocab_size = logits.shape[1]
    written = make_tensor_with_pad(output_token_ids, pad=vocab_size, device="cpu", dtype=torch.int64)
    ids = torch.cat((prompt_token_ids, written), dim=1)
    # What is no token stands for one that the request has: the first of its prompt.
    ids = torch.where((ids >= 0) & (ids < vocab_size), ids, ids[:, :1])
    values = logits.gather(1, ids)
    penalty = penalties[:, None]
    logits.scatter_(1, ids, values * torch.where(values > 0, 1.0 / penalty, penalty))
