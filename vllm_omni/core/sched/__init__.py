# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, extended. See docs/design/scheduling.md."""
