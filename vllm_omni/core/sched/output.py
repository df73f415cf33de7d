# SPDX-License-Identifier: Apache-2.0
"""What the schedulers send to the model runners, and what they get back, beyond vLLM's own structures."""

from dataclasses import dataclass, fields

import torch
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_omni.engine.payloads import AdditionalInformationPayload


class OmniRequest(Request):
    """vLLM's request as the scheduler holds it, and what must still reach the model runner.

    vLLM builds its own class; `OmniEngineCore` turns the instance into this one. Only attributes may be added here.
    """

    additional_information: AdditionalInformationPayload | None = None


@dataclass
class OmniNewRequestData(NewRequestData):
    """A request's first visit to the model runner, with its additional information still encoded."""

    additional_information: AdditionalInformationPayload | None = None

    @classmethod
    def from_base(
        cls, data: NewRequestData, additional_information: AdditionalInformationPayload | None
    ) -> "OmniNewRequestData":
        return cls(
            **{name: getattr(data, name) for name in _NEW_REQUEST_FIELDS}, additional_information=additional_information
        )


@dataclass
class OmniModelRunnerOutput(ModelRunnerOutput):
    """vLLM's output of one step, with outputs of the model beside the sampled tokens.

    Attributes:
        pooler_output: For each request, in the order of `req_ids`: outputs by name on the CPU, `[rows, ...]` each, or
            None where the request has nothing to hand over in this step.
    """

    pooler_output: list[dict[str, torch.Tensor] | None] | None = None  # type: ignore[assignment]

    @classmethod
    def from_base(
        cls, output: ModelRunnerOutput, pooler_output: list[dict[str, torch.Tensor] | None]
    ) -> "OmniModelRunnerOutput":
        base = {name: getattr(output, name) for name in _RUNNER_OUTPUT_FIELDS}
        return cls(**(base | {"pooler_output": pooler_output}))


_NEW_REQUEST_FIELDS = tuple(f.name for f in fields(NewRequestData))
_RUNNER_OUTPUT_FIELDS = tuple(f.name for f in fields(ModelRunnerOutput))
