# SPDX-License-Identifier: Apache-2.0
"""Selects the replica of a stage that a request runs in. Belongs to the orchestrator's thread."""

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

from vllm_omni.inputs import StageRequest
from vllm_omni.launch.stage_handle import StageHandle
from vllm_omni.metrics.stats import StageState

_BLOCK = 32
"""Tokens of a prompt that are compared at once."""
_MAX_BLOCKS = 1 << 16
_MAX_LEAD = 8
"""How many requests more than the least loaded replica one may have, to which others with its prefix go."""


class ReplicaSet:
    """The replicas of one stage."""

    def __init__(self, stages: Sequence[StageHandle], policy: str) -> None:
        """`policy`: see `StageRuntimeConfig.routing`."""
        self.stages = stages
        self._policy = policy
        self._turns = itertools.count()
        self._prefixes = _Prefixes()

    @property
    def is_outdated(self) -> bool:
        """Whether all of them wait for an update of their weights."""
        return all(stage.state is StageState.OUTDATED for stage in self.stages)

    @property
    def is_dead(self) -> bool:
        """Whether none of them works, or will soon."""
        return all(stage.state is StageState.DEAD for stage in self.stages)

    def take_new_requests(self, excluded: Collection[int] = ()) -> bool:
        """Whether one of them accepts more requests; those with these instance ids do not."""
        return any(not stage.credit.is_spent for stage in self.stages if stage.instance_id not in excluded)

    def select(self, request: StageRequest, excluded: Collection[int] = ()) -> StageHandle:
        """The replica for a request: one that is ready, if there is one, else one that restarts.

        Args:
            excluded: Instance ids of those that get no request as long as there are others.
        """
        candidates = self._candidates([s for s in self.stages if s.instance_id not in excluded] or self.stages)
        if len(candidates) == 1:
            return candidates[0]
        if self._policy == "round_robin":
            return candidates[next(self._turns) % len(candidates)]
        least = min(candidates, key=lambda stage: stage.num_requests)
        if self._policy == "least_loaded":
            return least
        instance_id = self._prefixes.find(request.prompt_token_ids)
        last = next((stage for stage in candidates if stage.instance_id == instance_id), least)
        selected = last if last.num_requests <= least.num_requests + _MAX_LEAD else least
        self._prefixes.add(request.prompt_token_ids, selected.instance_id)
        return selected

    def _candidates(self, stages: Sequence[StageHandle]) -> Sequence[StageHandle]:
        ready = [stage for stage in stages if stage.state is StageState.READY]
        with_room = [stage for stage in ready if not stage.credit.is_spent]
        alive = [stage for stage in stages if stage.state not in (StageState.DEAD, StageState.OUTDATED)]
        return with_room or ready or alive or stages


class _Prefixes:
    """The replicas of recent prompts, by hashes of their beginnings."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[int, int] = OrderedDict()

    def find(self, token_ids: Sequence[int]) -> int | None:
        """The replica of the prompt with the longest common beginning; None if there is none."""
        found = None
        for key in _block_hashes(token_ids):
            if key not in self._replicas:
                break
            found = self._replicas[key]
        return found

    def add(self, token_ids: Sequence[int], instance_id: int) -> None:
        for key in _block_hashes(token_ids):
            self._replicas[key] = instance_id
            self._replicas.move_to_end(key)
        while len(self._replicas) > _MAX_BLOCKS:
            self._replicas.popitem(last=False)


def _block_hashes(token_ids: Sequence[int]) -> Iterator[int]:
    """Hashes of each whole block and all tokens before it."""
    key = 0
    for start in range(0, len(token_ids) - _BLOCK + 1, _BLOCK):
        key = hash((key, *token_ids[start : start + _BLOCK]))
        yield key
