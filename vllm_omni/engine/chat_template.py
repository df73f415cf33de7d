# SPDX-License-Identifier: Apache-2.0
"""The chat template of a model that reads text alone.

vLLM prefers the template of a model's processor, and looks for one by loading it. Of a model without a processor
transformers loads the tokenizer then, for a second time: of one with 49,000 words 0.4 s and 30 MB.
"""

from pathlib import Path

from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from vllm.config import ModelConfig
from vllm.tokenizers import cached_tokenizer_from_config

_OF_PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_MAY_NAME_ONE = ("config.json", "tokenizer_config.json")


def text_chat_template(config: ModelConfig) -> str | None:
    """The tokenizer's only template, which vLLM would find; None if there may be a processor, as for all that is not in
    a folder of this machine."""
    folder = Path(config.tokenizer)
    if not folder.is_dir() or type(config.hf_config) in PROCESSOR_MAPPING:
        return None
    texts = [path.read_text() for name in _MAY_NAME_ONE if (path := folder / name).is_file()]
    if any((folder / name).exists() for name in _OF_PROCESSORS) or any("rocessor" in text for text in texts):
        return None
    template = getattr(cached_tokenizer_from_config(config), "chat_template", None)
    return template if isinstance(template, str) else None
