# SPDX-License-Identifier: Apache-2.0
"""The tab that reads a text aloud: `/v1/audio/speech`."""

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr
from gradio.processing_utils import save_bytes_to_cache

from vllm_omni_playground.client import FAILURES, Description, Server, data_uri
from vllm_omni_playground.examples import SPEECH
from vllm_omni_playground.last_request import LastRequest
from vllm_omni_playground.live_sound import (
    FORMAT,
    MEDIA_TYPES,
    LiveSound,
    LiveSounds,
    make_player,
    player,
)
from vllm_omni_playground.stop_button import SILENT, connect_stop, enable_at

_TEXT_FIELDS = {"instructions": "Instructions", "language": "Language", "ref_text": "What the recording says"}
"""Fields that a model may read, with their labels."""


class SpeechTab:
    def __init__(self, server: Server, description: Description, sounds: LiveSounds, last: gr.State) -> None:
        """Adds the components to the page. `last` has the visitor's `LastRequest`."""
        self._server, self._description, self._sounds = server, description, sounds
        text = gr.Textbox(label="Text", lines=4, elem_id="speech-text")
        gr.Examples([[example] for example in SPEECH], text, api_visibility="private")
        with gr.Row():
            voices = description.voices or ["default"]
            voice = gr.Dropdown(voices, value=voices[0], label="Voice", allow_custom_value=True, min_width=140)
            file_format = gr.Dropdown(
                list(MEDIA_TYPES), value=FORMAT, label="Format", min_width=100, elem_id="speech-format"
            )
            speed = gr.Slider(0.25, 4, value=1, step=0.05, label="Speed", min_width=200)
        self._names = [name for name in _TEXT_FIELDS if name in description.speech_fields]
        fields: list[Any] = [gr.Textbox(label=_TEXT_FIELDS[name]) for name in self._names]
        reference = gr.Audio(
            label="Recording of the voice",
            sources=["upload", "microphone"],
            type="filepath",
            visible="ref_audio" in description.speech_fields,
        )
        with gr.Row():
            speak = gr.Button("Speak", variant="primary", elem_id="speech-speak", min_width=80)
            stop = gr.Button("Stop", interactive=False, elem_id="speech-stop", min_width=80)
        live = make_player("speech-player")
        self._file = gr.Audio(label="Speech", interactive=False, visible=False, elem_id="speech-file")
        state = gr.State()
        inputs = [last, text, voice, file_format, speed, reference, *fields]
        heard = [live, self._file]
        enable_at(stop, [speak.click])
        speaking = speak.click(self._speak, inputs, [*heard, state], show_progress="minimal", api_visibility="private")
        connect_stop(stop, [speaking], self._show_heard, heard, [state])
        live.stop(self._show_heard, state, heard, **SILENT)

    def _show_heard(self, sound: LiveSound | None) -> tuple[str, Any]:
        """Moves what has arrived from the player to the file, so that it has one place."""
        if sound is None or not sound.data:
            return "", gr.skip()
        file = save_bytes_to_cache(sound.data, f"speech.{sound.format}", self._file.GRADIO_CACHE)
        return "", gr.Audio(file, visible=True)

    async def _speak(
        self,
        last: LastRequest,
        text: str,
        voice: str,
        file_format: Any,
        speed: float,
        reference: str | None,
        *fields: str,
    ) -> AsyncIterator[tuple[Any, ...]]:
        own: dict[str, Any] = {name: value for name, value in zip(self._names, fields, strict=True) if value}
        own["stream"] = file_format != "wav"  # A WAV file begins with its length.
        if reference:
            own["ref_audio"] = data_uri(reference)
        sound = self._sounds.start(file_format)
        yield "", gr.Audio(visible=False), sound
        try:
            with last.sending("speech") as headers:
                async with self._server.openai.audio.speech.with_streaming_response.create(
                    model=self._description.model,
                    input=text,
                    voice=voice,
                    response_format=file_format,
                    speed=speed,
                    extra_body=own,
                    extra_headers=headers,
                ) as answer:
                    yield player(sound), gr.skip(), gr.skip()
                    async for piece in answer.iter_bytes():
                        sound.add(piece)
        except FAILURES as error:
            raise gr.Error(self._server.explain(error), print_exception=False) from error
        finally:
            sound.finish()
