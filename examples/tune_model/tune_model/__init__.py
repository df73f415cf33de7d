# SPDX-License-Identifier: Apache-2.0
"""A toy that sings: text -> notes -> sound, in two stages. vllm_omni finds it through the entry point `tune`."""

from pathlib import Path

from vllm_omni.model_packages import ModelPackage

MODELS = ModelPackage(
    architectures={
        "TuneComposer": "tune_model.composer:TuneComposer",
        "TuneSynthesizer": "tune_model.synthesizer:TuneSynthesizer",
    },
    hf_configs={"tune": "tune_model.config:TuneConfig"},
    stage_configs=Path(__file__).with_name("stage_configs"),
    tiny_checkpoints={"tune": "tune_model.checkpoint"},
)
