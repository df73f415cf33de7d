# SPDX-License-Identifier: Apache-2.0
"""Runs the jobs of a diffusion stage. See docs/design/diffusion.md."""
