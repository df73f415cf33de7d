# SPDX-License-Identifier: Apache-2.0
"""Requests that schemathesis makes from a server's OpenAPI description: valid ones and invalid ones."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.fuzz.fuzz_requests import FuzzRequest

# Their descriptions in vLLM have so many branches that one request takes seconds to make. `bad_requests` has bad ones.
_DEEP_FIELDS = ("messages", "tools")
_PLAIN_MESSAGES = [{"role": "user", "content": "Hello"}]
# Valid requests by this description may run for hours.
_ABORT_AFTER_S = 2.0


def described_requests(description: dict[str, Any], each: int, seed: int) -> Iterator[FuzzRequest]:
    """About `each` requests of either kind for each operation with parameters.

    Args:
        description: `/openapi.json`.
    """
    rng = random.Random(seed)
    schema = schemathesis.openapi.from_dict(_shortened(description))
    for result in schema.get_all_operations():
        operation = result.ok()
        if not operation.body and not operation.query and not operation.path_parameters:
            continue
        for mode in GenerationMode:
            for case in _cases(operation, mode, each, seed):
                yield _fuzz_request(case, f"{mode.value} by description", rng)


def _shortened(description: dict[str, Any]) -> dict[str, Any]:
    for component in description["components"]["schemas"].values():
        for name in _DEEP_FIELDS:
            if name in component.get("properties", {}):
                component["properties"][name] = {"type": "array", "items": {"type": "object"}, "maxItems": 3}
    return description


def _cases(operation: Any, mode: GenerationMode, count: int, seed: int) -> list[Any]:
    cases: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def collect(case: Any) -> None:
        cases.append(case)

    try:
        collect()
    except Unsatisfiable:  # No invalid request is possible.
        return []
    return cases


def _fuzz_request(case: Any, what: str, rng: random.Random) -> FuzzRequest:
    if isinstance(case.body, dict) and "messages" in case.body and rng.random() < 0.7:
        case.body = {**case.body, "messages": _PLAIN_MESSAGES}  # So that the other fields are validated, too.
    arguments = case.as_transport_kwargs(base_url="http://127.0.0.1")
    prepared = requests.Request(**arguments).prepare()
    body = prepared.body or b""
    body = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    headers = {"Content-Type": prepared.headers["Content-Type"]} if "Content-Type" in prepared.headers else {}
    request = FuzzRequest(what, case.method.upper(), prepared.path_url, body, headers, must_fail=False)
    return replace(request, abort_after_s=_ABORT_AFTER_S)
