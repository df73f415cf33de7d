# SPDX-License-Identifier: Apache-2.0
"""OpenAI's tool `image_generation` of the Responses API: its settings, and the items and events of its calls.

The pipeline paints what the answer describes, as it does for a chat whose `modalities` have images; the model does not
decide whether.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from openai.types.responses import (
    ResponseImageGenCallCompletedEvent,
    ResponseImageGenCallGeneratingEvent,
    ResponseImageGenCallInProgressEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
)
from openai.types.responses.response_output_item import ImageGenerationCall
from pydantic import ValidationError
from vllm.exceptions import VLLMValidationError
from vllm.utils import random_uuid

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.entrypoints.openai.http_errors import describe_wrong_fields
from vllm_omni.entrypoints.openai.images import ImageRequest
from vllm_omni.entrypoints.openai.media_output import as_image_file, to_base64
from vllm_omni.events import CompletedEvent

CALL = "image_generation_call"
_TOOL = "image_generation"
_FIELDS = ("size", "output_format", "output_compression", "background", "quality")


def read_image_tool(tools: Sequence[Any], config: PipelineConfig) -> list[Mapping[str, Any] | None] | None:
    """
    Args:
        tools: Those of a request.

    Returns:
        The parameters of each stage; None: there is no such tool.

    Raises:
        VLLMValidationError: The pipeline does not paint, or has no such setting.
    """
    index, tool = next(((i, tool) for i, tool in enumerate(tools) if tool.type == _TOOL), (0, None))
    if tool is None:
        return None
    if "image" not in config.output_types:
        makes = ", ".join(config.output_types)
        raise VLLMValidationError(f"this model cannot paint; it outputs {makes}", parameter=f"tools[{index}]")
    if tool.input_image_mask is not None:
        raise VLLMValidationError("a mask is for /v1/images/edits", parameter=f"tools[{index}].input_image_mask")
    given = {name: value for name in _FIELDS if (value := getattr(tool, name)) is not None}
    try:
        request = ImageRequest(prompt=_TOOL, **given)
    except ValidationError as error:
        errors = [{**found, "loc": ("body", "tools", index, *found["loc"])} for found in error.errors()]
        message, parameter = describe_wrong_fields(errors)
        raise VLLMValidationError(message, parameter=parameter) from error
    settings = request.settings()
    denoisers = [stage for stage in config.stage_args if stage.kind.takes_settings]
    if settings and not denoisers:
        raise VLLMValidationError(f"this model has no {', '.join(settings)}", parameter=f"tools[{index}]")
    settings.setdefault("output_format", "png")
    return [settings if stage in denoisers else None for stage in config.stage_args]


def make_image_calls(event: CompletedEvent) -> list[ImageGenerationCall]:
    """The calls that have painted the images of a request. Encodes files: not for the event loop."""
    return [
        ImageGenerationCall(
            id=f"ig_{random_uuid()}",
            type="image_generation_call",
            status="completed",
            result=to_base64(as_image_file(image, "png")),
        )
        for output in event.outputs
        if output.final_output_type == "image"
        for image in output.images
    ]


def image_call_events(call: ImageGenerationCall, index: int, number: Callable[[Any], Any]) -> Iterator[Any]:
    """The events of a call in a stream, which is known when it is complete.

    Args:
        index: Of the item in the answer.
        number: Gives an event its number.
    """
    started = call.model_copy(update={"status": "in_progress", "result": None})
    item: dict[str, Any] = {"output_index": index, "sequence_number": -1}
    own: dict[str, Any] = {"item_id": call.id, **item}
    yield number(ResponseOutputItemAddedEvent(type="response.output_item.added", item=started, **item))
    yield number(ResponseImageGenCallInProgressEvent(type="response.image_generation_call.in_progress", **own))
    yield number(ResponseImageGenCallGeneratingEvent(type="response.image_generation_call.generating", **own))
    yield number(ResponseImageGenCallCompletedEvent(type="response.image_generation_call.completed", **own))
    yield number(ResponseOutputItemDoneEvent(type="response.output_item.done", item=call, **item))
