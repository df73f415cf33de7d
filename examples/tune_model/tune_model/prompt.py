# SPDX-License-Identifier: Apache-2.0
"""The prompt: a text, an instrument and a tempo."""

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_omni import StageInput
from vllm_omni.model_executor.prompt_processor import PromptProcessor, read_choice, read_text

DEFAULT_TEMPO = 240.0


class TunePromptProcessor(PromptProcessor):
    """`speaker` is an instrument, so that `/v1/audio/speech` selects it as `voice`; `tempo` is in beats per minute."""

    fields: ClassVar[tuple[str, ...]] = ("prompt", "speaker", "tempo")

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple(self.hf_config.instruments)

    def process(self, given: Mapping[str, Any]) -> StageInput:
        text = read_text(given["prompt"], "prompt")
        speaker = read_choice(given.get("speaker", self.voices[0]), "speaker", self.voices)
        tempo = given.get("tempo", DEFAULT_TEMPO)
        if not isinstance(tempo, (int, float)) or not 40 <= tempo <= 400:
            raise ValueError(f"tempo {tempo!r} is no number of beats per minute from 40 to 400")
        return StageInput(
            prompt_token_ids=self.tokenizer.encode(text),
            additional_information={"speaker": speaker, "tempo": float(tempo)},  # `options` of the synthesizer
            stop_token_ids=[self.hf_config.end_id],
        )
