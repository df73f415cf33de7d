# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter in place of vLLM's Triton for CPUs, for `pytest -p`: before vLLM is imported.

vLLM's V2 model runner needs Triton, whose wheels compile for GPUs only. Interpreted, its kernels compute the same,
one block after the other.
"""

import os
from types import SimpleNamespace

os.environ |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}  # Nothing can be compiled.

from triton.backends import backends

backends["cpu"] = SimpleNamespace(driver=None)  # vLLM asks only whether there is one.
