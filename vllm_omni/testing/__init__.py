# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints, references and hosts, for the tests of this package and of others. See docs/design/testing.md."""
