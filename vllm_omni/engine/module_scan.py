# SPDX-License-Identifier: Apache-2.0
"""Keeps vLLM's search for kernels away from a module that it cannot look into.

On a CPU every start of a worker walks through all modules of the process. llvmlite, which comes with numba, has an
object there that takes the question for its `__dict__` for the name of a function in a library, and the walk ends with
an AttributeError. So once something in a process has used numba (a vocoder, vLLM's own n-gram proposer), no engine
could start there any more.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

OPAQUE_MODULE = "llvmlite.binding.ffi"


@contextmanager
def opaque_module_hidden() -> Iterator[None]:
    """Takes the module out of `sys.modules` meanwhile; those that have imported it keep it."""
    module = sys.modules.pop(OPAQUE_MODULE, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[OPAQUE_MODULE] = module
