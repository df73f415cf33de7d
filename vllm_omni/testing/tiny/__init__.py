# SPDX-License-Identifier: Apache-2.0
"""One module for each tiny checkpoint, and shared parts: a tokenizer, processors, random weights."""
