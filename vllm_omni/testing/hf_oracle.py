# SPDX-License-Identifier: Apache-2.0
"""The output of HF transformers for the same weights and prompts: the oracle of our tests and benchmarks.

Greedy only. `vllm_omni.testing.oracles` repairs bugs of transformers 5.19 with valid input, each with its reason. Takes
prompts in vLLM's format; independent of vllm_omni's engines.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer, ProcessorMixin

from vllm_omni.testing.media import SAMPLE_RATE, Prompt
from vllm_omni.testing.oracles.base import OracleParams, OracleResult
from vllm_omni.testing.oracles.qwen2_5_omni import Qwen2_5OmniReference
from vllm_omni.testing.oracles.qwen3_omni_moe import Qwen3OmniMoeReference

__all__ = ["HFOracle", "HFTextOracle", "OracleResult", "TextOracleResult", "hf_inputs", "torch_threads"]

REFERENCES: dict[str, type[Qwen2_5OmniReference] | type[Qwen3OmniMoeReference]] = {
    "qwen2_5_omni": Qwen2_5OmniReference,
    "qwen3_omni_moe": Qwen3OmniMoeReference,
}
"""By the `model_type` of a checkpoint's configuration."""


@dataclass
class TextOracleResult:
    """The output of a text model for one prompt.

    Attributes:
        token_ids: Generated, with the end-of-sequence token if there is one.
        hidden_states: `[prompt + generated - 1, hidden]`, after the final norm.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    hidden_states: torch.Tensor
    seconds: float


class HFOracle:
    """An omni model in transformers, with repairs, one prompt at a time.

    Attributes:
        model: The model itself, to compare parts of it.
    """

    def __init__(
        self,
        model: str | Path,
        dtype: torch.dtype = torch.float32,
        num_threads: int | None = None,
        device: str = "cpu",
    ) -> None:
        """
        Args:
            model: Folder or name of a checkpoint whose `model_type` is one of `REFERENCES`.
            num_threads: Threads of torch while generating. Tiny models are fastest on 1, by far; None: no change.
        """
        self.num_threads = num_threads
        self.processor = AutoProcessor.from_pretrained(model)
        self._reference = REFERENCES[AutoConfig.from_pretrained(model).model_type](model, dtype)
        self.model = self._reference.model.to(device)

    def generate(self, prompt: Prompt, **params: Any) -> OracleResult:
        """The greedy output for one prompt.

        Args:
            prompt: `{"prompt", "multi_modal_data", "mm_processor_kwargs"}`, as from `media.make_prompt`.
            params: Fields of `OracleParams`.
        """
        started = time.perf_counter()
        inputs = hf_inputs(self.processor, prompt)
        result = OracleResult(prompt_token_ids=inputs["input_ids"][0].tolist())
        inputs = {name: self._as_model(value) for name, value in inputs.items()}
        use_audio = prompt.get("mm_processor_kwargs", {}).get("use_audio_in_video", False)
        with torch_threads(self.num_threads):
            self._reference.run(inputs, OracleParams(use_audio_in_video=use_audio, **params), result)
        result.audio = result.audio.float().cpu()
        result.seconds = time.perf_counter() - started
        return result

    def _as_model(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self.model.device, self.model.dtype if value.is_floating_point() else None)


class HFTextOracle:
    """A text model in transformers, one prompt at a time."""

    def __init__(self, model: str | Path, dtype: torch.dtype = torch.float32, num_threads: int | None = None) -> None:
        self.num_threads = num_threads
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    def generate(self, prompt: str | list[int], *, max_tokens: int, min_tokens: int = 0) -> TextOracleResult:
        """The greedy output for one prompt, which is text or token ids."""
        started = time.perf_counter()
        prompt_token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        with torch_threads(self.num_threads), torch.no_grad():
            result = self.model.generate(
                torch.tensor([prompt_token_ids]),
                max_new_tokens=max_tokens,
                min_new_tokens=min_tokens,
                do_sample=False,
                output_hidden_states=True,
                return_dict_in_generate=True,
            )
        return TextOracleResult(
            prompt_token_ids=prompt_token_ids,
            token_ids=result.sequences[0, len(prompt_token_ids) :].tolist(),
            hidden_states=torch.cat([step[-1] for step in result.hidden_states], dim=1)[0],
            seconds=time.perf_counter() - started,
        )


def hf_inputs(processor: ProcessorMixin, prompt: Prompt) -> dict[str, Any]:
    """Converts a prompt in vLLM's format to the input tensors of an HF model, for a batch of one."""
    media = prompt.get("multi_modal_data", {})
    arguments = {hf_name: media[name] for name, hf_name in _HF_NAMES.items() if name in media}
    if "audio" in arguments:
        arguments["audio"] = [_samples(clip, rate) for clip, rate in arguments["audio"]]
    options = prompt.get("mm_processor_kwargs", {})
    return dict(processor(text=prompt["prompt"], return_tensors="pt", **arguments, **options))


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Runs the block with `count` threads of torch; None: no change."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_HF_NAMES = {"image": "images", "audio": "audio", "video": "videos"}


def _samples(clip: Any, rate: int) -> Any:
    if rate != SAMPLE_RATE:
        raise ValueError(f"the oracle does not resample: audio of {rate} Hz, not {SAMPLE_RATE}")
    return clip
