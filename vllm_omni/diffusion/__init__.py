# SPDX-License-Identifier: Apache-2.0
"""Diffusers' pipelines: loading, calling, batching. See docs/design/diffusion.md."""
