# SPDX-License-Identifier: Apache-2.0
"""Two trained models, and their domain: sentences about coloured shapes, pictures and recordings of them.

vllm_omni finds the checkpoints through the entry point `coloured_shapes`.
"""

from pathlib import Path

from vllm_omni.model_packages import ModelPackage

MODELS = ModelPackage(
    checkpoints=Path(__file__).with_name("checkpoints"),
    demos={"coloured_shapes.demo:run_shapes": 5},
)
