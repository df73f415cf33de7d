# SPDX-License-Identifier: Apache-2.0
"""What a stage produces, and what callers get back.

`StageOutput` crosses processes; `OmniRequestOutput` is the face that users meet.
"""

from typing import Any

import msgspec
import torch
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput


class Completion(msgspec.Struct, kw_only=True):
    """One of the `n` sequences of an autoregressive stage; vLLM's `CompletionOutput`, ready to travel."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class StageMetrics(msgspec.Struct, kw_only=True):
    """What one stage did for one request. Times are `time.monotonic()` seconds, comparable on one machine.

    Attributes:
        arrival: All inputs of the request had reached the stage.
        finished: The engine was done with the request.
        num_input_tokens, num_output_tokens: Rows read and tokens written (0 where a stage has none).
    """

    stage_id: int
    name: str
    arrival: float = 0.0
    finished: float = 0.0
    num_input_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def seconds(self) -> float:
        """Seconds from the arrival of the last input to the end."""
        return self.finished - self.arrival


class StageOutput(msgspec.Struct, kw_only=True):
    """What one stage made for one request: all of it, or a piece of a stream.

    Pieces of a stream are joined by `merge_stage_outputs`. A stage input processor gets them cut into windows
    (`stage.window.WindowState`), and reads from the last three attributes which window it has; the whole result is the
    window that starts at 0 and is the last.

    Attributes:
        prompt_token_ids: The prompt of this stage's engine (placeholders expanded); in a stream, in its first piece.
        completions: Generated sequences; empty for stages that generate none. In a stream: what is new of each.
        tensors: The model's outputs by name, on the CPU, e.g. `audio` float32 `[samples]`. In a stream: new rows.
        data: Plain values made by function stages.
        step, num_steps: How far a diffusion stage has come with what it shows here; None elsewhere.
        start: Units of the source's output before this window's own.
        context: Units at the front of this window that an earlier window had already.
        is_last: Nothing follows.
    """

    request_id: str
    stage_id: int
    prompt: str | None = None
    prompt_token_ids: list[int] = []
    completions: list[Completion] = []
    tensors: dict[str, torch.Tensor] = {}
    data: dict[str, Any] = {}
    step: int | None = None
    num_steps: int | None = None
    start: int = 0
    context: int = 0
    is_last: bool = True


class OmniRequestOutput:
    """The output of one final stage for one prompt.

    Attributes:
        request_id: The pipeline's id of the request; equal in all outputs of one prompt.
        stage_id: The final stage that made this output.
        final_output_type: What it is: `text`, `audio`, `image`, ...
        request_output: A list of one vLLM `RequestOutput`; its fields can be read here directly too.
        multimodal_output: Tensors by name on the CPU, e.g. `audio` float32 `[samples]`.
        images: Images made by a diffusion stage.
        stage_metrics: What each stage that worked on the prompt did, in stage order.
    """

    def __init__(
        self,
        request_id: str,
        stage_id: int,
        final_output_type: str,
        request_output: RequestOutput,
        multimodal_output: dict[str, torch.Tensor],
        stage_metrics: list[StageMetrics],
        images: list[Any] | None = None,
    ) -> None:
        self.request_id = request_id
        self.stage_id = stage_id
        self.final_output_type = final_output_type
        self.request_output = [request_output]
        self.multimodal_output = multimodal_output
        self.stage_metrics = stage_metrics
        self.images = images or []

    @property
    def outputs(self) -> list[CompletionOutput]:
        return self.request_output[0].outputs

    @property
    def prompt(self) -> str | None:
        return self.request_output[0].prompt

    @property
    def prompt_token_ids(self) -> list[int] | None:
        return self.request_output[0].prompt_token_ids

    @property
    def finished(self) -> bool:
        return self.request_output[0].finished

    def __repr__(self) -> str:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.multimodal_output.items()}
        return (
            f"OmniRequestOutput(request_id={self.request_id!r}, stage_id={self.stage_id}, "
            f"final_output_type={self.final_output_type!r}, outputs={self.outputs!r}, multimodal_output={shapes})"
        )


def make_omni_request_output(
    output: StageOutput, final_output_type: str, stage_metrics: list[StageMetrics]
) -> OmniRequestOutput:
    """Wraps what a final stage sent as vLLM's own `RequestOutput` and ours around it."""
    completions = [
        CompletionOutput(
            index=c.index,
            text=c.text,
            token_ids=c.token_ids,
            cumulative_logprob=c.cumulative_logprob,
            logprobs=c.logprobs,
            finish_reason=c.finish_reason,
            stop_reason=c.stop_reason,
        )
        for c in output.completions
    ]
    request_output = RequestOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        prompt_logprobs=None,
        outputs=completions,
        finished=True,
    )
    vars(request_output)["multimodal_output"] = output.tensors  # older clients read it here
    return OmniRequestOutput(
        request_id=output.request_id,
        stage_id=output.stage_id,
        final_output_type=final_output_type,
        request_output=request_output,
        multimodal_output=output.tensors,
        stage_metrics=stage_metrics,
    )
