# SPDX-License-Identifier: Apache-2.0
"""Hooks of a model for the omni runners, beyond vLLM's own model interface.

Every hook is optional. The runner looks for each of them once, when the model is loaded, and calls
those it finds in this order, once a step, outside any CUDA graph:

1. `preprocess`       before the forward: replaces input embeddings, can emit outputs of its own
2. `forward`          vLLM's; receives `runtime_additional_information` if its signature has it
3. `make_omni_output` after the forward: the rows that this stage emits
4. `postprocess`      after sampling: the request's state for its next step

This file knows no model and no runner.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from vllm.sampling_params import SamplingParams


@dataclass(slots=True)
class RequestSpan:
    """The rows of one request in the flat batch of one step.

    Attributes:
        req_id: vLLM's internal request id.
        start, stop: Rows `[start, stop)` of the step's flat batch.
        position: Absolute position of the first row (tokens computed before this step). It is 0 again
            after a preemption, or a step that raised: a hook must then reproduce the rows it made before.
        num_prompt_tokens: Rows at positions below this belong to the prompt.
        num_tokens: Tokens known so far, prompt and generated. The step samples for this request
            only if its last row is the last known token.
        sampling_params: The request's sampling parameters.
        additional_information: The request's own state: the caller's information, decoded to tensors, later chunks of
            its input, and what `postprocess` returned. Hooks may write to it. Tensors of a chunk are appended along the
            first dimension of those of the same name, and plain values replace others.
        is_input_complete: No further chunk of input will be added to `additional_information`.
        emits_rows: The request's rows leave the stage; otherwise they need not be made.
        waits_for_twin: One of the two sequences of a request with guidance, whose other one samples no token in this
            step: its last row is computed again in the next one.
    """

    req_id: str
    start: int
    stop: int
    position: int
    num_prompt_tokens: int
    num_tokens: int
    sampling_params: SamplingParams
    additional_information: dict[str, Any] = field(default_factory=dict)
    is_input_complete: bool = True
    emits_rows: bool = True
    waits_for_twin: bool = False

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def samples(self) -> bool:
        """Whether this step samples a token for the request (false inside a chunked prefill)."""
        return self.position + self.num_rows >= self.num_tokens and not self.waits_for_twin


@runtime_checkable
class SupportsPreprocess(Protocol):
    """Replaces the input embeddings of a step, e.g. by those of the last frame of codes."""

    def preprocess(
        self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None, spans: list[RequestSpan]
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """
        Args:
            input_ids: `[num_tokens]` int, the step's flat batch.
            inputs_embeds: `[num_tokens, hidden]` in the model's dtype, or None for a model that embeds ids itself.
                May be written in place.
            spans: One for each request, in batch order; together they cover all rows.

        Returns:
            The embeddings to run with (or None, to run with what was given), and outputs by row:
            `[num_tokens, ...]` tensors for `make_omni_output`, or, without that hook, for the caller.
        """
        ...


@runtime_checkable
class SupportsOmniOutput(Protocol):
    """Makes the rows that a stage emits. A model without this hook emits `{"hidden": hidden_states}`."""

    omni_output_rows: ClassVar[Literal["all", "generated"]]
    """`generated`: rows of the prompt are not emitted."""

    def make_omni_output(
        self,
        hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        preprocessed: dict[str, torch.Tensor],
        spans: list[RequestSpan],
    ) -> dict[str, torch.Tensor]:
        """
        Args:
            hidden_states: `[num_tokens, hidden]`, after the final norm.
            aux_hidden_states: One `[num_tokens, hidden]` for each layer of `omni_aux_hidden_state_layers`.
            preprocessed: What `preprocess` returned for this step.
            spans: As for `preprocess`.

        Returns:
            Outputs by name, each `[num_tokens, ...]`, aligned with the rows of the step.
        """
        ...


@runtime_checkable
class SupportsAuxHiddenStates(Protocol):
    """Declares which decoder layers' inputs are captured, in vLLM's numbering (0 is the embeddings)."""

    omni_aux_hidden_state_layers: tuple[int, ...]


@runtime_checkable
class SupportsPostprocess(Protocol):
    """Returns a request's state for its next step."""

    def postprocess(self, hidden_states: torch.Tensor, spans: list[RequestSpan]) -> list[dict[str, Any]]:
        """
        Args:
            hidden_states: `[num_tokens, hidden]`, after the final norm. Clone what is kept.
            spans: As for `preprocess`.

        Returns:
            One dict for each span; merged into its `additional_information`.
        """
        ...


@runtime_checkable
class SupportsSuppressedTokens(Protocol):
    """Has tokens that are never sampled, although its head has logits of them.

    The sampler masks them after it has taken the log-probabilities of vLLM's `raw_logprobs`, which so are those that a
    trainer computes with the bare model. `processed_logprobs` are those of what is sampled from, without these tokens.
    A mask in `compute_logits` would be in both.
    """

    def suppressed_tokens(self) -> torch.Tensor:
        """`[vocab]` bool, on the model's device: the columns of `compute_logits` that are masked."""
        ...


@runtime_checkable
class SupportsOneStepGeneration(Protocol):
    """A model without KV cache that turns a request, or a window of its input, into output in one forward.

    `forward(input_ids, positions, *, runtime_additional_information, ...)` returns one dict of
    tensors for each request, in the order of `runtime_additional_information`. Each of these has two keys beside the
    request's own:

    - `state`: a dict of the model's own, kept between the windows of the pipeline's request. Windows come one after the
      other, never two in one step. The model replaces values in it and does not change them in place: if the step
      raises, the window runs again with the dict as it was.
    - `is_last`: no window follows. A whole request is one window, the first and the last.
    """

    is_attention_free: ClassVar[Literal[True]]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        runtime_additional_information: list[dict[str, Any]],
        **kwargs: Any,
    ) -> list[dict[str, torch.Tensor]]: ...


@runtime_checkable
class SupportsBatchSize(Protocol):
    """Declares how many rows of input (codes, frames) a one-step model computes at once. A step has no more, unless one
    request has: the outputs of a larger step would only arrive later.

    Attributes:
        batch_rows: At least 1.
    """

    batch_rows: int


@runtime_checkable
class SupportsActivationEstimate(Protocol):
    """Declares the memory of a step besides the weights. One-step models need it for the estimate before they are
    loaded; for other models it is estimated from their layers."""

    def activation_bytes(self, num_rows: int) -> int:
        """
        Args:
            num_rows: Rows of input (codes, frames) in one step, of all requests together.

        Returns:
            Bytes on an accelerator, an upper estimate. Called on a model on the meta device.
        """
        ...
