# SPDX-License-Identifier: Apache-2.0
"""The page: a tab for each thing that the served model does, and its place in an application."""

import base64
from html import escape
from importlib.resources import files
from typing import Any

import gradio as gr
from fastapi import FastAPI

from vllm_omni.errors import UsageError
from vllm_omni_playground.chat_tab import ChatTab
from vllm_omni_playground.client import Description, Server
from vllm_omni_playground.images_tab import ImagesTab
from vllm_omni_playground.last_request import LastRequest
from vllm_omni_playground.live_sound import LiveSounds
from vllm_omni_playground.realtime_relay import RealtimeRelay
from vllm_omni_playground.realtime_tab import RealtimeTab, is_possible, script
from vllm_omni_playground.speech_tab import SpeechTab
from vllm_omni_playground.stages_tab import StagesTab
from vllm_omni_playground.videos_tab import VideosTab

_CSS = """
/* It would send files to another site. */
button[aria-label="Share"], button[title="Share"] { display: none; }
.player:not(:has(audio)) { display: none; }
.block .html-container { padding: 0; }
#images-gallery .fixed-height { max-height: none; }
.player audio { width: 100%; height: 40px; }
.dark .player audio { color-scheme: dark; }
"""
_HEADING = """
<h1>{model}</h1>
<p>Reads {inputs}. Makes {outputs}.</p>
<p>{stages}</p>
"""
_HEADING_CSS = """
h1 { margin: 0 0 4px; overflow-wrap: anywhere; }
p { margin: 0; color: var(--body-text-color-subdued); }
"""
_FILES_KEPT_S = 6 * 3600
_MAX_RUNNING = 64
_STAGES = "Stages"


def add_to_server(
    app: FastAPI,
    *,
    url: str,
    api_key: str | None,
    description: dict[str, Any],
    path: str,
    auth: str | None,
    root_path: str,
) -> None:
    """Adds the page to the application of the server that it is for, as of `ModelPackage.pages`."""
    # The certificate has the name that clients know, which need not be this one.
    server = Server(url, api_key, verify=False)
    add_page(app, server, Description.read(description), path, read_auth(auth), root_path)


def add_page(
    app: FastAPI,
    server: Server,
    description: Description,
    path: str = "/",
    auth: tuple[str, str] | None = None,
    root_path: str = "",
) -> FastAPI:
    """Adds the page to an application.

    Args:
        path: Where it is; ends with a slash.
        auth: The name and the password that it asks visitors for.
        root_path: The path of the application, behind a proxy.
    """
    sounds, relay = LiveSounds(), RealtimeRelay(server)
    sounds.add_route(app, path)
    relay.add_route(app, path)
    return gr.mount_gradio_app(
        app,
        make_page(server, description, sounds, relay),
        path.rstrip("/") or "/",
        root_path=f"{root_path}{path}".rstrip("/"),  # Else Gradio forgets it behind a proxy that names its host.
        auth=auth,
        css=_CSS,
        head=_favicon() + (script() if is_possible(description) else ""),
        theme=_theme(),
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
    kept = (_FILES_KEPT_S, _FILES_KEPT_S)
    with gr.Blocks(title=f"{description.model} playground", analytics_enabled=False, delete_cache=kept) as page:
        gr.HTML(heading(description), css_template=_HEADING_CSS, elem_id="heading")
        last = gr.State(LastRequest())
        with gr.Tabs() as tabs:
            if description.has("/v1/chat/completions") and "text" in description.outputs:
                with gr.Tab("Chat"):
                    ChatTab(server, description, sounds, last)
            if is_possible(description):
                with gr.Tab("Realtime"):
                    RealtimeTab(server, description, relay)
            if description.has("/v1/images/generations"):
                with gr.Tab("Images"):
                    ImagesTab(server, description, last)
            if description.has("/v1/videos"):
                with gr.Tab("Videos"):
                    VideosTab(server, description, last)
            if description.has("/v1/audio/speech"):
                with gr.Tab("Speech"):
                    SpeechTab(server, description, sounds, last)
            with gr.Tab(_STAGES):
                timer = StagesTab(server, last).timer
        # The stages are read only while they are seen.
        tabs.select(_set_timer, None, timer, show_progress="hidden", api_visibility="private", queue=False)
    return page.queue(default_concurrency_limit=_MAX_RUNNING)


def heading(description: Description) -> str:
    """HTML: what is served."""
    stages = " · ".join(f"{stage.name} ({stage.kind})" for stage in description.stages)
    return _HEADING.format(
        model=escape(description.model),
        inputs=_names(description.inputs),
        outputs=_names(description.outputs),
        stages=f"{'Stage' if len(description.stages) == 1 else 'Stages'}: {escape(stages)}",
    )


def _names(kinds: list[str]) -> str:
    return ", ".join({"image": "images", "video": "videos"}.get(kind, kind) for kind in kinds)


def _theme() -> gr.themes.Base:
    """Gradio's, with no fonts from a network, and secondary text that can be read on white."""
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    return theme.set(body_text_color_subdued="*neutral_500", input_placeholder_color="*neutral_500")


def _favicon() -> str:
    """HTML for the head of the page."""
    data = base64.b64encode(files(__package__).joinpath("favicon.svg").read_bytes()).decode()
    return f'<link rel="icon" type="image/svg+xml" href="data:image/svg+xml;base64,{data}">'


def _set_timer(selected: gr.SelectData) -> gr.Timer:
    return gr.Timer(active=selected.value == _STAGES)
