# SPDX-License-Identifier: Apache-2.0
"""What the tables of transformers do not tell of its classes that transcribe, for each class: a few lines each."""

from functools import cached_property
from typing import Any, Literal

import msgspec

from vllm_omni.errors import InvalidRequestError
from vllm_omni.model_executor.language_codes import ISO_639_3
from vllm_omni.model_executor.transcription_model import GeneratingModel


class KyutaiSpeechToText(GeneratingModel):
    """Writes a token for each frame of its sound, and no more."""

    max_new_tokens = None


class SeamlessM4TForSpeechToText(GeneratingModel):
    """Writes the language that it is told to, whichever is spoken."""

    @cached_property
    def parameters(self) -> type[msgspec.Struct]:
        own = [("language", str | None, None), ("task", Literal["transcribe", "translate"], "transcribe")]
        return msgspec.defstruct("TranscriptionParameters", own, frozen=True)

    def options(self, parameters: Any) -> dict[str, Any]:
        language = "eng" if parameters.task == "translate" else parameters.language
        code = ISO_639_3.get(language, language)
        known = self.module.generation_config.text_decoder_lang_to_code_id
        if code not in known:
            problem = (
                "this model has to be told" if language is None else f"this model does not write {language!r}; set"
            )
            raise InvalidRequestError(f"language: {problem} the language that is spoken, one of {', '.join(known)}", "")
        return {**super().options(parameters), "tgt_lang": code}
