# SPDX-License-Identifier: Apache-2.0
"""The verbs of an operator: what a running stage can be told to do besides its requests.

The list is closed. Names, arguments and results are those of vLLM's methods, but for `Freeze` and `Thaw`, of which
vLLM's pause is made. A kind of stage says which verbs it knows (`StageKind.verbs`); the engine of a stage does them
between two steps (`StageEngine.control`).
"""

from typing import Any

import msgspec

DEFAULT_WEIGHT_VERSION = "default"
"""vLLM's, of the weights of a checkpoint."""


class Verb(msgspec.Struct, tag=True, kw_only=True, frozen=True):
    """Base of all verbs."""


class Freeze(Verb, frozen=True):
    """Compute no further step. Requests, and what was computed for them, are kept."""


class Thaw(Verb, frozen=True):
    """Go on after `Freeze`."""


class ResetPrefixCache(Verb, frozen=True):
    """Forget the prefix cache, and the rows that are kept with it. Result: whether nothing held it.

    Attributes:
        reset_running_requests: Preempt the running requests, which hold it otherwise.
        reset_connector: That of the stage's KV connector, too.
    """

    reset_running_requests: bool = False
    reset_connector: bool = False


class ResetMMCache(Verb, frozen=True):
    """Forget preprocessed media."""


class ResetEncoderCache(Verb, frozen=True):
    """Forget encoded media: pictures and sounds of prompts, reference sounds, and prompts of diffusion."""


class StartProfile(Verb, frozen=True):
    """Start the profiler of `profiler_config`. Attributes: vLLM's `start_profile`."""

    profile_prefix: str | None = None
    delay_iterations: int | None = None
    max_iterations: int | None = None
    profiler_kwargs: dict[str, Any] | None = None


class StopProfile(Verb, frozen=True):
    """End it, and write its trace."""


class AddLoRA(Verb, frozen=True):
    """Load an adapter, so that one that does not fit is found before a request names it. Attributes: vLLM's
    `LoRARequest`."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class Sleep(Verb, frozen=True):
    """Give memory back. The stage computes nothing meanwhile.

    Attributes:
        level: 1: the weights move to the host, and the KV cache is discarded. 2: both are discarded, and the weights
            are loaded again by `WakeUp`.
    """

    level: int = 1


class WakeUp(Verb, frozen=True):
    """Take the memory again. Result: whether all of it is there.

    Attributes:
        tags: `weights`, `kv_cache`; None: both.
    """

    tags: list[str] | None = None


class CheckWeights(Verb, frozen=True):
    """Compare names, shapes and kinds of new weights with those of the stage's checkpoint; they are not read.

    Attributes:
        weights_path: Their folder; see `stage.weights`.
    """

    weights_path: str


class LoadWeights(Verb, frozen=True):
    """Load new weights beside those that the stage computes with."""

    weights_path: str


class CommitWeights(Verb, frozen=True):
    """Compute with the weights that were loaded, and forget what was computed with the others.

    Attributes:
        weight_version: What outputs call them.
        weights_path: Where they came from: the next process of the stage loads them from there.
    """

    weight_version: str
    weights_path: str


class DropWeights(Verb, frozen=True):
    """Drop the weights that were loaded, if there are any."""


class UpdateWeightVersion(Verb, frozen=True):
    """Call the weights by another version."""

    new_version: str


class CollectiveRPC(Verb, frozen=True):
    """Call a method of each worker. Result: a list of what they return, as JSON or as text.

    Attributes:
        method: Its name.
        function: Instead: a pickled function, which gets the worker.
    """

    method: str = ""
    function: bytes | None = None
    timeout: float | None = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


WEIGHT_VERBS: frozenset[type[Verb]] = frozenset(
    {CheckWeights, LoadWeights, CommitWeights, DropWeights, UpdateWeightVersion}
)
"""The verbs of a stage whose weights can change while it runs."""

AnyVerb = (
    Freeze
    | Thaw
    | ResetPrefixCache
    | ResetMMCache
    | ResetEncoderCache
    | StartProfile
    | StopProfile
    | AddLoRA
    | Sleep
    | WakeUp
    | CheckWeights
    | LoadWeights
    | CommitWeights
    | DropWeights
    | UpdateWeightVersion
    | CollectiveRPC
)
"""A verb as a message carries it."""
