# SPDX-License-Identifier: Apache-2.0
"""What the tables of transformers do not tell of its classes that transcribe, for each class: a few lines each."""

from functools import cached_property
from typing import Any, Literal

import msgspec

from vllm_omni.errors import InvalidRequestError
from vllm_omni.model_executor.transcription_model import GeneratingModel

_CODES = """
af:afr am:amh ar:arb as:asm az:azj be:bel bg:bul bn:ben bs:bos ca:cat cs:ces cy:cym da:dan de:deu el:ell en:eng es:spa
et:est eu:eus fa:pes fi:fin fr:fra ga:gle gl:glg gu:guj ha:hau he:heb hi:hin hr:hrv hu:hun hy:hye id:ind is:isl it:ita
ja:jpn jw:jav ka:kat kk:kaz km:khm kn:kan ko:kor lo:lao lt:lit lv:lvs mk:mkd ml:mal mn:khk mr:mar ms:zsm mt:mlt my:mya
ne:npi nl:nld no:nob nn:nno pa:pan pl:pol ps:pbt pt:por ro:ron ru:rus sd:snd sk:slk sl:slv sn:sna so:som sr:srp sv:swe
sw:swh ta:tam te:tel tg:tgk th:tha tl:tgl tr:tur uk:ukr ur:urd uz:uzn vi:vie yo:yor zh:cmn
"""
_ISO_639_3 = dict(pair.split(":") for pair in _CODES.split())
"""By the code of two letters that OpenAI's API has: the one of three that Seamless has."""


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
        code = _ISO_639_3.get(language, language)
        known = self.module.generation_config.text_decoder_lang_to_code_id
        if code not in known:
            problem = (
                "this model has to be told" if language is None else f"this model does not write {language!r}; set"
            )
            raise InvalidRequestError(f"language: {problem} the language that is spoken, one of {', '.join(known)}", "")
        return {**super().options(parameters), "tgt_lang": code}
