# SPDX-License-Identifier: Apache-2.0
"""Layers that several models share. See docs/design/vocoder.md for codecs, docs/design/feedback.md for talkers."""
