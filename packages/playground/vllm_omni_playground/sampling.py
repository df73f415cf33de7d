# SPDX-License-Identifier: Apache-2.0
"""Fields for the sampling of each stage, and the `sampling_params_list` of what a visitor changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from vllm_omni_playground.client import Description

_FIELDS: dict[str, type] = {
    "temperature": float, "top_p": float, "top_k": int, "repetition_penalty": float, "max_tokens": int, "seed": int,
}  # fmt: skip
"""Of a stage that samples tokens."""

_SETTINGS: dict[str, type] = {
    "num_inference_steps": int, "guidance_scale": float, "true_cfg_scale": float, "strength": float,
    "num_frames": int, "fps": float, "height": int, "width": int, "seed": int,
}  # fmt: skip
"""Of a diffusion stage, as far as its pipeline has them."""


@dataclass(frozen=True)
class _Place:
    stage: int
    name: str
    type: type
    default: str


class SamplingFields:
    """One number for each parameter; empty: the stage's own. As text: a number's field has no empty value.

    Attributes:
        components: In the order in which `as_list` and `as_fields` take their values.
    """

    def __init__(self, description: Description, kinds: Sequence[str] = ("AR", "DiT")) -> None:
        """Adds the fields to the page, in a group for each stage of these kinds."""
        self.components: list[gr.Textbox] = []
        self._places: list[_Place] = []
        self._num_stages = len(description.stages)
        for index, stage in enumerate(description.stages):
            fields = _FIELDS if stage.kind == "AR" else _SETTINGS
            if stage.kind == "DiT":
                fields = {name: fields[name] for name in fields if name in stage.sampling_params or name == "seed"}
            if stage.kind in kinds and (stage.kind == "AR" or stage.sampling_params):
                gr.Markdown(f"**{stage.name}**")
                with gr.Row():
                    for name, kind in fields.items():
                        self._add(index, name, kind, stage.sampling_params.get(name))

    def _add(self, stage: int, name: str, kind: type, default: Any) -> None:
        value = f"{default:g}" if isinstance(default, (int, float)) else ""
        self._places.append(_Place(stage, name, kind, value))
        self.components.append(gr.Textbox(value, label=name, min_width=110, placeholder="default"))

    def _changed(self, values: Sequence[str]) -> list[dict[str, Any]]:
        """The values that differ from the defaults, a dict for each stage.

        Raises:
            gr.Error: One is not a number.
        """
        changed: list[dict[str, Any]] = [{} for _ in range(self._num_stages)]
        for place, value in zip(self._places, values, strict=True):
            if value.strip() and value != place.default:
                changed[place.stage][place.name] = _parse(place, value)
        return changed

    def as_list(self, values: Sequence[str]) -> list[dict[str, Any] | None] | None:
        """The changed values as `sampling_params_list` of a request; None if nothing differs."""
        entries = [entry or None for entry in self._changed(values)]
        return entries if any(entries) else None

    def as_fields(self, values: Sequence[str], negative_prompt: str) -> dict[str, Any]:
        """The changed values as fields of a request for images or videos, with a negative prompt that is not empty."""
        fields = {name: value for entry in self._changed(values) for name, value in entry.items()}
        return fields | {"negative_prompt": negative_prompt} if negative_prompt else fields


def _parse(place: _Place, value: str) -> Any:
    try:
        return place.type(value)
    except ValueError as error:
        kind = "a whole number" if place.type is int else "a number"
        raise gr.Error(f"{place.name} must be {kind}, not {value!r}", print_exception=False) from error
