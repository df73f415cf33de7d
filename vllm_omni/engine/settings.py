# SPDX-License-Identifier: Apache-2.0
"""The settings of a stage's engine, readable from vLLM's configuration."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from vllm.config import VllmConfig

EngineType = Literal["ar", "generation"]

_KEY = "omni"

SHARES_PROCESS = "omni_shares_process"
"""Key of `additional_config`: other engines run in the stage's process, so no limit may apply to the process."""


@dataclass(frozen=True)
class OmniEngineSettings:
    """Part of vLLM's `additional_config`, which reaches every worker.

    Attributes:
        engine_type: `ar` samples tokens; `generation` makes everything in one step, without KV cache.
        engine_output_type: `text`: only tokens leave the engine, and no rows are captured. Any other word names the
            rows that the model emits besides, e.g. `latent`, `codes`, `audio`.
        model_stage: The stage's name, for messages.
        uses_generation_config: The checkpoint's `generation_config.json` is about this stage's tokens.
    """

    engine_type: EngineType = "ar"
    engine_output_type: str = "text"
    model_stage: str = ""
    uses_generation_config: bool = True

    @property
    def emits_rows(self) -> bool:
        """Whether outputs of the model leave the engine besides tokens."""
        return self.engine_type == "ar" and self.engine_output_type != "text"

    @property
    def can_cache_prefixes(self) -> bool:
        """Tokens found in a cache have no rows."""
        return self.engine_type == "ar" and not self.emits_rows

    def as_additional_config(self) -> dict[str, Any]:
        return {_KEY: asdict(self)}

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> "OmniEngineSettings":
        additional = cast(dict[str, Any], vllm_config.additional_config)
        return cls(**additional.get(_KEY, {}))
