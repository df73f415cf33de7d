# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache of encoded media, which counts what it finds: vLLM has no figure for it."""

from vllm.config import VllmConfig
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager
from vllm.v1.request import Request


class CountingEncoderCacheManager(EncoderCacheManager):
    """
    Attributes:
        num_queries: Media of requests that had to be encoded, or were found. An item whose tokens are all in the prefix
            cache needs neither.
        num_hits: Those that were found.
    """

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        self.num_queries = self.num_hits = 0

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: VllmConfig) -> EncoderCacheManager:
        """vLLM's choice for a model that needs another one."""
        if vllm_config.model_config.is_encoder_decoder:
            return EncoderDecoderCacheManager(cache_size)
        return cls(cache_size)

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        is_known = input_id in self.get_cached_input_ids(request)  # found for an earlier chunk of its prompt
        is_found = super().check_and_update_cache(request, input_id)
        if is_found and not is_known:
            self.num_queries += 1
            self.num_hits += 1
        return is_found

    def allocate(self, request: Request, input_id: int) -> None:
        self.num_queries += 1
        super().allocate(request, input_id)
