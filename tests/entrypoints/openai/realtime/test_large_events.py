# SPDX-License-Identifier: Apache-2.0
"""The limit of an event's bytes, which vLLM's server sets: with a real one."""

import asyncio
import base64

import numpy as np
import pytest
import websockets

from tests.entrypoints.openai.realtime.sessions import opened
from tests.servers import RunningServer

GROUP = "server"


def test_bytes_of_an_event(omni_server: RunningServer) -> None:
    """A longer event than the server allows ends its session, and no other."""

    async def main() -> None:
        model = omni_server.openai().models.list().data[0].id
        async with opened(omni_server.url, model=model) as other:
            for num_seconds, is_too_long in ((15, False), (17, True)):
                async with opened(omni_server.url, model=model) as session:
                    sound = base64.b64encode(np.zeros(24000 * num_seconds, "<i2").tobytes()).decode()
                    append = session.connection.input_audio_buffer.append(audio=sound)
                    if is_too_long:
                        # The session may end while the event is still being sent.
                        with pytest.raises(websockets.exceptions.ConnectionClosedError) as caught:
                            await append
                            await session.next()
                        assert caught.value.rcvd is not None and caught.value.rcvd.code == 1009
                    else:
                        await append
                        await session.connection.input_audio_buffer.clear()
                        await session.until("input_audio_buffer.cleared")
            await other.say("Hello")

    asyncio.run(main())
