# SPDX-License-Identifier: Apache-2.0
"""Schedulers. See docs/design/scheduling.md."""
