# SPDX-License-Identifier: Apache-2.0
"""One module for each model of `vllm_omni.testing.hf_oracle`."""
