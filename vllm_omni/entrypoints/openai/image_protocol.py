# SPDX-License-Identifier: Apache-2.0
"""Requests and answers of the image endpoints: OpenAI's, and the settings that diffusion models have besides."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai.media_inputs import MAX_IMAGES, as_urls
from vllm_omni.entrypoints.openai.media_messages import SETTINGS, diffusion_settings

_SIZE = r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"
_NO_EFFECT = "Accepted for OpenAI's clients; has no effect here."

ImageUrls = Annotated[list[str], BeforeValidator(as_urls)]
"""Addresses or data URIs of pictures; also one alone, and objects with an `image_url`."""


Prompt = Annotated[
    str, Field(min_length=1, max_length=32_000, description="What there is to be made.", examples=["A hen."])
]


class DiffusionSettings(BaseModel):
    """What images and videos have in common. What is not said is as the model's maker, or the operator, meant it."""

    model_config = ConfigDict(extra="forbid")

    prompt: Prompt
    model: str | None = Field(None, description="A name that the model is served under; default: the first.")
    size: str | None = Field(
        None, pattern=_SIZE, description="WIDTHxHEIGHT in pixels, or auto: the model's own.", examples=["1024x1024"]
    )
    height: int | None = Field(None, ge=1, description="Pixels; in place of size.")
    width: int | None = Field(None, ge=1, description="Pixels; in place of size.")
    negative_prompt: str | None = Field(None, max_length=32_000, description="What shall not be seen.")
    num_inference_steps: int | None = Field(None, ge=1, description="Denoising steps.", examples=[8])
    guidance_scale: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="How closely the prompt is followed, as the model was trained for."
    )
    true_cfg_scale: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="The same, by comparing with negative_prompt."
    )
    strength: float | None = Field(None, gt=0, le=1, description="How far an input image is changed.")
    seed: int | list[int] | None = Field(
        None,
        description="Of the first output, the next have seed + 1, ...; or one for each. 0 or more. Default: fresh.",
    )
    lora: str | None = Field(None, description="One of the server's LoRA adapters, see GET /v1/models.")
    lora_scale: float | None = Field(
        None, allow_inf_nan=False, description="How strongly the adapter counts. Default: 1, as it was trained."
    )
    extra_body: dict[str, Any] | None = Field(
        None, description=f"More settings, or the same ones, as some clients send them: {', '.join(SETTINGS)}."
    )
    user: str | None = Field(None, description=_NO_EFFECT)
    safety_identifier: str | None = Field(None, description=_NO_EFFECT)

    def settings(self) -> dict[str, Any]:
        """Fields of `DiffusionSamplingParams`, and `lora`.

        Raises:
            VLLMValidationError: Something is said twice, and differently.
        """
        given = diffusion_settings(self.model_dump(exclude_none=True), adapters=True)
        for name, value, field in self._openai_settings():
            if given.setdefault(name, value) != value:
                raise VLLMValidationError(f"{field} and {name} say different things; keep one of them", parameter=name)
        return given

    def _openai_settings(self) -> list[tuple[str, Any, str]]:
        """OpenAI's fields: the setting that each is about, its value, and the field's name."""
        if self.size in (None, "auto"):
            return []
        width, height = map(int, str(self.size).split("x"))
        return [("width", width, "size"), ("height", height, "size")]


class ImageRequest(DiffusionSettings):
    """A request for new images."""

    n: int | None = Field(None, ge=1, le=10, description="Images to make; default 1.")
    response_format: Literal["b64_json"] | None = Field(
        None, description="Images come in the answer, as base64; nothing is kept that a URL could lead to."
    )
    output_format: Literal["png", "jpeg", "webp"] | None = Field(None, description="Default: png.")
    output_compression: int | None = Field(
        None, ge=0, le=100, description="Quality of jpeg and webp, as OpenAI means it: 100 is the best. Default: 90."
    )
    stream: bool | None = Field(None, description="Server-sent events: previews, and each image as it is complete.")
    partial_images: int | None = Field(
        None, ge=0, le=3, description="Previews of each image, at most; only with stream. Each costs a small decode."
    )
    background: Literal["auto", "opaque"] | None = Field(None, description="No model makes transparent ones on demand.")
    quality: str | None = Field(None, description=f"{_NO_EFFECT} See num_inference_steps.")
    complexity: str | None = Field(None, description=_NO_EFFECT)
    style: str | None = Field(None, description=_NO_EFFECT)
    moderation: str | None = Field(None, description=_NO_EFFECT)

    def _openai_settings(self) -> list[tuple[str, Any, str]]:
        more: list[tuple[str, Any, str]] = []
        if self.n is not None:
            more.append(("num_outputs_per_prompt", self.n, "n"))
        if self.output_compression is not None:
            more.append(("output_quality", max(1, self.output_compression), "output_compression"))
        return super()._openai_settings() + more

    def check(self) -> None:
        """
        Raises:
            VLLMValidationError: Fields that do not go together.
        """
        if self.partial_images and not self.stream:
            raise VLLMValidationError("partial_images needs stream: true", parameter="partial_images")
        if self.output_compression is not None and self.output_format not in ("jpeg", "webp"):
            raise VLLMValidationError(
                "output_compression is for output_format jpeg or webp", parameter="output_compression"
            )


class ImageEditRequest(ImageRequest):
    """A request for images that are made of others."""

    image: ImageUrls = Field(
        min_length=1,
        max_length=MAX_IMAGES,
        validation_alias=AliasChoices("image", "images"),
        description="The picture, or pictures, to look at: files in a form; in JSON data URIs or addresses.",
    )
    input_fidelity: str | None = Field(None, description=f"{_NO_EFFECT} See strength.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_masks(cls, fields: Any) -> Any:
        """Fields of OpenAI's that would change the result, and that no model here has."""
        for name in ("mask", "markup"):
            if isinstance(fields, Mapping) and name in fields:
                raise VLLMValidationError(
                    f"this server's models change whole images and take no {name}; leave it out", parameter=name
                )
        return fields


class ImageFile(BaseModel):
    b64_json: str = Field(description="The file, in base64.")


class ImageTokens(BaseModel):
    text_tokens: int = 0
    image_tokens: int = 0


class ImageUsage(BaseModel):
    """Tokens of the pipeline's language models; a diffusion model has none."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: ImageTokens = ImageTokens()


class ImagesResponse(BaseModel):
    created: int = Field(description="Unix time, seconds.")
    data: list[ImageFile]
    background: str = "opaque"
    output_format: str
    size: str = Field(description="WIDTHxHEIGHT.")
    usage: ImageUsage


class ImageEvent(BaseModel):
    """A preview, or an image that is complete, in a stream."""

    type: str
    b64_json: str
    created_at: int
    size: str
    output_format: str
    background: str = "opaque"
    quality: str = "auto"
    index: int = Field(description="Which of the n images, from 0.")
    partial_image_index: int | None = Field(default=None, description="Of a preview: which of this image's, from 0.")
    usage: ImageUsage | None = None
