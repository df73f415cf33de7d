# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni's thinker against transformers."""

from tests.model_executor.models.omni import ThinkerTests


class TestThinker(ThinkerTests):
    tolerance = 1e-5
