# SPDX-License-Identifier: Apache-2.0
"""Hibari, English. The package: hibari-tts (Apache-2.0)."""

import os

from vllm_omni import FunctionStage

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # of the runtime


class Speech(FunctionStage):
    def start(self):
        from hibari import Hibari

        self.voice = Hibari("heart")

    def begin(self, request, parameters):
        return None

    def window(self, state, sources):
        (source,) = sources.values()
        for samples in self.voice.stream(source.completions[0].text):
            yield {"audio": samples}
