# SPDX-License-Identifier: Apache-2.0
"""Five spoken turns with the shipped model about a picture, in real time, with an interruption and a call of a tool.

vllm serve shapes --omni --realtime-lead-s 0.5 --enable-auto-tool-choice --tool-call-parser pythonic \\
    --structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'
python examples/online/spoken_conversation.py [--no-vad]

Prints what is said, and the milliseconds from the end of the user's speech to the first sound of the answer. The user
speaks with a voice of the server. The shipped model was not trained to call tools: the client asks for the call, the
grammar writes all of it but the colour, and without spaces, which the model would not end.
"""

import argparse
import asyncio
import base64
import io
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from openai import AsyncOpenAI

from coloured_shapes.language import COLOURS, random_scene
from coloured_shapes.pictures import draw

RATE, PIECE_S = 24_000, 0.1
BARGE_IN_S = 1.0
"""So much of the first answer is heard."""
QUESTIONS = (
    "what is in the picture", "how many shapes are there", "what is at the top left", "what colour is the circle",
    "and where is it",
)  # fmt: skip

NUM_TURNS_BEFORE_TOOL = 4
TOOL: Any = {
    "type": "function",
    "name": "highlight",
    "description": "Highlights the shapes of a colour.",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": COLOURS}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}


@dataclass
class Answer:
    """One answer, as it arrives and is played.

    Attributes:
        started: When its first sound arrived; 0.0 before.
        seconds: Of the sound that has arrived.
        is_complete: Whether all of it has arrived.
    """

    response_id: str = ""
    item_id: str = ""
    text: str = ""
    started: float = 0.0
    seconds: float = 0.0
    is_complete: bool = False


class Call:
    """One conversation."""

    def __init__(self, connection: Any, detects: bool) -> None:
        self.connection, self.detects = connection, detects
        self.answer, self.before = Answer(), Answer()
        self.ended = 0.0
        """When the user's last word was sent."""

    async def turn(self, question: str, samples: np.ndarray, heard_s: float | None) -> float:
        """A question and its answer, of which the first seconds are heard, or all.

        Returns:
            Seconds from the end of the question to the first sound of the answer.
        """
        print(f"user:  {question}?")
        self.before, self.answer = self.answer, Answer()
        if not self.detects:
            await self.interrupt()
        speaking = asyncio.create_task(self.speak(samples))
        await self.listen(heard_s)
        speaking.cancel()
        print(f"model: {self.answer.text} ({1000 * (self.answer.started - self.ended):.0f} ms)")
        return self.answer.started - self.ended

    async def speak(self, samples: np.ndarray) -> None:
        """As a microphone does: a piece when its time has come, and silence after the question."""
        size, due = int(PIECE_S * RATE), time.perf_counter()
        for start in range(0, len(samples), size):
            await self.send(samples[start : start + size])
            due += PIECE_S
            await asyncio.sleep(due - time.perf_counter())
        self.ended = time.perf_counter()
        if not self.detects:
            await self.connection.input_audio_buffer.commit()
            await self.connection.response.create()
        while self.detects:
            await self.send(np.zeros(size, "<i2"))
            due += PIECE_S
            await asyncio.sleep(due - time.perf_counter())

    async def send(self, samples: np.ndarray) -> None:
        await self.connection.input_audio_buffer.append(audio=base64.b64encode(samples.tobytes()).decode())

    async def listen(self, heard_s: float | None) -> None:
        """Reads events until the answer was played."""
        while True:
            answer = self.answer
            seconds = heard_s if heard_s is not None else answer.seconds if answer.is_complete else None
            rest = None if seconds is None or not answer.started else answer.started + seconds - time.perf_counter()
            try:
                event = await asyncio.wait_for(self.connection.recv(), None if rest is None else max(0.0, rest))
            except TimeoutError:
                return
            await self.handle(event)

    async def call_tool(self) -> None:
        """The model calls a tool, and learns what came of it."""
        choice = {"type": "function", "name": TOOL["name"]}
        await self.connection.response.create(response={"tools": [TOOL], "tool_choice": choice})
        while (event := await self.connection.recv()).type != "response.done":
            if event.type == "error":
                raise SystemExit(event.error.message)
        call = next((item for item in event.response.output if item.type == "function_call"), None)
        if call is None or event.response.status != "completed":
            raise SystemExit(f"the model did not call {TOOL['name']}: {event.response}")
        result = f"highlighted {json.loads(call.arguments)['colour']}"
        print(f"tool:  {call.name}({call.arguments}) -> {result}")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
        await self.connection.conversation.item.create(item=output)

    async def handle(self, event: Any) -> None:
        answer = self.answer
        if event.type == "error":
            raise SystemExit(event.error.message)
        if event.type == "input_audio_buffer.speech_started":
            await self.interrupt()
        elif event.type == "response.created":
            answer.response_id = event.response.id
        elif event.type == "conversation.item.retrieved":
            print(f"       (of the answer before, the model remembers: {event.item.content[0].transcript!r})")
        elif event.type == "response.done":
            self.finish(event.response)
        elif getattr(event, "response_id", "") != answer.response_id:
            return  # What had been sent of the answer before.
        elif event.type == "response.output_audio_transcript.delta":
            answer.text += event.delta
        elif event.type == "response.output_audio.delta":
            answer.item_id, answer.started = event.item_id, answer.started or time.perf_counter()
            answer.seconds += len(base64.b64decode(event.delta)) / 2 / RATE

    async def interrupt(self) -> None:
        """Stops the playing of the answer before, if it is played, and tells the server what was heard of it."""
        before, self.before = self.before, Answer()
        heard = time.perf_counter() - before.started
        if not before.item_id or (before.is_complete and heard >= before.seconds):
            return
        if not self.detects and not before.is_complete:
            await self.connection.response.cancel()
        milliseconds = int(1000 * min(heard, before.seconds))
        print(f"       (interrupts after {milliseconds} ms)")
        items = self.connection.conversation.item
        await items.truncate(item_id=before.item_id, content_index=0, audio_end_ms=milliseconds)
        await items.retrieve(item_id=before.item_id)

    def finish(self, response: Any) -> None:
        if response.id != self.answer.response_id:
            details = response.status_details
            print(f"       (the answer before is {response.status}: {details.reason if details else ''})")
            return
        if response.status == "failed":
            raise SystemExit(response.status_details.error.message)
        self.answer.is_complete = True


async def converse(client: AsyncOpenAI, model: str, detects: bool, seed: int) -> list[float]:
    """The conversation; for each turn the seconds to the first sound."""
    scene = random_scene(random.Random(seed))
    file = io.BytesIO()
    draw(random.Random(seed), scene).save(file, "PNG")
    picture = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    recordings = [await record(client, model, question) for question in QUESTIONS]
    async with client.realtime.connect(model=model) as connection:
        call, times = Call(connection, detects), []
        heard: Any = {"input": {"turn_detection": {"type": "server_vad"} if detects else None}}
        await connection.session.update(session={"type": "realtime", "audio": heard})
        content: Any = [{"type": "input_image", "image_url": picture}]
        await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        for number, (question, samples) in enumerate(zip(QUESTIONS, recordings, strict=True)):
            if number == NUM_TURNS_BEFORE_TOOL:
                await call.call_tool()
            times.append(await call.turn(question, samples, BARGE_IN_S if number == 0 else None))
    return times


async def record(client: AsyncOpenAI, model: str, text: str) -> np.ndarray:
    """A question of the user, int16 `[samples]`."""
    answer = await client.audio.speech.create(model=model, voice="ben", input=text, response_format="pcm")
    return np.frombuffer(answer.content, "<i2")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-vad", action="store_true", help="the client commits its sound, and asks for answers")
    parser.add_argument("--seed", type=int, default=25, help="of the picture")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args(argv)

    async def run() -> list[float]:
        async with AsyncOpenAI(base_url=args.base_url, api_key=args.api_key) as client:
            model = (await client.models.list()).data[0].id
            return await converse(client, model, not args.no_vad, args.seed)

    times = sorted(asyncio.run(run()))
    print(f"first sound after {', '.join(f'{1000 * seconds:.0f}' for seconds in times)} ms")


if __name__ == "__main__":
    main()
