# SPDX-License-Identifier: Apache-2.0
"""A question about a picture with LiveKit Agents: `livekit_chat.py URL KEY MODEL QUESTION FILE`; the file is a PNG."""

import asyncio
import base64
import json
import sys
from pathlib import Path

from livekit.agents.llm import ChatContext, ImageContent
from livekit.plugins import openai

url, key, model, question, file = sys.argv[1:]


async def main() -> None:
    llm = openai.LLM(base_url=url, api_key=key, model=model)
    chat = ChatContext()
    picture = "data:image/png;base64," + base64.b64encode(Path(file).read_bytes()).decode()
    chat.add_message(role="user", content=[question, ImageContent(image=picture)])
    answer = await llm.chat(chat_ctx=chat).collect()
    print(json.dumps({"text": answer.text, "tokens": answer.usage.completion_tokens}))
    await llm.aclose()


asyncio.run(main())
