# SPDX-License-Identifier: Apache-2.0
"""Requests in random order and random chunks, some aborted: the others' outputs equal those alone."""

import random

import pytest
import torch

from tests.engine.running import greedy, random_prompts
from tests.stage.running_engine import RunningEngine
from tests.stage.test_llm_engine import (
    AbortRequest,
    Stream,
    assert_equal,
    assert_nothing_is_left,
    first_part,
    next_part,
    whole,
)
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines.base import InboxItem

pytestmark = pytest.mark.slow

NUM_REQUESTS = 16
FEED = torch.randn(NUM_REQUESTS, 16, 128, generator=torch.Generator().manual_seed(4)) * 0.2
PROMPTS = random_prompts(*range(3, 3 + 9 * NUM_REQUESTS, 9), seed=6)
PARAMS = greedy(30)


@pytest.fixture(scope="module")
def alone(ar_session: RunningEngine) -> list[StageOutput]:
    outputs = []
    for index in range(NUM_REQUESTS):
        ar_session.put(whole(f"alone {index}", PROMPTS[index], PARAMS, FEED[index]))
        outputs += ar_session.finish(f"alone {index}")
    return outputs


def items_of(index: int, aborted: bool) -> list[InboxItem]:
    """The inbox items of one request, cut at random positions."""
    request_id, prompt, feed = str(index), PROMPTS[index], FEED[index]
    cuts = sorted(random.sample(range(17), random.randint(0, 5)))
    if not cuts:
        items: list[InboxItem] = [whole(request_id, prompt, PARAMS, feed)]
    else:
        items = [first_part(request_id, prompt, PARAMS, feed, cuts[0])]
        ends = [*cuts[1:], 16]
        parts = zip(cuts, ends, strict=True)
        items += [next_part(request_id, prompt, feed, *part, is_last=i == len(ends)) for i, part in enumerate(parts, 1)]
    items[0].streams_output = random.random() < 0.5
    if aborted:
        items.insert(random.randint(1, len(items)), AbortRequest(request_id))
    return items


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(ar, alone, seed):
    random.seed(seed)
    aborted = set(random.sample(range(NUM_REQUESTS), 4))
    queues = [items_of(index, index in aborted) for index in range(NUM_REQUESTS)]
    while queues:
        queue = random.choice(queues)
        ar.put(queue.pop(0))
        if not queue:
            queues.remove(queue)
        if random.random() < 0.3:
            ar.wait_asleep()
    ar.wait_asleep()
    for index, expected in enumerate(alone):
        items = ar.items[str(index)]
        if index in aborted and all(isinstance(item, Stream) for item in items):
            continue
        assert_equal(ar.output(str(index)), expected)
    assert_nothing_is_left(ar)
