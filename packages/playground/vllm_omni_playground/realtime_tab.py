# SPDX-License-Identifier: Apache-2.0
"""The tab that talks: a spoken conversation over `/v1/realtime`, held by the browser (`realtime.js`).

Gradio has no part in the sound: what it records arrives in files, which may be lost or change their order.
"""

from importlib.resources import files
from typing import Any

import gradio as gr

from vllm_omni_playground.client import FAILURES, Description, Server, data_uri
from vllm_omni_playground.live_sound import ENDS
from vllm_omni_playground.realtime_relay import RealtimeRelay

_CALL = "realtime-call"
_HTML = """
<div class="status"><span class="state" role="status">Ready</span><span class="level"><span></span></span>
<span class="delay"></span></div>
<div class="log"></div>
"""
_CSS = """
.status { display: flex; flex-wrap: wrap; align-items: center; gap: 4px 12px; min-height: 2.5em; }
.state { padding: 4px 12px; border-radius: 99px; background: var(--border-color-primary); }
.state[data-state=Listening] { background: #dcfce7; color: #14532d; }
.state[data-state=Thinking] { background: #fef3c7; color: #78350f; }
.state[data-state=Speaking] { background: #dbeafe; color: #1e3a8a; }
.level { flex: 1 0 60px; max-width: 240px; background: var(--border-color-primary); }
.level span { display: block; width: 0; background: var(--color-accent); }
.level, .level span { height: 8px; border-radius: 4px; }
.delay { color: var(--body-text-color-subdued); }
.log { margin-top: 8px; display: flex; flex-direction: column; gap: 8px; max-height: 50vh; overflow-y: auto; }
.log p { max-width: 85%; padding: 8px 12px; border-radius: 8px; margin: 0; }
.log .assistant { align-self: flex-start; background: var(--background-fill-secondary); }
.log .user { align-self: flex-end; background: var(--color-accent-soft); }
"""
_HINT = "Press Talk, allow the microphone, and speak. The model answers when you pause. To interrupt it, speak again."
_KEY_S = 60
_TRANSCRIPTIONS = "/v1/audio/transcriptions"


def is_possible(description: Description) -> bool:
    """Whether the served model hears, and converses."""
    return description.has("/v1/realtime") and "audio" in description.inputs


def script() -> str:
    """HTML for the head of the page."""
    return f"<script>{files(__package__).joinpath('realtime.js').read_text()}</script>"


class RealtimeTab:
    def __init__(self, server: Server, description: Description, relay: RealtimeRelay) -> None:
        """Adds the components to the page."""
        self._server, self._description, self._relay = server, description, relay
        call = gr.HTML(_HTML, css_template=_CSS, elem_id=_CALL, js_on_load=ENDS)
        with gr.Row():
            talk = gr.Button("Talk", variant="primary", elem_id="realtime-talk", min_width=80)
            stop = gr.Button("Hang up", interactive=False, elem_id="realtime-stop", min_width=80)
        gr.Markdown(_HINT, elem_id="realtime-hint")
        with gr.Accordion("Settings", open=False):
            voices = description.voices or ["default"]
            voice = gr.Dropdown(voices, value=voices[0], label="Voice", visible="audio" in description.outputs)
            instructions = gr.Textbox(label="Instructions", lines=2)
            silence = gr.Slider(200, 2000, value=500, step=50, label="Silence that ends a turn (ms)")
            transcribes = gr.Checkbox(
                True,
                label="Transcribe what I say",
                visible=description.has(_TRANSCRIPTIONS),
                elem_id="realtime-transcribe",
            )
            picture = gr.Image(
                label="Picture to talk about",
                type="filepath",
                sources=["upload"],
                height=160,
                visible="image" in description.inputs,
                elem_id="realtime-picture",
            )
        fields = [voice, instructions, silence, transcribes, picture]
        start = gr.JSON(visible=False)
        made = talk.click(self._prepare, fields, start, api_visibility="private")
        buttons = [talk, stop]
        made.success(None, start, buttons, js=f"start => window.realtime.start('#{_CALL}', start)")
        stop.click(None, None, None, js="() => window.realtime.stop()")
        call.stop(None, None, buttons, js="() => window.realtime.ended()")

    async def _prepare(
        self, voice: str, instructions: str, silence: float, transcribes: bool, picture: str | None
    ) -> dict[str, str | None]:
        """What the browser needs for one conversation: a key, as it never sees the server's, and the picture."""
        hearing: dict[str, Any] = {"turn_detection": {"type": "server_vad", "silence_duration_ms": int(silence)}}
        if transcribes and self._description.has(_TRANSCRIPTIONS):
            hearing["transcription"] = {"model": self._description.model}
        audio: dict[str, Any] = {"input": hearing}
        if "audio" in self._description.outputs:
            audio["output"] = {"voice": voice}
        session: Any = {"type": "realtime", "instructions": instructions, "audio": audio}
        try:
            secret = await self._server.openai.realtime.client_secrets.create(
                expires_after={"anchor": "created_at", "seconds": _KEY_S}, session=session
            )
        except FAILURES as error:
            raise gr.Error(self._server.explain(error), print_exception=False) from error
        self._relay.admit(secret.value)
        return {"key": secret.value, "picture": data_uri(picture) if picture else None}
