# SPDX-License-Identifier: Apache-2.0
"""The tab for videos: `/v1/videos`, a job with progress."""

import asyncio
import operator
from collections.abc import AsyncIterator
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import openai
from gradio.processing_utils import save_bytes_to_cache

from vllm_omni_playground.client import FAILURES, Description, Server
from vllm_omni_playground.examples import VIDEOS
from vllm_omni_playground.last_request import LastRequest
from vllm_omni_playground.sampling import SamplingFields
from vllm_omni_playground.stop_button import SILENT, Ending, connect_stop, enable_at

_POLL_S = 0.5
_STATE_CSS = """
.bar { height: 8px; margin-bottom: 8px; border-radius: 4px; background: var(--border-color-primary); }
.bar i { display: block; height: 100%; border-radius: 4px; background: var(--primary-500); }
"""
_BAR = """
<div class="bar" role="progressbar" aria-valuenow="{percent}"><i style="width: {percent}%"></i></div>
"""


class VideosTab:
    def __init__(self, server: Server, description: Description, last: gr.State) -> None:
        """Adds the components to the page. `last` has the visitor's `LastRequest`."""
        self._server, self._description = server, description
        stage = description.stage_for("video")
        assert stage is not None, "a pipeline that makes videos has a stage for it"
        with gr.Row():
            with gr.Column():
                prompt = gr.Textbox(label="Prompt", lines=2, elem_id="videos-prompt")
                gr.Examples([[text] for text in VIDEOS], prompt, api_visibility="private")
                image = gr.Image(
                    label="Input image", type="filepath", sources=["upload"], visible="image" in description.inputs
                )
                with gr.Accordion("Settings", open=False):
                    negative = gr.Textbox(label="Negative prompt", visible="negative_prompt" in stage.sampling_params)
                    self._sampling = SamplingFields(description, kinds=("DiT",))
                with gr.Row():
                    generate = gr.Button("Generate", variant="primary", elem_id="videos-generate", min_width=80)
                    stop = gr.Button("Stop", interactive=False, elem_id="videos-stop", min_width=80)
            with gr.Column():
                state = gr.HTML(css_template=_STATE_CSS, elem_id="videos-state")
                self._video = gr.Video(label="Video", elem_id="videos-video", autoplay=True, buttons=["download"])
        ending = gr.State(Ending())
        inputs = [last, ending, prompt, image, negative, *self._sampling.components]
        enable_at(stop, [generate.click])
        generating = generate.click(
            self._generate, inputs, [self._video, state], show_progress_on=self._video, api_visibility="private"
        )
        connect_stop(stop, [generating], lambda: _state("Stopped."), [state])
        # An update that was on its way when it was stopped has replaced that.
        generating.then(operator.attrgetter("text"), ending, state, **SILENT)

    async def _generate(
        self, last: LastRequest, ending: Ending, prompt: str, image: str | None, negative: str, *sampling: str
    ) -> AsyncIterator[tuple[Any, str]]:
        settings = self._sampling.as_fields(sampling, negative)
        ending.text = _state("Stopped.")
        yield None, _state("Waiting ...", 0)
        reference: dict[str, Any] = {} if image is None else {"input_reference": Path(image)}
        videos = self._server.openai.videos
        video = None
        try:
            video = await videos.create(model=self._description.model, prompt=prompt, extra_body=settings, **reference)
            with last.running(video.id):
                while video.status in ("queued", "in_progress"):
                    text = f"{video.status.replace('_', ' ')}: {video.progress} %"
                    yield gr.skip(), _state(text, video.progress)
                    await asyncio.sleep(_POLL_S)  # A job has no events.
                    video = await videos.retrieve(video.id)
            if video.error is not None:
                ending.text = _state(f"⚠️ The video failed: {video.error.message}")
            else:
                content = await videos.download_content(video.id)
                file = save_bytes_to_cache(await content.aread(), "video.mp4", self._video.GRADIO_CACHE)
                ending.text = _state("Complete")
                yield file, ending.text
        except FAILURES as error:
            ending.text = _state(f"⚠️ {self._server.explain(error)}")
        finally:
            if video is not None and video.status in ("queued", "in_progress"):
                await self._abort(video.id)

    async def _abort(self, video_id: str) -> None:
        try:
            await self._server.openai.videos.delete(video_id)
        except openai.OpenAIError:
            return  # The server has gone, and the job with it.


def _state(text: str, percent: int | None = None) -> str:
    """HTML of what becomes of the job, below a bar while it runs."""
    bar = "" if percent is None else _BAR.format(percent=percent)
    return f"{bar}<p>{escape(text)}</p>"
