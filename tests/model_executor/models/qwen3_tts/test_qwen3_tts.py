# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS against what the authors' package made of the same weights."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.model_executor.models.speech import CodecTests, CodeTests, SpeechCodec, SpeechModel, start_codec

from .helpers import read_cases, start_talker

Checkpoint = Callable[[str, str], Path]


class TestQwen3TTS(CodeTests, CodecTests):
    @pytest.fixture(scope="class", params=["qwen3_tts_base", pytest.param("qwen3_tts", marks=pytest.mark.slow)])
    def kind(self, request: pytest.FixtureRequest) -> str:
        kind: str = request.param
        return kind

    @pytest.fixture(scope="class")
    def model(self, kind: str, checkpoint: Checkpoint) -> Iterator[SpeechModel]:
        with start_talker(checkpoint(kind, "default"), read_cases(kind, "default")) as model:
            yield model

    @pytest.fixture(scope="class")
    def codec(self, kind: str, checkpoint: Checkpoint) -> Iterator[SpeechCodec]:
        folder = checkpoint(kind, "default") / "speech_tokenizer"
        with start_codec("qwen3_tts", folder, read_cases(kind, "default")) as codec:
            yield codec


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size"), [("qwen3_tts_design", "default"), ("qwen3_tts", "large"), ("qwen3_tts_base", "large")]
)
def test_other_kinds_and_sizes(kind: str, size: str, checkpoint: Checkpoint) -> None:
    folder, cases = checkpoint(kind, size), read_cases(kind, size)
    with (
        start_talker(folder, cases) as model,
        start_codec("qwen3_tts", folder / "speech_tokenizer", cases) as codec,
    ):
        for name, prompt in model.prompts.items():
            model.check(model.run({name: prompt}))
        model.check(model.run(model.prompts))
        CodecTests().test_the_waveform_is_that_of_one_decode_for_any_windows(-1, codec)
