# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with nothing in them but `model_index.json`: all that the front end reads."""

import json
from pathlib import Path
from typing import Any

from vllm_omni.config.stage import OmniStageConfig, StageRuntimeConfig
from vllm_omni.diffusion.input_processor import DiffusionInputProcessor


def write_index(folder: Path, class_name: Any) -> str:
    """A checkpoint of this pipeline class; without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": class_name, "_diffusers_version": "0.42.1"}))
    return str(folder)


def make_processor(
    folder: Path,
    class_name: str | None,
    engine_args: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
    makes: str = "image",
    sources: tuple[int, ...] = (),
    **runtime: Any,
) -> DiffusionInputProcessor:
    """The front end of a stage `diffusion` that runs this pipeline class; without one, the checkpoint in the folder."""
    stage = OmniStageConfig(
        stage_id=len(sources),
        engine_type="DiT",
        engine_args={"model_stage": "diffusion", **(engine_args or {})},
        engine_input_source=list(sources),
        final_output=True,
        final_output_type=makes,
        default_sampling_params=defaults or {},
        runtime=StageRuntimeConfig(**runtime),
    )
    return DiffusionInputProcessor(stage, write_index(folder, class_name) if class_name else str(folder))
