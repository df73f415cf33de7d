# SPDX-License-Identifier: Apache-2.0
"""Devices, memory and cores of a machine, and which stage gets them. See docs/design/processes.md."""
