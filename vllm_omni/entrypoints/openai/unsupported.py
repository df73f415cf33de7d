# SPDX-License-Identifier: Apache-2.0
"""What vLLM's engine protocol has and a pipeline of stages does not: each says so when it is asked for."""

from collections.abc import AsyncGenerator, Iterable
from typing import Any, NoReturn

from vllm.engine.protocol import EngineClient
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput


class UnsupportedEngineClient(EngineClient):
    """The part of `EngineClient` that only other servers' endpoints use. All raise `NotImplementedError`."""

    def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        _not_served("pooling")

    async def abort(self, request_id: str | Iterable[str]) -> None:
        _not_served("abort by id")

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        """Stages do not transfer KV caches between engines."""

    async def start_profile(self, *args: Any, **kwargs: Any) -> None:
        _not_served("profiling")

    async def stop_profile(self) -> None:
        _not_served("profiling")

    async def reset_encoder_cache(self) -> None:
        _not_served("resetting caches")

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        _not_served("resetting caches")

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        _not_served("sleeping")

    async def release_kv_cache_memory(self) -> None:
        _not_served("sleeping")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        _not_served("sleeping")

    async def is_sleeping(self) -> bool:
        return False

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Adapters are loaded by the stage, with the first request that names them."""
        return True

    async def pause_generation(self, **kwargs: Any) -> None:
        _not_served("pausing")

    async def resume_generation(self) -> None:
        _not_served("pausing")

    async def is_paused(self) -> bool:
        return False


def _not_served(what: str) -> NoReturn:
    raise NotImplementedError(f"a pipeline of stages does not serve {what}")
