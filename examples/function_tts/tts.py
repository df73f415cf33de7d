# SPDX-License-Identifier: Apache-2.0
"""A library that reads text aloud, Hibari, as a model of vllm_omni."""

import os

import torch

from vllm_omni import FunctionStage

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # of Hibari's runtime


class Speech(FunctionStage):
    def start(self):
        from hibari import Hibari  # the server imports this file, too

        self.voice = Hibari("heart")

    def begin(self, request, parameters):
        return None  # what later calls for this request need

    def window(self, state, sources):
        (source,) = sources.values()
        for samples in self.voice.stream(source.completions[0].text):
            yield {"audio": torch.from_numpy(samples)}  # a sentence, sent at once
