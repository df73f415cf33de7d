# SPDX-License-Identifier: Apache-2.0
"""Passes frames of codes to the codec that makes sound of them."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.outputs import StageOutput


class FramesToCodec(StageInputProcessor):
    """One placeholder id for each frame. Of the sound of the frames `ref_codes`, which precede the first one, nothing
    leaves the codec: speech continues it."""

    reads: ClassVar[tuple[str, ...]] = ("completions", "tensors.codes", "tensors.ref_codes")
    window: ClassVar[WindowConfig] = WindowConfig(unit="codes")

    def process(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> StageInput | None:
        """
        Returns:
            None where the window has no frame.
        """
        (source,) = sources.values()
        codes = source.tensors.get("codes")  # absent if the first token was the end
        codes = None if codes is None else self.select(codes)
        if codes is None or not len(codes):
            return None
        reference = source.tensors.get("ref_codes", codes[:0])
        return StageInput(
            prompt_token_ids=[0] * (len(reference) + len(codes)),
            additional_information={"codes": torch.cat((reference, codes)), "num_silent": len(reference)},
            finish_reason=source.finish_reason,
            is_extensible=True,
        )

    def select(self, codes: torch.Tensor) -> torch.Tensor:
        """The frames that have a sound; `[frames, codebooks]`."""
        return codes

    def empty_output(self) -> dict[str, torch.Tensor]:
        return {"audio": torch.empty(0)}
