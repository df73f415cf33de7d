# SPDX-License-Identifier: Apache-2.0
"""The kinds of stages of this package: one file for each, and an entry of `model_executor.registry.STAGE_KINDS`."""
