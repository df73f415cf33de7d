# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: the environment, set before anything imports torch or vLLM, and shared fixtures."""

import os

# `make test` sets OMP_NUM_THREADS before Python starts; this is for a bare `pytest`.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# A test that would download anything, or report its use, fails instead.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["DO_NOT_TRACK"] = "1"
