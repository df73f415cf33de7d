# SPDX-License-Identifier: Apache-2.0
"""The tab for a conversation: text, pictures, sound, video and the microphone in; all outputs as they are made."""

import base64
import operator
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import gradio as gr
from gradio.processing_utils import save_bytes_to_cache
from gradio.utils import get_upload_folder

from vllm_omni_playground.client import FAILURES, Description, Server, data_uri, kind_of
from vllm_omni_playground.examples import questions
from vllm_omni_playground.last_request import LastRequest
from vllm_omni_playground.live_sound import FORMAT, LiveSound, LiveSounds, make_player, player
from vllm_omni_playground.sampling import SamplingFields
from vllm_omni_playground.stop_button import DISABLED, SILENT, connect_stop, enable_at

STOPPED = "*Stopped.*"
_PARTS = {"image": "image_url", "audio": "audio_url", "video": "video_url"}


@dataclass
class ChatState:
    """One visitor's.

    Attributes:
        messages: As they are sent.
        shown: As Gradio's chat shows them.
        answer: The last one.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    shown: list[dict[str, Any]] = field(default_factory=list)
    answer: "ChatAnswer | None" = None

    @property
    def is_answering(self) -> bool:
        return self.answer is not None and not self.answer.is_complete

    def show(self, role: str, content: Any) -> dict[str, Any]:
        entry = {"role": role, "content": content}
        self.shown.append(entry)
        return entry

    def ask(self, text: str, files: list[str]) -> None:
        """Adds the visitor's turn."""
        content: list[dict[str, Any]] = []
        for path in files:
            part = _PARTS[kind_of(path)]
            content.append({"type": part, part: {"url": data_uri(path)}})
            self.show("user", {"path": path})
        if text:
            content.append({"type": "text", "text": text})
            self.show("user", text)
        self.messages.append({"role": "user", "content": content})


@dataclass
class ChatAnswer:
    """One answer, while it arrives.

    Attributes:
        cache: The folder of Gradio's files.
        sound: Its speech, from the first of it, until it is shown in the chat.
        is_complete: Whether all has arrived, or nothing more will.
    """

    conversation: ChatState
    sounds: LiveSounds
    cache: str
    sound: LiveSound | None = None
    is_complete: bool = False
    _text: dict[str, Any] | None = None
    _transcript: str = ""

    @property
    def text(self) -> str:
        return self._text["content"] if self._text is not None else ""

    def add(self, delta: Any) -> None:
        """Adds a piece: a `delta` of OpenAI's client."""
        if delta.content:
            self._add_text(delta.content)
        if delta.audio is not None and delta.audio.transcript:
            self._transcript += delta.audio.transcript
        if delta.audio is not None and delta.audio.data:
            self.sound = self.sound or self.sounds.start()
            self.sound.add(base64.b64decode(delta.audio.data))
        for kind, suffix in (("image", "png"), ("video", "mp4")):
            for part in getattr(delta, f"{kind}s", None) or []:
                data = base64.b64decode(part[f"{kind}_url"]["url"].partition(",")[2])
                self._show_file(data, suffix)

    def stop(self) -> None:
        """Ends it, and marks it unless it is complete. What has arrived is kept; of nothing the turn is taken back."""
        if self.sound is not None:
            self.sound.finish()
        if self.is_complete:
            return
        self.is_complete = True
        self.conversation.show("assistant", STOPPED)
        if self.text:
            self.conversation.messages.append({"role": "assistant", "content": self.text})
        else:
            self.conversation.messages.pop()

    def fail(self) -> None:
        """Takes the visitor's turn back: it can be sent again."""
        self.is_complete = True
        self.conversation.messages.pop()

    def _add_text(self, piece: str) -> None:
        self._text = self._text or self.conversation.show("assistant", "")
        self._text["content"] += piece

    def finish(self) -> None:
        """Shows what can be shown only when all has arrived, and keeps the answer for later turns."""
        self.is_complete = True
        if not self.text and self._transcript:  # with text, the same comes as content
            self._add_text(self._transcript)
        self.conversation.messages.append({"role": "assistant", "content": self.text})

    def show_sound(self) -> None:
        """Shows what has arrived of its speech in the chat, where no player has it any more."""
        if self.sound is not None:
            self._show_file(self.sound.data, FORMAT)
            self.sound = None

    def _show_file(self, data: bytes, suffix: str) -> None:
        self.conversation.show("assistant", {"path": save_bytes_to_cache(data, f"answer.{suffix}", self.cache)})


class ChatTab:
    def __init__(self, server: Server, description: Description, sounds: LiveSounds, last: gr.State) -> None:
        """Adds the components to the page. `last` has the visitor's `LastRequest`."""
        self._server, self._description, self._sounds = server, description, sounds
        conversation = gr.State(ChatState())
        self._chat = gr.Chatbot(
            label="Chat",
            height="55vh",
            elem_id="chat",
            buttons=["copy"],
            examples=questions(description, get_upload_folder()),
        )
        self._player = make_player("chat-player")
        self._box = self._make_box()
        with gr.Row():
            stop = gr.Button("Stop", interactive=False, elem_id="chat-stop", min_width=80, size="md")
            clear = gr.Button("New chat", elem_id="chat-clear", min_width=80, size="md")
        with gr.Accordion("Settings", open=False):
            settings = self._make_settings()
        request: dict[str, Any] = {
            "fn": self._respond,
            "inputs": [self._box, conversation, last, *settings],
            "outputs": [self._chat, self._player, self._box],
            **SILENT,  # Its progress is its answer.
        }
        enable_at(stop, [self._box.submit, self._chat.example_select])
        # A message that is sent while an answer arrives ends that; else it would be lost.
        sending = self._box.submit(**request, trigger_mode="multiple")
        example = self._chat.example_select(_read_example, None, self._box, api_visibility="private")
        running = [sending, example.success(**request)]
        heard = [self._chat, self._player]
        is_running = operator.attrgetter("is_answering")
        connect_stop(stop, running, _stop, heard, [conversation], is_running)
        for one in running:  # What a browser has not yet shown of a stopped answer would replace the mark.
            one.then(operator.attrgetter("shown"), conversation, self._chat, **SILENT)
        self._player.stop(_show_heard, conversation, heard, **SILENT)
        gr.on(
            [clear.click, self._chat.clear],
            lambda: (ChatState(), [], "", DISABLED),
            None,
            [conversation, *heard, stop],
            cancels=running,
            api_visibility="private",
        )

    def _make_box(self) -> gr.MultimodalTextbox:
        kinds = [kind for kind in self._description.inputs if kind in _PARTS]
        hears = "audio" in kinds
        sources: Any = (["upload"] if kinds else []) + (["microphone"] if hears else [])
        return gr.MultimodalTextbox(
            show_label=False,
            placeholder="Write or speak" if hears else "Write a message",
            sources=sources,
            file_count="multiple",  # Of any type: Gradio would refuse a file, and send the message without it.
            elem_id="chat-box",
        )

    def _make_settings(self) -> list[Any]:
        """The components whose values `_respond` takes, after the message and the states."""
        known = self._description
        outputs = gr.CheckboxGroup(known.outputs, value=known.outputs, label="Answer with", elem_id="chat-outputs")
        voices = known.voices or ["default"]
        voice = gr.Dropdown(
            voices, value=voices[0], label="Voice", visible="audio" in known.outputs, elem_id="chat-voice"
        )
        system = gr.Textbox(label="System message", lines=2)
        use_audio_in_video = gr.Checkbox(
            False, label="Use the audio in videos", visible={"audio", "video"} <= set(known.inputs)
        )
        self._sampling = SamplingFields(known)
        return [outputs, voice, system, use_audio_in_video, *self._sampling.components]

    async def _respond(
        self,
        message: dict[str, Any],
        conversation: ChatState,
        last: LastRequest,
        outputs: list[str],
        voice: str,
        system: str,
        use_audio_in_video: bool,
        *sampling: str,
    ) -> AsyncIterator[tuple[Any, ...]]:
        text, files = message["text"].strip(), message["files"]
        if not text and not files:
            yield gr.skip(), gr.skip(), gr.skip()
            return
        refused = [path for path in files if kind_of(path) not in self._description.inputs]
        if refused:
            name = refused[0].rpartition("/")[2]
            raise gr.Error(f"This model does not read files of this kind: {name}", print_exception=False)
        changed = self._sampling.as_list(sampling)
        if conversation.answer is not None:
            conversation.answer.stop()
            conversation.answer.show_sound()
        conversation.ask(text, files)
        answer = conversation.answer = ChatAnswer(conversation, self._sounds, self._chat.GRADIO_CACHE)
        request = self._request(conversation, outputs, voice, system, use_audio_in_video, changed)
        yield conversation.shown, "", {"text": "", "files": []}
        shown_sound: LiveSound | None = None
        try:
            with last.sending("chatcmpl") as headers:
                create = self._server.openai.chat.completions.create
                async with await create(**request, extra_headers=headers) as stream:
                    async for chunk in stream:
                        if answer.is_complete:
                            break
                        for choice in chunk.choices:
                            answer.add(choice.delta)
                        is_new = answer.sound is not shown_sound
                        shown_sound = answer.sound
                        yield conversation.shown, player(shown_sound) if is_new else gr.skip(), gr.skip()
            if not answer.is_complete:  # Else the next message has ended it.
                answer.finish()
                yield conversation.shown, gr.skip(), gr.skip()
        except FAILURES as error:
            if not answer.is_complete:
                answer.fail()
                conversation.show("assistant", f"⚠️ {self._server.explain(error)}")
                yield conversation.shown, gr.skip(), message
        finally:
            answer.stop()

    def _request(
        self,
        conversation: ChatState,
        outputs: list[str],
        voice: str,
        system: str,
        use_audio_in_video: bool,
        sampling: list[dict[str, Any] | None] | None,
    ) -> dict[str, Any]:
        own: dict[str, Any] = {"sampling_params_list": sampling}
        if use_audio_in_video:
            own["mm_processor_kwargs"] = {"use_audio_in_video": True}
        introduction = [{"role": "system", "content": system}] if system else []
        request = {
            "model": self._description.model,
            "messages": introduction + conversation.messages,
            "modalities": outputs or self._description.outputs[:1],
            "stream": True,
            "extra_body": {name: value for name, value in own.items() if value is not None},
        }
        if "audio" in outputs:
            request["audio"] = {"format": FORMAT, "voice": voice}
        return request


def _read_example(selected: gr.SelectData) -> dict[str, Any]:
    """The message of an example."""
    return {"text": selected.value["text"], "files": [file["path"] for file in selected.value.get("files") or []]}


def _stop(conversation: ChatState) -> tuple[Any, str]:
    """Ends the answer: the chat has what has arrived, and the player nothing."""
    if conversation.answer is not None:
        conversation.answer.stop()
        conversation.answer.show_sound()
    return conversation.shown, ""


def _show_heard(conversation: ChatState) -> tuple[Any, Any]:
    """Moves speech that was heard from the player to the chat, so that it has one place."""
    return (gr.skip(), gr.skip()) if conversation.is_answering else _stop(conversation)
