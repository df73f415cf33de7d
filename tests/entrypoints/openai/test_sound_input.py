# SPDX-License-Identifier: Apache-2.0
"""Audio in requests, of any sample rate and number of channels."""

import base64
import io
import wave

import numpy as np
import pytest

from tests.servers import RunningServer

GROUP = "server"


def wav(rate: int, channels: int) -> str:
    tone = np.sin(2 * np.pi * 300 * np.arange(rate) / rate)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        file.writeframes(np.repeat(tone * 9000, channels).astype("<i2").tobytes())
    return base64.b64encode(buffer.getvalue()).decode()


def num_prompt_tokens(server: RunningServer, rate: int, channels: int) -> int:
    part = {"type": "input_audio", "input_audio": {"data": wav(rate, channels), "format": "wav"}}
    answer = server.openai().chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}],
        modalities=["text"],
        max_completion_tokens=2,
    )
    assert answer.choices[0].message.content
    return answer.usage.prompt_tokens


@pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (24_000, 1), (44_100, 2)])
def test_audio_of_any_sample_rate_is_read(omni_server: RunningServer, rate: int, channels: int) -> None:
    """A second has the same length at any rate; a resampler may drop the last sample."""
    expected = num_prompt_tokens(omni_server, 16_000, 1)
    assert abs(num_prompt_tokens(omni_server, rate, channels) - expected) <= 1
