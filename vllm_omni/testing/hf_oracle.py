# SPDX-License-Identifier: Apache-2.0
"""What HF transformers makes of the same weights and the same prompts: the oracle of our tests and benchmarks.

Greedy only. Where transformers 5.19 fails on valid input, the repair stands here, once, with its reason.
Takes prompts as vLLM takes them; knows nothing of vllm_omni's engines.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    ProcessorMixin,
    Qwen3OmniMoeForConditionalGeneration,
)

from vllm_omni.testing.media import SAMPLE_RATE


@dataclass
class OracleResult:
    """One prompt's answer.

    Attributes:
        prompt_token_ids: Placeholders expanded.
        thinker_token_ids: Generated, with the end-of-turn token if there is one.
        talker_token_ids: First code of each frame, as sampled, with codec_eos if there is one.
        codes: int64 `[code groups, frames]`. A stop drops no frame, the length limit drops the last one.
        audio: float32 `[samples]` at 24 kHz; empty if there is nothing to say.
        talker_inputs: Tensors that the talker was given, by HF's names (`inputs_embeds` `[1, len, hidden]`,
            `trailing_text_hidden`, `tts_pad_embed`, `talker_input_ids`, ...); empty if it was not run.
        seconds: Wall time of the whole, preprocessing included.
    """

    prompt_token_ids: list[int]
    thinker_token_ids: list[int] = field(default_factory=list)
    talker_token_ids: list[int] = field(default_factory=list)
    codes: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))
    audio: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    talker_inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    thinker_steps: tuple[tuple[torch.Tensor, ...], ...] = ()

    def thinker_states(self, layer: int) -> torch.Tensor:
        """Rows of the prompt and of all generated tokens but the last, which is never fed back.

        Args:
            layer: 0 for the embeddings that enter layer 0 (media merged in), k for what leaves layer k - 1,
                before any visual feature is added there, and -1 for the last one after the final norm.

        Returns:
            `[len(prompt_token_ids) + len(thinker_token_ids) - 1, hidden]`.
        """
        return torch.cat([step[layer] for step in self.thinker_steps], dim=1)[0]


@dataclass
class TextOracleResult:
    """One prompt's answer by a text model.

    Attributes:
        token_ids: Generated, with the end-of-sequence token if there is one.
        hidden_states: `[prompt + generated - 1, hidden]`, after the final norm.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    hidden_states: torch.Tensor
    seconds: float


class HFOracle:
    """Qwen3-Omni-MoE as transformers runs it, one prompt at a time."""

    def __init__(self, model: str | Path, dtype: torch.dtype = torch.float32, num_threads: int | None = None) -> None:
        """
        Args:
            num_threads: Threads of torch while generating. Tiny models are fastest on 1, by far; None leaves it.
        """
        self.num_threads = num_threads
        self.processor = AutoProcessor.from_pretrained(model)
        self.model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(model, dtype=dtype).eval()
        _repair_talker_config(self.model)
        self._recorder = _Recorder(self.model)

    def generate(
        self,
        prompt: dict[str, Any],
        *,
        thinker_max_tokens: int,
        talker_max_tokens: int,
        thinker_min_tokens: int = 0,
        talker_min_tokens: int = 0,
        speaker: str = "Ethan",
        repetition_penalty: float = 1.05,
    ) -> OracleResult:
        """Answers one prompt, greedily.

        Args:
            prompt: `{"prompt", "multi_modal_data", "mm_processor_kwargs"}`, as `media.make_prompt` makes it.
            thinker_min_tokens, talker_min_tokens: No end before so many tokens. Equal to the maximum they
                fix the length of the output.
            repetition_penalty: The talker's.
        """
        started = time.perf_counter()
        inputs = hf_inputs(self.processor, prompt)
        result = OracleResult(prompt_token_ids=inputs["input_ids"][0].tolist())
        with torch_threads(self.num_threads), self._recorder.into(result), contextlib.suppress(_NothingToSay):
            _, audio = self.model.generate(
                **inputs,
                return_audio=True,
                speaker=speaker,
                use_audio_in_video=prompt.get("mm_processor_kwargs", {}).get("use_audio_in_video", False),
                thinker_do_sample=False,
                thinker_max_new_tokens=thinker_max_tokens,
                thinker_min_new_tokens=thinker_min_tokens,
                # The default is the real checkpoint's <|im_end|>, whatever the configuration says.
                thinker_eos_token_id=self.model.config.im_end_token_id,
                talker_do_sample=False,
                talker_max_new_tokens=talker_max_tokens,
                talker_min_new_tokens=talker_min_tokens,
                talker_repetition_penalty=repetition_penalty,
            )
            result.audio = audio.reshape(-1)
        result.seconds = time.perf_counter() - started
        return result


class HFTextOracle:
    """A text model as transformers runs it, one prompt at a time."""

    def __init__(self, model: str | Path, dtype: torch.dtype = torch.float32, num_threads: int | None = None) -> None:
        self.num_threads = num_threads
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    def generate(self, prompt: str | list[int], *, max_tokens: int, min_tokens: int = 0) -> TextOracleResult:
        """Answers one prompt, given as text or as token ids, greedily."""
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


def hf_inputs(processor: ProcessorMixin, prompt: dict[str, Any]) -> dict[str, Any]:
    """A prompt as vLLM takes it, as the tensors that a HF model takes, for a batch of one."""
    media = prompt.get("multi_modal_data", {})
    arguments = {hf_name: media[name] for name, hf_name in _HF_NAMES.items() if name in media}
    if "audio" in arguments:
        arguments["audio"] = [_samples(clip, rate) for clip, rate in arguments["audio"]]
    options = prompt.get("mm_processor_kwargs", {})
    return dict(processor(text=prompt["prompt"], return_tensors="pt", **arguments, **options))


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Runs the block with `count` threads of torch; None leaves them alone."""
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


def _repair_talker_config(model: Qwen3OmniMoeForConditionalGeneration) -> None:
    """Audio together with a picture or a video raises AttributeError in transformers 5.19: the talker's
    `get_rope_index` reads `audio_config`, which only the thinker's configuration has."""
    thinker_config: Any = model.config.thinker_config
    model.talker.config.audio_config = thinker_config.audio_config


class _NothingToSay(Exception):
    """transformers 5.19 fails with a shape error where the right answer is no audio: where the thinker's
    reply is one token long, and where the talker's first token is the end. Raised instead of that."""


class _Recorder:
    """Listens in on one model's `generate`, by shadowing methods of that object (not of its class)."""

    def __init__(self, model: Qwen3OmniMoeForConditionalGeneration) -> None:
        self._result = OracleResult(prompt_token_ids=[])
        self._thinker_generate = model.thinker.generate
        self._talker_generate = model.talker.generate
        model.thinker.generate = self._on_thinker
        model.talker.generate = self._on_talker

    @contextlib.contextmanager
    def into(self, result: OracleResult) -> Iterator[None]:
        """Within the block, what the model does is written to `result`."""
        self._result = result
        try:
            yield
        finally:
            self._result = OracleResult(prompt_token_ids=[])

    def _on_thinker(self, **kwargs: Any) -> Any:
        output = self._thinker_generate(**kwargs)
        result = self._result
        result.thinker_token_ids = output.sequences[0, len(result.prompt_token_ids) :].tolist()
        result.thinker_steps = output.hidden_states
        if len(result.thinker_token_ids) < 2:
            raise _NothingToSay
        return output

    def _on_talker(self, **kwargs: Any) -> Any:
        result = self._result
        result.talker_inputs = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        output = self._talker_generate(**kwargs)
        result.talker_token_ids = output.sequences[0].tolist()
        frames = [step[-1] for step in output.hidden_states if step[-1] is not None]  # each [1, code groups]
        if not frames:
            raise _NothingToSay
        result.codes = torch.cat(frames).T.contiguous()
        return output
