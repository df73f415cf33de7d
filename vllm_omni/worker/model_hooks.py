# SPDX-License-Identifier: Apache-2.0
"""Which of the hooks of `model_executor.interfaces` a model has: looked up once, when it is loaded."""

import inspect
from dataclasses import dataclass

from torch import nn

from vllm_omni.model_executor.interfaces import (
    SupportsAuxHiddenStates,
    SupportsInputChunks,
    SupportsOmniOutput,
    SupportsPostprocess,
    SupportsPreprocess,
)


@dataclass(frozen=True)
class ModelHooks:
    """
    Attributes:
        preprocess, output, postprocess, input_chunks: The model, where it has the hook.
        aux_layers: The layers whose inputs it wants captured.
        wants_information: Its forward takes `runtime_additional_information`.
    """

    preprocess: SupportsPreprocess | None = None
    output: SupportsOmniOutput | None = None
    postprocess: SupportsPostprocess | None = None
    input_chunks: SupportsInputChunks | None = None
    aux_layers: tuple[int, ...] = ()
    wants_information: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> "ModelHooks":
        return cls(
            preprocess=model if isinstance(model, SupportsPreprocess) else None,
            output=model if isinstance(model, SupportsOmniOutput) else None,
            postprocess=model if isinstance(model, SupportsPostprocess) else None,
            input_chunks=model if isinstance(model, SupportsInputChunks) else None,
            aux_layers=tuple(model.omni_aux_hidden_state_layers) if isinstance(model, SupportsAuxHiddenStates) else (),
            wants_information="runtime_additional_information" in inspect.signature(model.forward).parameters,
        )

    @property
    def emits_prompt_rows(self) -> bool:
        return self.output is None or self.output.omni_output_rows == "all"
