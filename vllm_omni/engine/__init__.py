# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine with its input and output processing, extended. See docs/design/scheduling.md."""
