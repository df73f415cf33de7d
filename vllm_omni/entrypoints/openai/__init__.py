# SPDX-License-Identifier: Apache-2.0
"""The API server: vLLM's application over a pipeline. See docs/design/http.md."""
