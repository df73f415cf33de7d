# SPDX-License-Identifier: Apache-2.0
"""LangChain's ChatOpenAI: `langchain_chat.py URL KEY MODEL PICTURE QUESTION`; prints the results as JSON."""

import base64
import json
import sys
from pathlib import Path

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI


def main(url: str, key: str, model: str, picture: str, question: str) -> None:
    chat = ChatOpenAI(base_url=url, api_key=key, model=model)
    image = base64.b64encode(Path(picture).read_bytes()).decode()
    content = [{"type": "image", "base64": image, "mime_type": "image/png"}, {"type": "text", "text": question}]
    messages = [HumanMessage(content)]
    answer = chat.invoke(messages)
    pieces = [chunk.text for chunk in chat.stream(messages)]
    spoken = chat.bind(modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"}).invoke(messages)
    result = {
        "answer": answer.text,
        "pieces": pieces,
        "speech": spoken.additional_kwargs["audio"]["data"],
        "tokens": answer.usage_metadata["total_tokens"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
