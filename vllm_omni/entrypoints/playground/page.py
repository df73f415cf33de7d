# SPDX-License-Identifier: Apache-2.0
"""The page: a tab for each thing that the served model does, and its place in an application."""

import gradio as gr
from fastapi import FastAPI

from vllm_omni.entrypoints.playground.chat_tab import ChatTab
from vllm_omni.entrypoints.playground.client import Description, Server
from vllm_omni.entrypoints.playground.images_tab import ImagesTab
from vllm_omni.entrypoints.playground.live_sound import LiveSounds
from vllm_omni.entrypoints.playground.realtime_relay import RealtimeRelay
from vllm_omni.entrypoints.playground.realtime_tab import CSS, RealtimeTab, is_possible, script
from vllm_omni.entrypoints.playground.speech_tab import SpeechTab
from vllm_omni.entrypoints.playground.stages_tab import StagesTab
from vllm_omni.entrypoints.playground.videos_tab import VideosTab
from vllm_omni.errors import UsageError

_CSS = """
/* It would send files to another site. */
button[aria-label="Share"], button[title="Share"] { display: none; }
#chat-player audio, #speech-player audio { width: 100%; }
"""
_FILES_KEPT_S = 6 * 3600
_MAX_RUNNING = 64
_STAGES = "Stages"


def add_page(
    app: FastAPI, server: Server, description: Description, path: str = "/", auth: tuple[str, str] | None = None
) -> FastAPI:
    """Adds the page to an application.

    Args:
        path: Where it is; ends with a slash.
        auth: The name and the password that it asks visitors for.
    """
    sounds, relay = LiveSounds(), RealtimeRelay(server)
    sounds.add_route(app, path)
    relay.add_route(app, path)
    return gr.mount_gradio_app(
        app,
        make_page(server, description, sounds, relay),
        path.rstrip("/") or "/",
        auth=auth,
        css=_CSS + CSS,
        head=script() if is_possible(description) else None,
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),  # none from a network
        footer_links=[],
        ssr_mode=False,
        mcp_server=False,
    )


def read_auth(text: str | None) -> tuple[str, str] | None:
    """NAME:PASSWORD, of a flag.

    Raises:
        UsageError: It is not of this form.
    """
    if text is None:
        return None
    name, _, password = text.partition(":")
    if not (name and password):
        raise UsageError("the page's name and password must be given as NAME:PASSWORD")
    return name, password


def make_page(server: Server, description: Description, sounds: LiveSounds, relay: RealtimeRelay) -> gr.Blocks:
    """The tabs for what the model does."""
    files = (_FILES_KEPT_S, _FILES_KEPT_S)
    with gr.Blocks(title=f"{description.model} playground", analytics_enabled=False, delete_cache=files) as page:
        conversation = None
        with gr.Tabs() as tabs:
            if description.has("/v1/chat/completions") and "text" in description.outputs:
                with gr.Tab("Chat"):
                    conversation = ChatTab(server, description, sounds).conversation
            if is_possible(description):
                with gr.Tab("Realtime"):
                    RealtimeTab(server, description, relay)
            if description.has("/v1/images/generations"):
                with gr.Tab("Images"):
                    ImagesTab(server, description)
            if description.has("/v1/videos"):
                with gr.Tab("Videos"):
                    VideosTab(server, description)
            if description.has("/v1/audio/speech"):
                with gr.Tab("Speech"):
                    SpeechTab(server, description, sounds)
            with gr.Tab(_STAGES):
                timer = StagesTab(server, conversation).timer
        # The stages are read only while they are seen.
        tabs.select(_set_timer, None, timer, show_progress="hidden", api_visibility="private", queue=False)
    return page.queue(default_concurrency_limit=_MAX_RUNNING)


def _set_timer(selected: gr.SelectData) -> gr.Timer:
    return gr.Timer(active=selected.value == _STAGES)
