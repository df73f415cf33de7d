# SPDX-License-Identifier: Apache-2.0
"""Requests that schemathesis makes of a server's own OpenAPI description: as it says, and against what it says."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.fuzz.shots import Shot

# vLLM's descriptions of them have so many branches that making one request takes seconds. Bad ones are written by hand.
_DEEP_FIELDS = ("messages", "tools")
_PLAIN_MESSAGES = [{"role": "user", "content": "Hello"}]
# A server that is asked to work as long as this description allows would be at it for the rest of the day.
_LEAVES_AFTER_S = 2.0


def described_shots(description: dict[str, Any], each: int, seed: int) -> Iterator[Shot]:
    """About `each` requests of either kind for each operation that takes anything.

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
                yield _shot(case, f"{mode.value} by description", rng)


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
    except Unsatisfiable:  # Nothing can be wrong with it.
        return []
    return cases


def _shot(case: Any, what: str, rng: random.Random) -> Shot:
    if isinstance(case.body, dict) and "messages" in case.body and rng.random() < 0.7:
        case.body = {**case.body, "messages": _PLAIN_MESSAGES}  # So that the other fields are looked at, too.
    arguments = case.as_transport_kwargs(base_url="http://127.0.0.1")
    prepared = requests.Request(**arguments).prepare()
    body = prepared.body or b""
    body = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    headers = {"Content-Type": prepared.headers["Content-Type"]} if "Content-Type" in prepared.headers else {}
    shot = Shot(what, case.method.upper(), prepared.path_url, body, headers, must_fail=False)
    return replace(shot, leaves_after=_LEAVES_AFTER_S)
