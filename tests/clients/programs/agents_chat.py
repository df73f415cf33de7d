# SPDX-License-Identifier: Apache-2.0
"""Two turns of an agent of openai-agents, and one with a tool: `agents_chat.py URL KEY MODEL PICTURE QUESTION API`;
prints them as JSON.

API: `responses`, the default of openai-agents, or `chat_completions`.
"""

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

colours: list[str] = []


@function_tool
def highlight(colour: Literal["red", "green", "blue", "yellow", "purple", "orange"]) -> str:
    """Highlights the shapes of a colour."""
    colours.append(colour)
    return f"highlighted {colour}"


async def main(url: str, key: str, model: str, picture: str, question: str, api: Any) -> None:
    set_tracing_disabled(True)
    set_default_openai_api(api)
    set_default_openai_client(AsyncOpenAI(base_url=url, api_key=key))
    agent = Agent(name="Painter", model=model)
    image = "data:image/png;base64," + base64.b64encode(Path(picture).read_bytes()).decode()
    content = [{"type": "input_image", "image_url": image}, {"type": "input_text", "text": question}]
    first = await Runner.run(agent, [{"role": "user", "content": content}])
    turns = [*first.to_input_list(), {"role": "user", "content": "How many shapes are there?"}]
    second = Runner.run_streamed(agent, turns)
    pieces = [
        event.data.delta
        async for event in second.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    settings = ModelSettings(tool_choice="highlight")
    third = await Runner.run(Agent(name="Painter", model=model, tools=[highlight], model_settings=settings), turns)
    result = {"answer": first.final_output, "pieces": pieces, "last": second.final_output}
    print(json.dumps({**result, "highlighted": colours, "after_tool": third.final_output}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
