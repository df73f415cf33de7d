# SPDX-License-Identifier: Apache-2.0
"""The tab for images: `/v1/images/generations` and `/v1/images/edits`, with previews."""

import base64
import io
import operator
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image

from vllm_omni_playground.client import FAILURES, Description, Server
from vllm_omni_playground.examples import IMAGES
from vllm_omni_playground.last_request import LastRequest
from vllm_omni_playground.sampling import SamplingFields
from vllm_omni_playground.stop_button import SILENT, Ending, connect_stop, enable_at

_MAX_IMAGES = 4
_NUM_PREVIEWS = 3


class ImagesTab:
    def __init__(self, server: Server, description: Description, last: gr.State) -> None:
        """Adds the components to the page. `last` has the visitor's `LastRequest`."""
        self._server, self._description = server, description
        stage = description.stage_for("image")
        assert stage is not None, "a pipeline that makes images has a stage for it"
        with gr.Row():
            with gr.Column():
                prompt = gr.Textbox(label="Prompt", lines=2, elem_id="images-prompt")
                gr.Examples([[text] for text in IMAGES], prompt, api_visibility="private")
                files = gr.File(
                    label="Input images",
                    file_count="multiple",  # Of any type: Gradio would refuse a file, and send without it.
                    visible="image" in description.inputs,
                    height=140,
                    elem_id="images-files",
                )
                with gr.Accordion("Settings", open=False):
                    negative = gr.Textbox(label="Negative prompt", visible="negative_prompt" in stage.sampling_params)
                    number = gr.Slider(1, _MAX_IMAGES, value=1, step=1, label="Number")
                    self._sampling = SamplingFields(description, kinds=("DiT",))
                with gr.Row():
                    generate = gr.Button("Generate", variant="primary", elem_id="images-generate", min_width=80)
                    stop = gr.Button("Stop", interactive=False, elem_id="images-stop", min_width=80)
            with gr.Column():
                state = gr.Markdown(elem_id="images-state")
                gallery = gr.Gallery(
                    label="Images",
                    format="png",
                    columns=2,
                    object_fit="contain",
                    elem_id="images-gallery",
                    buttons=["download"],
                )
        ending = gr.State(Ending())
        inputs = [last, ending, prompt, files, negative, number, *self._sampling.components]
        enable_at(stop, [generate.click])
        generating = generate.click(self._generate, inputs, [gallery, state], api_visibility="private")
        connect_stop(stop, [generating], lambda: "Stopped.", [state])
        # An update that was on its way when it was stopped has replaced that.
        generating.then(operator.attrgetter("text"), ending, state, **SILENT)

    async def _generate(
        self,
        last: LastRequest,
        ending: Ending,
        prompt: str,
        files: list[str] | None,
        negative: str,
        number: float,
        *sampling: str,
    ) -> AsyncIterator[tuple[Any, str]]:
        settings = self._sampling.as_fields(sampling, negative)
        ending.text = "Stopped."
        yield [], "Waiting ..."
        images: dict[int, Image.Image] = {}
        state = ""
        num_complete = 0
        try:
            given = [Path(path) for path in files or []]
            with last.sending("image") as headers:
                async with await self._request(prompt, given, int(number), settings, headers) as events:
                    async for event in events:
                        num_complete += event.type.endswith(".completed")
                        images[event.index] = _read(event.b64_json)
                        state = f"{num_complete} of {int(number)} complete" if num_complete else "A preview"
                        yield [images[index] for index in sorted(images)], state
            ending.text = state
        except FAILURES as error:
            ending.text = f"⚠️ {self._server.explain(error)}"

    async def _request(
        self, prompt: str, files: list[Path], number: int, settings: dict[str, Any], headers: dict[str, str]
    ) -> Any:
        common: dict[str, Any] = {
            "model": self._description.model,
            "prompt": prompt,
            "n": number,
            "stream": True,
            "partial_images": _NUM_PREVIEWS,
            "extra_body": settings,
            "extra_headers": headers,
        }
        if files:
            return await self._server.openai.images.edit(image=files, **common)
        return await self._server.openai.images.generate(**common)


def _read(data: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data)))
