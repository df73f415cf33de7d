# SPDX-License-Identifier: Apache-2.0
"""How many tokens of a prompt an image or a video becomes, of its size alone.

The model's own processor says it, for tensors without memory (on the meta device), so that a prompt that is too long is
refused before its media is decoded and resized: a model reads every frame in a size of its own, which takes much more
memory than a small file, or even its decoded frames.
"""

import copy
import logging
import threading
from typing import Literal

import torch
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.utils.func_utils import get_allowed_kwarg_only_overrides

logger = logging.getLogger("vllm.omni.server")


class MediaTokens:
    """
    Attributes:
        max_tokens: Of a prompt.
    """

    def __init__(self, processor: BaseMultiModalProcessor, max_tokens: int) -> None:
        """
        Args:
            processor: The model's. It is copied: tokenizers serve one thread.
        """
        self.max_tokens = max_tokens
        self._dummy_inputs = processor.dummy_inputs
        self._processor = copy.deepcopy(processor.info.get_hf_processor())
        # As vLLM calls it, whose own call reads what it returns.
        settings = processor.info.ctx.get_merged_mm_kwargs({})
        self._settings = get_allowed_kwarg_only_overrides(
            self._processor, settings, requires_kw_only=False, allow_var_kwargs=True
        )
        self._lock = threading.Lock()

    def count(self, kind: Literal["image", "video"], num_frames: int, height: int, width: int) -> int:
        """How many tokens a picture or video has.

        0 if the processor reads the pixels, or does not read such media at all, which it reports itself.
        """
        frame = (3, height, width)
        media = torch.empty(frame if kind == "image" else (num_frames, *frame), dtype=torch.uint8, device="meta")
        try:
            with self._lock:
                text = self._dummy_inputs.get_dummy_text({kind: 1})
                made = self._processor(text=text, **{f"{kind}s": [media]}, **self._settings)
        except Exception as error:  # Processors raise many types, and one that reads pixels finds none.
            logger.debug("the model's processor does not tell the tokens of %s: %r", kind, error)
            return 0
        return len(made["input_ids"][0])
