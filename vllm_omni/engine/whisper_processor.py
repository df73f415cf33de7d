# SPDX-License-Identifier: Apache-2.0
"""The processor of Whisper, made of its parts.

vLLM has transformers load it with the tokenizer as an argument: transformers copies that, with all of its words, three
times, and loads another one; vLLM asks so wherever a processor is made. On two cores a stage of Whisper tiny was ready
after 6.2 s so, and is after 3.2 s.
"""

import dataclasses

from transformers import WhisperProcessor
from vllm.model_executor.models.whisper import WhisperForConditionalGeneration, WhisperProcessingInfo
from vllm.transformers_utils.processor import cached_feature_extractor_from_config


class _ProcessingInfo(WhisperProcessingInfo):
    def get_hf_processor(self, **kwargs: object) -> WhisperProcessor:
        return WhisperProcessor(cached_feature_extractor_from_config(self.ctx.model_config), self.ctx.tokenizer)


def make_processor_of_parts() -> None:
    """Has vLLM do so for Whisper in this process. May be called twice."""
    factories = WhisperForConditionalGeneration._processor_factory
    WhisperForConditionalGeneration._processor_factory = dataclasses.replace(factories, info=_ProcessingInfo)
