# SPDX-License-Identifier: Apache-2.0
"""What `vllm_omni.testing.hf_oracle` is made of: one module for each model that it can ask."""
