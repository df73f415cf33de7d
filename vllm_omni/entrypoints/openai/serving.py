# SPDX-License-Identifier: Apache-2.0
"""What our handlers of chat and completions have in common: each is one that vLLM has made, on our engine client."""

from typing import Any, cast

from typing_extensions import Self
from vllm.entrypoints.generate.base.serving import GenerateBaseServing

from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient


class OmniServing(GenerateBaseServing):
    """To derive from together with one of vLLM's handlers."""

    default_sampling_params: dict[str, Any]

    @classmethod
    def from_vllm(cls, handler: GenerateBaseServing) -> Self:
        """The handler that vLLM has made, as one of ours: its constructor's arguments are vLLM's business."""
        ours = cls.__new__(cls)
        vars(ours).update(vars(handler))
        ours.default_sampling_params = ours.client.default_sampling_params
        return ours

    @property
    def client(self) -> OmniEngineClient:
        return cast(OmniEngineClient, self.engine_client)
