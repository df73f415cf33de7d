# SPDX-License-Identifier: Apache-2.0
"""A stage function whose import takes long, as loading a model does."""

import time
from collections.abc import Mapping
from typing import Any

import torch

from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput

time.sleep(1.0)


def speak(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
    (source,) = sources.values()
    text = source.completions[0].text + ">b"
    return {"text": text, "bytes": torch.zeros(request.options.get("size", 0), dtype=torch.uint8)}
