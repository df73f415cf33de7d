# SPDX-License-Identifier: Apache-2.0
"""LiteLLM's SDK: `litellm_sdk.py URL KEY MODEL PAINTER_URL PICTURE QUESTION SOUND`; prints the results as JSON."""

import base64
import json
import sys
from pathlib import Path

import litellm


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def main(url: str, key: str, model: str, painter_url: str, picture: str, question: str, sound: str) -> None:
    server = {"api_base": url, "api_key": key}
    painter = {"api_base": painter_url, "api_key": key}
    image = {"url": "data:image/png;base64," + as_base64(Path(picture).read_bytes())}
    content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]

    chat = {"model": f"openai/{model}", "messages": messages, **server}
    answer = litellm.completion(**chat, modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"})
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**chat, stream=True)]
    given = [{"type": "input_image", "image_url": image["url"]}, {"type": "input_text", "text": question}]
    asked = {"model": chat["model"], "input": [{"role": "user", "content": given}], **server}
    response = litellm.responses(**asked)
    deltas = [
        event.delta for event in litellm.responses(**asked, stream=True) if event.type == "response.output_text.delta"
    ]
    anthropic = {"model": f"anthropic/{model}", "messages": messages, "api_key": key, "max_tokens": 100}
    anthropic["api_base"] = url.removesuffix("/v1")
    message = litellm.completion(**anthropic).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**anthropic, stream=True)]
    speech = litellm.speech(
        model="openai/tts-1", voice="alloy", input="A red circle is left of a blue square.", **server
    )
    with open(sound, "rb") as file:
        transcript = litellm.transcription(model="openai/whisper-1", file=file, **server)
    painting = litellm.image_generation("a red circle is left of a blue square", model="openai/gpt-image-1", **painter)

    chosen = answer.choices[0].message
    print(
        json.dumps(
            {
                "answer": chosen.content,
                "spoken_answer": chosen.audio.data,
                "pieces": pieces,
                "response": response.output_text,
                "deltas": deltas,
                "message": message,
                "parts": parts,
                "speech": as_base64(speech.content),
                "transcript": transcript.text,
                "painting": painting.data[0].b64_json,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
