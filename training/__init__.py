# SPDX-License-Identifier: Apache-2.0
"""Trains the models of `coloured_shapes`; see README.md."""
