# SPDX-License-Identifier: Apache-2.0
"""One module for each tiny checkpoint, and what they share: a tokenizer and a way to fill weights."""
