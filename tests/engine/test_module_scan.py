# SPDX-License-Identifier: Apache-2.0
"""An engine can start in a process that has used numba."""

import sys

import numba  # noqa: F401
import pytest
from vllm.triton_utils.dispatcher import _rebind_kernels

from vllm_omni.engine.omni_llm_engine import OPAQUE_MODULE, opaque_module_hidden


def test_the_module_is_hidden_from_vllm_and_restored() -> None:
    module = sys.modules[OPAQUE_MODULE]
    with opaque_module_hidden():
        _rebind_kernels([])
    assert sys.modules[OPAQUE_MODULE] is module


def test_vllm_still_fails_on_the_module() -> None:
    with pytest.raises(AttributeError, match="_lib_fn_wrapper"):
        _rebind_kernels([])
