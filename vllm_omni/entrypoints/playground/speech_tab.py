# SPDX-License-Identifier: Apache-2.0
"""The tab that reads a text aloud: `/v1/audio/speech`."""

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from vllm_omni.entrypoints.playground.client import FAILURES, Description, Server, data_uri
from vllm_omni.entrypoints.playground.live_sound import FORMAT, LiveSounds, player

_TEXT_FIELDS = {"instructions": "Instructions", "language": "Language", "ref_text": "What the recording says"}
"""Fields that a model may read, with their labels."""


class SpeechTab:
    def __init__(self, server: Server, description: Description, sounds: LiveSounds) -> None:
        """Adds the components to the page."""
        self._server, self._description, self._sounds = server, description, sounds
        text = gr.Textbox(label="Text", lines=4, elem_id="speech-text")
        voices = description.voices or ["default"]
        voice = gr.Dropdown(voices, value=voices[0], label="Voice", allow_custom_value=True)
        speed = gr.Slider(0.25, 4, value=1, step=0.05, label="Speed")
        self._names = [name for name in _TEXT_FIELDS if name in description.speech_fields]
        fields: list[Any] = [gr.Textbox(label=_TEXT_FIELDS[name]) for name in self._names]
        reference = gr.Audio(
            label="Recording of the voice",
            sources=["upload", "microphone"],
            type="filepath",
            visible="ref_audio" in description.speech_fields,
        )
        with gr.Row():
            speak = gr.Button("Speak", variant="primary", elem_id="speech-speak")
            stop = gr.Button("Stop")
        self._player = gr.HTML(elem_id="speech-player")
        inputs = [text, voice, speed, reference, *fields]
        speaking = speak.click(self._speak, inputs, self._player, api_visibility="private")
        stop.click(lambda: "", None, self._player, cancels=[speaking], api_visibility="private", queue=False)

    async def _speak(
        self, text: str, voice: str, speed: float, reference: str | None, *fields: str
    ) -> AsyncIterator[str]:
        yield ""
        own = {name: value for name, value in zip(self._names, fields, strict=True) if value}
        if reference:
            own["ref_audio"] = data_uri(reference)
        sound = self._sounds.start()
        try:
            async with self._server.openai.audio.speech.with_streaming_response.create(
                model=self._description.model,
                input=text,
                voice=voice,
                response_format=FORMAT,
                speed=speed,
                extra_body=own,
            ) as answer:
                yield player(sound)
                async for piece in answer.iter_bytes():
                    sound.add(piece)
        except FAILURES as error:
            raise gr.Error(self._server.explain(error), print_exception=False) from error
        finally:
            sound.finish()
