# SPDX-License-Identifier: Apache-2.0
"""Workers and model runners: vLLM's, with the hooks of `model_executor.interfaces` around the forward.

See docs/design/scheduling.md.
"""
