# SPDX-License-Identifier: Apache-2.0
"""vLLM looks for its kernels where they can be: an engine can start in a process that has used numba."""

import sys
from types import ModuleType, SimpleNamespace

import numba  # noqa: F401
import pytest
from vllm.triton_utils import dispatcher
from vllm.v1.worker import block_table

from vllm_omni.engine import omni_llm_engine
from vllm_omni.engine.omni_llm_engine import narrow_kernel_search


class Attribute(ModuleType):
    """A module that counts how often its attributes are read."""

    num_reads = 0

    def __getattribute__(self, name: str) -> object:
        if name == "__dict__":
            Attribute.num_reads += 1
        return super().__getattribute__(name)


def test_modules_without_models_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.of_the_test", Attribute("scipy.of_the_test"))
    Attribute.num_reads = 0
    with narrow_kernel_search():
        dispatcher._rebind_kernels([])
    assert not Attribute.num_reads
    assert dispatcher.sys is sys


def test_kernels_are_found_in_vllm_and_in_packages_with_models(monkeypatch: pytest.MonkeyPatch) -> None:
    models = SimpleNamespace(architectures={"Other": "other_package.models:Other"})
    monkeypatch.setattr(omni_llm_engine, "find_models", lambda: models)
    original, wrapper = object(), SimpleNamespace()
    holders = [ModuleType(f"{package}.of_the_test") for package in ("vllm", "vllm_omni", "other_package")]
    for module in holders:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(module, "kernel", original, raising=False)
    with narrow_kernel_search():
        dispatcher._rebind_kernels([(original, wrapper)])  # type: ignore[list-item, arg-type]
        name = f"{block_table.__name__}.ComputeSlotMappingKernel.kernel"
        assert dispatcher._resolve_kernel(name) == (block_table.ComputeSlotMappingKernel, "kernel")
    assert [vars(module)["kernel"] for module in holders] == [wrapper] * 3


def test_vllm_still_fails_on_a_module() -> None:
    with pytest.raises(AttributeError, match="_lib_fn_wrapper"):
        dispatcher._rebind_kernels([])
