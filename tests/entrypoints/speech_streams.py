# SPDX-License-Identifier: Apache-2.0
"""Speech of several prompts that is streamed, and of which some is aborted."""

from collections.abc import Mapping

import torch

from vllm_omni import OmniLLM
from vllm_omni.events import CompletedEvent
from vllm_omni.inputs import OmniPrompt


def check_left_stream(llm: OmniLLM, prompts: Mapping[str, OmniPrompt], expected: Mapping[str, torch.Tensor]) -> None:
    """Leaves the stream of these prompts, which aborts the rest, when all but two have ended: each with a wave of its
    own of those `expected`, and some in several windows."""
    parts: dict[str, list[torch.Tensor]] = {}
    ended: list[str] = []
    for event in llm.generate(list(prompts.values()), stream=True, use_tqdm=False):
        if isinstance(event, CompletedEvent):
            wave = torch.cat(parts[event.request_id])
            ended += [name for name, whole in expected.items() if _are_equal(wave, whole)]
            if len(ended) == len(prompts) - 2:
                break
        elif "audio" in event.multimodal_output:
            parts.setdefault(event.request_id, []).append(event.multimodal_output["audio"])
    assert len(set(ended)) == len(prompts) - 2
    assert max(map(len, parts.values())) > 2, "sound comes in windows"


def _are_equal(wave: torch.Tensor, whole: torch.Tensor) -> bool:
    return wave.shape == whole.shape and torch.allclose(wave, whole, rtol=0, atol=1e-4)
