# SPDX-License-Identifier: Apache-2.0
"""Processes of stages: where they run, how they start, restart and end, and the handles that messages go through."""
