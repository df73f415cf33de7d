# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.32."""
