# SPDX-License-Identifier: Apache-2.0
"""The parts of the pipeline `talk`: a language model, a voice and a recognizer, each from packages of the index.

The stage configuration is in `vllm_omni/checkpoints/talk`. It names these parts; no server code imports them.
"""

SAMPLE_RATE = 24_000
"""Samples/s of the voice."""
