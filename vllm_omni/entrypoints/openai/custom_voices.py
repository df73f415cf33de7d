# SPDX-License-Identifier: Apache-2.0
"""/v1/audio/voices: the voices of the model, and reference voices that clients upload, as in OpenAI's API.

The lists of voices and of models (/v1/audio/models) have the form that Open WebUI and other servers of speech agree on.
"""

from argparse import Namespace
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Request
from openai.types.audio import VoiceDeleted
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import FORM_ERRORS
from vllm_omni.entrypoints.openai.media_endpoint import get_handler, served_names
from vllm_omni.entrypoints.openai.media_request import MediaFetcher, RequestModel, SoundUrl
from vllm_omni.entrypoints.openai.request_context import RequestContext, model_route
from vllm_omni.entrypoints.openai.server_args import RequestLimits, ServerLimits, flag, limits_from
from vllm_omni.entrypoints.openai.speech_request import Text, check_read
from vllm_omni.entrypoints.openai.stage_params import without_nulls
from vllm_omni.entrypoints.openai.voices import CustomVoice, VoiceStore
from vllm_omni.inputs import OmniPrompt

_MAX_NAME = 100
_TRIAL_TEXT = "Hello."

VoiceName = Annotated[str, Path(max_length=200, description="Id or name of an uploaded voice.")]


def _check_name(name: str) -> str:
    if name != name.strip() or not name.isprintable() or "/" in name:
        raise ValueError("a name has printable characters, no slash, and no space at its ends")
    return name


class VoiceRequest(RequestModel):
    """A recording of a voice."""

    model_config = ConfigDict(extra="forbid")
    file_field = "audio_sample"

    name: Annotated[str, AfterValidator(_check_name)] = Field(
        min_length=1, max_length=_MAX_NAME, description="How requests name it.", examples=["narrator"]
    )
    audio_sample: SoundUrl = Field(description="The recording: a file in a form; in JSON a data URI or an address.")
    consent: Text = Field(
        description="Why this voice may be used: the person's consent, or where it is kept. Kept with the voice.",
        examples=["This is my voice, and I agree that it is imitated."],
    )
    ref_text: Text | None = Field(None, description="What is said in the recording; some models need it.")
    language: Text | None = Field(None, description="The language that it speaks, of models that read one.")
    type: Literal["audio_sample"] = Field("audio_sample", description="Voices are made of recordings only.")


class ListedVoice(BaseModel):
    id: str = Field(description="What a request names.", examples=["ethan"])
    name: str = Field(description="What a person reads; the same.", examples=["ethan"])


class VoiceList(BaseModel):
    voices: list[ListedVoice] = Field(
        description="The model's voices, the default one first; empty if there is no choice."
    )
    voice_map: dict[str, str] = Field(description="Further names, each with the voice that it means.")
    uploaded_voices: list[CustomVoice] = Field(description="The voices that this API key has uploaded, oldest first.")


class AudioModel(BaseModel):
    id: str = Field(description="A name that the model is served under.")


class AudioModelList(BaseModel):
    models: list[AudioModel] = Field(description="Empty if the model makes no audio.")


class CustomVoices:
    """The uploaded voices of one model.

    Attributes:
        store: The voices.
    """

    def __init__(self, client: OmniEngineClient, media: MediaFetcher, args: Namespace) -> None:
        self._client = client
        self._media = media
        self._max_seconds = limits_from(args, RequestLimits).max_voice_seconds
        self.store = VoiceStore(limits_from(args, ServerLimits))

    async def create(self, request: VoiceRequest, owner: bytes) -> CustomVoice:
        """Keeps a voice, after a prompt with it has been made.

        Raises:
            VLLMClientError, OmniError: The model does not imitate voices, or the request is wrong, or refused.
        """
        if "ref_audio" not in self._client.prompt_fields:
            raise VLLMValidationError(
                "this model cannot imitate a voice: it reads no ref_audio; GET /v1/audio/voices lists its own voices",
                parameter="audio_sample",
            )
        about = without_nulls({"ref_text": request.ref_text, "language": request.language})
        check_read(about, self._client.prompt_fields)
        if request.name.lower() in self._client.voices:
            raise VLLMValidationError(f"{request.name!r} is a voice of the model; choose another", parameter="name")
        self.store.check_name(request.name, owner)
        samples, rate = await self._media.voice(request.audio_sample, "audio_sample")
        self._check_seconds(len(samples) / rate)
        prompt = OmniPrompt(
            prompt=_TRIAL_TEXT,
            modalities=["audio"],
            additional_information={**about, "ref_audio": (samples, rate)},
        )
        await self._client.llm.check_prompt(prompt)
        return self.store.add(owner, (samples, rate), name=request.name, consent=request.consent, **about)

    def _check_seconds(self, seconds: float) -> None:
        if not 0 < seconds <= self._max_seconds:
            raise VLLMValidationError(
                f"the recording lasts {seconds:.1f} s; it must last up to {self._max_seconds:g} s "
                f"({flag('max_voice_seconds')})",
                parameter="audio_sample",
            )


def _voices_of(raw_request: Request) -> CustomVoices:
    return get_handler(raw_request, "audio").custom_voices


router = APIRouter()


@router.get("/v1/audio/voices")
async def list_voices(raw_request: Request) -> VoiceList:
    """The voices that a request can choose, and further names for them."""
    state = raw_request.app.state
    voices = state.engine_client.voices
    handler = state.omni_handlers.get("audio")
    uploaded = [] if handler is None else handler.custom_voices.store.voices(RequestContext.of(raw_request).owner)
    own = [ListedVoice(id=name, name=name) for name in voices.names]
    return VoiceList(voices=own, voice_map=voices.map, uploaded_voices=uploaded)


@router.get("/v1/audio/models")
async def list_audio_models(raw_request: Request) -> AudioModelList:
    """The names for requests for speech, as clients look them up that choose voices."""
    state = raw_request.app.state
    names = served_names(state) if "audio" in state.omni_handlers else []
    return AudioModelList(models=[AudioModel(id=name) for name in names])


@router.post("/v1/audio/voices", responses=FORM_ERRORS, openapi_extra=VoiceRequest.describe_body())
@model_route
async def create_voice(
    request: Annotated[VoiceRequest, Depends(VoiceRequest.read)], raw_request: Request
) -> CustomVoice:
    """Keeps the recording of a voice for some time; requests of the same API key can name it."""
    return await _voices_of(raw_request).create(request, RequestContext.of(raw_request).owner)


@router.get("/v1/audio/voices/{name}", responses=FORM_ERRORS)
async def retrieve_voice(name: VoiceName, raw_request: Request) -> CustomVoice:
    """An uploaded voice, without its recording."""
    return _voices_of(raw_request).store.get(name, RequestContext.of(raw_request).owner)


@router.delete("/v1/audio/voices/{name}", responses=FORM_ERRORS)
async def delete_voice(name: VoiceName, raw_request: Request) -> VoiceDeleted:
    """Removes an uploaded voice."""
    voice = _voices_of(raw_request).store.delete(name, RequestContext.of(raw_request).owner)
    return VoiceDeleted(id=voice.id, deleted=True, object="audio.voice.deleted")
