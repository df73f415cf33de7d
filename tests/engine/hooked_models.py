# SPDX-License-Identifier: Apache-2.0
"""Models with every hook, small enough to recompute by hand. They run on the tiny Qwen3 checkpoint's configuration."""

from typing import Any, ClassVar, Literal

import torch
from torch import nn
from vllm import ModelRegistry
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from vllm_omni.model_executor.interfaces import RequestSpan

FEEDBACK = 0.1
"""A generated row's input is its token's embedding plus this much of the row before it."""


class HookedQwen3(Qwen3ForCausalLM):
    """Qwen3 whose steps depend on each other beyond the sampled tokens, as a talker's do.

    - Prompt rows: `additional_information["shift"]` `[hidden]` is added to the embeddings.
    - Generated rows: `FEEDBACK` times the last hidden state is added; it is kept by position, so that rows computed
      again after a preemption are the same.
    - `additional_information["raise_at"]`: this request raises at that position.
    - `additional_information["feed"]` `[n, hidden]`: its rows are added to the generated rows, nothing beyond its end.
      A row that is computed before its feed is there raises.
    """

    omni_output_rows: ClassVar[Literal["all", "generated"]] = "generated"
    omni_aux_hidden_state_layers = (2,)

    def preprocess(
        self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None, spans: list[RequestSpan]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert inputs_embeds is not None and len(inputs_embeds) == spans[-1].stop
        for span in spans:
            for row in range(span.start, span.stop):
                inputs_embeds[row] += self._extra(span, span.position + row - span.start)
        return inputs_embeds, {"tokens": input_ids.to(torch.int64)}

    def make_omni_output(
        self,
        hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        preprocessed: dict[str, torch.Tensor],
        spans: list[RequestSpan],
    ) -> dict[str, torch.Tensor]:
        assert aux_hidden_states is not None
        return {"latent": hidden_states, "layer2": aux_hidden_states[0], **preprocessed}

    def postprocess(self, hidden_states: torch.Tensor, spans: list[RequestSpan]) -> list[dict[str, Any]]:
        return [self._remembered(hidden_states, span) for span in spans]

    def _extra(self, span: RequestSpan, position: int) -> torch.Tensor:
        information = span.additional_information
        if information.get("raise_at") == position:
            raise RuntimeError(f"told to raise at {position}")
        if position < span.num_prompt_tokens:
            return information.get("shift", torch.zeros(1))
        return FEEDBACK * information["last"][position - 1] + self._feed(span, position - span.num_prompt_tokens)

    def _feed(self, span: RequestSpan, index: int) -> torch.Tensor:
        feed = span.additional_information.get("feed", torch.zeros(0, 1))
        if index >= len(feed) and not span.is_input_complete:
            raise RuntimeError(f"generated row {index} is computed with a feed of {len(feed)}")
        return feed[index] if index < len(feed) else torch.zeros(1)

    def _remembered(self, hidden_states: torch.Tensor, span: RequestSpan) -> dict[str, Any]:
        if not span.samples:
            return {}
        last = span.position + span.num_rows - 1
        known = span.additional_information.get("last", {})
        return {"last": {**known, last: hidden_states[span.stop - 1].clone()}}


class DoublingVocoder(nn.Module):
    """Turns `additional_information["codes"]` `[n]` into `audio` float32 `[2 * n]`, each code twice and scaled.

    Its state is how many codes came before: `place` int64 `[n]` counts them from the request's start, `ends` bool `[1]`
    is true for the last window. `additional_information["raise"]` raises after the state has changed.
    """

    is_attention_free: ClassVar[Literal[True]] = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids[:, None].float()

    def compute_logits(self, hidden_states: torch.Tensor) -> None:
        return None

    def load_weights(self, weights: Any) -> set[str]:
        return {"scale"}

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        runtime_additional_information: list[dict[str, Any]],
        **kwargs: Any,
    ) -> list[dict[str, torch.Tensor]]:
        sizes = [len(information["codes"]) for information in runtime_additional_information]
        assert sum(sizes) == len(input_ids) == len(positions)
        counts = [self._count(**information) for information in runtime_additional_information]
        if any(information.get("raise") for information in runtime_additional_information):
            raise RuntimeError("told to raise")
        codes = torch.cat([information["codes"] for information in runtime_additional_information])
        audio = (codes.float() * self.scale).repeat_interleave(2)
        num_requests = torch.tensor(len(sizes))
        parts = audio.split([2 * size for size in sizes])
        return [{"audio": part, "batch": num_requests, **count} for part, count in zip(parts, counts, strict=True)]

    def _count(
        self, codes: torch.Tensor, state: dict[str, Any], is_last: bool, **others: Any
    ) -> dict[str, torch.Tensor]:
        start = state.get("num_codes", 0)
        state["num_codes"] = start + len(codes)
        return {"place": torch.arange(start, start + len(codes)), "ends": torch.tensor([is_last])}


def register() -> None:
    """Classes instead of names, so that vLLM need not start a process to look at them."""
    ModelRegistry.register_model("HookedQwen3", HookedQwen3)
    ModelRegistry.register_model("DoublingVocoder", DoublingVocoder)
