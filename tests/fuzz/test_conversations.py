# SPDX-License-Identifier: Apache-2.0
"""Bounded runs of the fuzzer of conversations, without engines; `python -m tests.fuzz --kinds omni` has real ones."""

import asyncio
import random

import pytest

from tests.entrypoints.openai.conftest import media_connector  # noqa: F401
from tests.entrypoints.openai.fake_server import over_http
from tests.entrypoints.openai.realtime.fake_chat import MODEL, FakeChat, session_app
from tests.entrypoints.openai.realtime.level_detector import LevelDetector, PausingDetector
from tests.fuzz.fuzz_conversations import fuzz_conversation
from vllm_omni.entrypoints.openai.http_protocol import web_socket_protocol

pytestmark = pytest.mark.slow

NUM_CONVERSATIONS, NUM_STEPS = 8, 60


@pytest.mark.parametrize("detector", [LevelDetector, PausingDetector])
@pytest.mark.parametrize("hears", [False, True], ids=["ASR stage", "model hears"])
def test_conversations_go_on(hears: bool, detector: type[LevelDetector], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a detector that finds pauses answers are begun there; none is left."""
    monkeypatch.setattr("vllm_omni.entrypoints.openai.realtime.session.TurnDetector", detector)
    app = session_app(FakeChat(hears=hears), max_realtime_audio_s=5.0, realtime_lead_s=0.5)

    async def main(port: int) -> list[list[str]]:
        rngs = [random.Random(seed) for seed in range(NUM_CONVERSATIONS)]
        return await asyncio.gather(*(fuzz_conversation(port, rng, NUM_STEPS, model=MODEL) for rng in rngs))

    with over_http(app, ws=web_socket_protocol(60)) as url:
        assert asyncio.run(main(int(url.rpartition(":")[2]))) == [[]] * NUM_CONVERSATIONS
    speculations = app.state.omni_realtime.speculations
    assert not speculations._running
    assert (speculations.counts.promoted > 0) == (detector is PausingDetector)
