# SPDX-License-Identifier: Apache-2.0
"""What the oracles of all models share: parameters, results, and capturing intermediate results of `generate`."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class OracleParams:
    """The parameters of one prompt.

    Attributes:
        thinker_min_tokens, talker_min_tokens: Equal to the maximum they fix the length of the output.
        speaker: Case-insensitive; None for the model's default.
        repetition_penalty: The talker's.
        wave_seed: Of the noise of Qwen2.5-Omni's wave: that of a generator that draws `randn([1, 2 * codes, 80])`.
            Qwen3-Omni has no noise.
    """

    thinker_max_tokens: int
    talker_max_tokens: int
    thinker_min_tokens: int = 0
    talker_min_tokens: int = 0
    speaker: str | None = None
    repetition_penalty: float = 1.05
    wave_seed: int = 0
    use_audio_in_video: bool = False

    def generate_kwargs(self) -> dict[str, Any]:
        """Arguments of both models' `generate`."""
        return {
            "use_audio_in_video": self.use_audio_in_video,
            "thinker_do_sample": False,
            "thinker_max_new_tokens": self.thinker_max_tokens,
            "thinker_min_new_tokens": self.thinker_min_tokens,
            "talker_do_sample": False,
            "talker_max_new_tokens": self.talker_max_tokens,
            "talker_min_new_tokens": self.talker_min_tokens,
            "talker_repetition_penalty": self.repetition_penalty,
        }


@dataclass
class OracleResult:
    """The output for one prompt.

    Attributes:
        prompt_token_ids: Placeholders expanded.
        thinker_token_ids: Generated, with the end-of-turn token if there is one.
        talker_token_ids: First code of each frame, as sampled, with the stop token if there is one.
        codes: int64 `[code groups, frames]`, without the stop token. Qwen3-Omni drops the last frame at the
            length limit, Qwen2.5-Omni does not.
        audio: float32 `[samples]` at 24 kHz; empty if there is no speech.
        talker_inputs: Input tensors of the talker, by HF's names (`inputs_embeds` `[1, len, hidden]` and
            `thinker_reply_part` or `trailing_text_hidden`, ...); empty if it did not run.
        seconds: Wall time, including preprocessing.
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
        """Rows of the prompt and of all generated tokens but the last, which is not fed back.

        Args:
            layer: 0 for the input embeddings of layer 0 (with media), k for the output of layer k - 1, before visual
                features are added there, and -1 for the last one after the final norm.

        Returns:
            `[len(prompt_token_ids) + len(thinker_token_ids) - 1, hidden]`.
        """
        return torch.cat([step[layer] for step in self.thinker_steps], dim=1)[0]


class NoSpeech(Exception):
    """The result has no audio: the thinker's reply has one token, or the talker's first token is the end.

    transformers 5.19 fails with a shape error in these cases.
    """


class Reference(ABC):
    """One model in transformers, with repairs of its bugs with valid input.

    Captures intermediate results by wrapping `generate` of the loaded model's parts (not of their classes).

    Attributes:
        model: The result of `from_pretrained`, in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._result = OracleResult(prompt_token_ids=[])
        self._thinker_generate = model.thinker.generate
        self._talker_generate = model.talker.generate
        model.thinker.generate = self._on_thinker
        model.talker.generate = self._on_talker

    def run(self, inputs: dict[str, Any], params: OracleParams, result: OracleResult) -> None:
        """Writes the output for `inputs`, the tensors of one prompt, into `result`."""
        self._result = result
        try:
            with contextlib.suppress(NoSpeech):
                result.audio = self.generate(inputs, params)
        finally:
            self._result = OracleResult(prompt_token_ids=[])

    @abstractmethod
    def generate(self, inputs: dict[str, Any], params: OracleParams) -> torch.Tensor:
        """Calls the model's `generate`; float32 `[samples]`."""

    @abstractmethod
    def run_talker(self, generate: Callable[..., Any], kwargs: dict[str, Any], result: OracleResult) -> Any:
        """Calls the talker's own `generate` and records its tokens and codes in `result`.

        Raises:
            NoSpeech: The first token is the end.
        """

    def _on_thinker(self, **kwargs: Any) -> Any:
        output = self._thinker_generate(**kwargs)
        result = self._result
        result.thinker_token_ids = output.sequences[0, len(result.prompt_token_ids) :].tolist()
        result.thinker_steps = output.hidden_states
        if len(result.thinker_token_ids) < 2:
            raise NoSpeech
        return output

    def _on_talker(self, **kwargs: Any) -> Any:
        result = self._result
        result.talker_inputs = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        return self.run_talker(self._talker_generate, kwargs, result)
