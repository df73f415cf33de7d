# SPDX-License-Identifier: Apache-2.0
"""The methods of vLLM's `LLM` and `AsyncLLM`: each is there, with vLLM's arguments, or withheld with a reason."""

import inspect
from collections.abc import Mapping
from pathlib import Path

import pytest
from vllm import LLM
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_omni import AsyncOmniLLM, OmniLLM
from vllm_omni.entrypoints.withheld_methods import OF_ASYNC_LLM, OF_LLM

PAIRS = [(LLM, OmniLLM, OF_LLM), (AsyncLLM, AsyncOmniLLM, OF_ASYNC_LLM)]
OTHER_ARGUMENTS = {
    (OmniLLM, "generate"): {"sampling_params", "tokenization_kwargs", "mm_processor_kwargs"},
    (OmniLLM, "chat"): {"sampling_params", "tokenization_kwargs"},
    (OmniLLM, "enqueue"): {"sampling_params", "tokenization_kwargs", "mm_processor_kwargs"},
    (OmniLLM, "wait_for_completion"): {"output_type"},
    (AsyncOmniLLM, "from_engine_args"): {"start_engine_loop", "usage_context", "stat_loggers"},
}
"""vLLM's that ours do not have: parameters are a list, one for each stage; a processor's are the prompt's; a pipeline
always runs."""
SINCE_0_33 = {"get_external_elastic_ep_status", "should_keep_api_server_alive"}
OWN = {(OmniLLM, "enqueue_chat"), (AsyncOmniLLM, "generate"), (AsyncOmniLLM, "abort")}
"""`chat`'s arguments; events of all outputs, and their number."""


def names_of(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


@pytest.mark.parametrize(("theirs", "ours", "withheld"), PAIRS)
def test_every_method_of_vllm_has_a_place(theirs: type, ours: type, withheld: Mapping[str, str]) -> None:
    """One that the next vLLM adds fails here until somebody has looked at it."""
    assert names_of(theirs) - names_of(ours) | SINCE_0_33 == withheld.keys() | SINCE_0_33


@pytest.mark.parametrize(("theirs", "ours", "withheld"), PAIRS)
def test_methods_take_vllms_arguments(theirs: type, ours: type, withheld: Mapping[str, str]) -> None:
    for name in sorted(names_of(theirs) & names_of(ours)):
        if (ours, name) not in OWN:
            wanted, taken = (inspect.signature(getattr(cls, name)).parameters for cls in (theirs, ours))
            assert wanted.keys() - taken.keys() == OTHER_ARGUMENTS.get((ours, name), set()), name


@pytest.mark.parametrize(("theirs", "ours", "withheld"), PAIRS)
def test_what_is_withheld_is_refused_with_the_reason(theirs: type, ours: type, withheld: Mapping[str, str]) -> None:
    llm = ours.__new__(ours)
    for name, reason in withheld.items():
        with pytest.raises(AttributeError) as raised:
            getattr(llm, name)
        assert str(raised.value).endswith(f"no attribute {name!r}; it is of vLLM's {theirs.__name__} alone: {reason}")
    assert not hasattr(llm, "no_such_name")


@pytest.mark.parametrize(("theirs", "ours", "withheld"), PAIRS)
def test_the_page_has_this_list(theirs: type, ours: type, withheld: Mapping[str, str]) -> None:
    page = (Path(__file__).parents[2] / "docs/vllm_surface.md").read_text()
    names: dict[str, list[str]] = {}
    for name, reason in withheld.items():
        names.setdefault(reason, []).append(f"`{name}`")
    rows = [f"| {reason} | {', '.join(listed)} |" for reason, listed in names.items()]
    table = page.partition(f"## Methods of `{theirs.__name__}`")[2].partition("\n#")[0].splitlines()
    assert [line for line in table if line.startswith("|")][2:] == rows
