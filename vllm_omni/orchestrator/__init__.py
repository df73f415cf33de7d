# SPDX-License-Identifier: Apache-2.0
"""Runs a pipeline in the caller's process: admission, routing, processes. See docs/design/processes.md."""
