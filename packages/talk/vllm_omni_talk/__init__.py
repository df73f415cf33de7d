# SPDX-License-Identifier: Apache-2.0
"""The pipeline `talk`: a language model, a voice and a recognizer, each from packages of the index.

The stage configuration in `checkpoints/talk` names these parts. vllm_omni finds them through the entry point `talk`,
and imports a part when it is used.
"""

from pathlib import Path

from vllm_omni.model_packages import ModelPackage

SAMPLE_RATE = 24_000
"""Samples/s of the voice."""

MODELS = ModelPackage(
    checkpoints=Path(__file__).with_name("checkpoints"),
    made_checkpoints={
        "SmolLM2-135M-Instruct": "vllm_omni_talk.weights:language_model",
        "whisper-base": "vllm_omni_talk.whisper:base",
        "whisper-tiny.en": "vllm_omni_talk.whisper:tiny_english",
    },
    demos={"vllm_omni_talk.demo:answer_sentence": 1},
)
