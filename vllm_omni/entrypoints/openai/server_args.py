# SPDX-License-Identifier: Apache-2.0
"""Flags of the server beside vLLM's: limits of requests and of the server, default outputs and names of voices.

`middleware.py`, `media_input.py`, `video_store.py`, `file_store.py`, `voices.py` and the endpoints apply the limits.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, TypeVar

from vllm_omni.entrypoints.cli_args import add_cli_args, byte_size, parse_json_object

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

Modality = Literal["text", "audio", "image", "video"]


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request. The error of a request that exceeds one names the flag that raises it.

    The length of audio clips is limited by vLLM's own variables: VLLM_MAX_AUDIO_DECODE_DURATION_S (600),
    VLLM_MAX_AUDIO_DECODE_BYTES (256 MiB) and VLLM_MAX_AUDIO_CLIP_FILESIZE_MB (25).
    """

    max_request_bytes: int = 256 * MIB
    """Bytes of a request's body; a larger one is answered with 413."""

    max_request_values: int = 2_000_000
    """Values of a request's JSON, of which an object counts as 10; more are answered with 413. The default fits prompts
    of as many token ids."""

    max_media_parts: int = 64
    """Images, audio clips and videos that a request may have, all together."""

    max_media_bytes: int = 128 * MIB
    """Bytes of one image, audio clip or video as it is sent or fetched, before it is decoded."""

    max_decoded_bytes: int = 2 * GIB
    """Bytes of all media of a request when they are decoded, counted before that: 4 for a pixel of an image, 3 for one
    of a frame that is read of a video, 4 for a sample of each channel of a sound. The default fits 44 photographs of 12
    megapixels, or three minutes of 1080p at two frames a second."""

    max_image_pixels: int = 8192 * 4320
    """Pixels of an image. The default is an 8K picture."""

    max_video_pixels: int = 4096 * 2304
    """Pixels of a frame of a video in a request. The default is a 4K frame."""

    max_video_seconds: float = 600.0
    """Length of a video in a request, in seconds."""

    max_voice_seconds: float = 60.0
    """Length of the recording of an uploaded voice, in seconds."""

    max_speech_inputs: int = 32
    """Texts of a batch of speech. They are spoken at the same time."""

    max_n: int = 128
    """Answers (`n`, also of beam search) that a request may ask for. The default is OpenAI's limit."""

    max_grammar_bytes: int = 64 * KIB
    """Bytes of the grammar of a structured output: of a JSON schema, the tools that a model has to choose from,
    `choice`, a regular expression or EBNF. A grammar is compiled before its request starts."""

    max_grammar_values: int = 5000
    """Keys and values of a JSON schema, nested ones too, values of `choice`, and alternatives of a regular expression
    or EBNF."""

    min_body_rate: int = 1024
    """Bytes a second of a request's body; one that comes more slowly for 30 seconds is answered with 408. Also of an
    answer, or of a realtime session, that waits for its client; see --send-timeout-s."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of what the server holds for all requests together."""

    max_total_request_bytes: int = 2 * GIB
    """Bytes of the bodies of all requests that have not been answered in full; requests beyond that are answered with
    429. At least --max-request-bytes."""

    max_client_request_bytes: int | None = None
    """Bytes of the bodies of one API key's requests, or, on a server without keys, of one address's, that have not been
    answered in full; requests beyond that are answered with 429. At least --max-request-bytes. Default: half of
    --max-total-request-bytes."""

    max_total_decoded_bytes: int = 4 * GIB
    """Bytes of decoded media, counted as for --max-decoded-bytes, of all requests whose prompts are being made; a
    request beyond that is answered with 429. At least --max-decoded-bytes."""

    max_client_decoded_bytes: int | None = None
    """Bytes of decoded media of the requests of one API key or, without keys, address. At least --max-decoded-bytes;
    default: half of --max-total-decoded-bytes."""

    send_timeout_s: float = 60.0
    """Seconds after which the connection of a client that reads its answer more slowly than --min-body-rate, or a
    realtime session whose client does not take an event, is closed."""

    video_dir: str | None = None
    """Existing directory for the files of generated videos, and of images that are answered as URLs. Default: the
    system's for temporary files."""

    max_stored_videos: int = 1000
    """Video jobs that are kept for each API key; for a new one its oldest that has ended is removed."""

    max_stored_video_bytes: int = 8 * GIB
    """Bytes of files of generated videos that are kept for each API key; for a new one its oldest are removed."""

    max_total_stored_video_bytes: int = 32 * GIB
    """Bytes of files of generated videos that are kept for all API keys together: beyond it a key's own oldest are
    removed for a new one; if that is not enough the video fails."""

    video_expires_after_s: float = 3600.0
    """Seconds that a video job and its file are kept after it has ended."""

    max_stored_images: int = 1000
    """Files of images answered as URLs that are kept for each API key; for new ones its oldest are removed."""

    max_stored_image_bytes: int = GIB
    """Bytes of files of images answered as URLs that are kept for each API key; for new ones its oldest are removed."""

    max_total_stored_image_bytes: int = 4 * GIB
    """Bytes of files of images answered as URLs that are kept for all API keys together: beyond it a key's own oldest
    are removed for new ones; if that is not enough the answer is 507."""

    image_expires_after_s: float = 3600.0
    """Seconds that the file of an image answered as a URL is kept."""

    max_stored_voices: int = 100
    """Uploaded voices that are kept for each API key."""

    max_stored_voice_bytes: int = 256 * MIB
    """Bytes of decoded recordings of uploaded voices that are kept, in memory, for each API key."""

    max_total_stored_voice_bytes: int = GIB
    """Bytes of decoded recordings of uploaded voices that are kept, in memory, for all API keys together; an upload
    beyond it is answered with 507."""

    voice_expires_after_s: float = 24 * 3600.0
    """Seconds that an uploaded voice is kept."""


@dataclass(frozen=True)
class RealtimeLimits:
    """Limits of realtime sessions, and of those of /v1/audio/speech/stream, which count among them."""

    max_realtime_sessions: int = 128
    """Realtime sessions, and streams of texts to be spoken, at once; a further one is answered with 429."""

    max_client_realtime_sessions: int | None = None
    """Realtime sessions at once of one API key, or, on a server without keys, of one address. Default: half of
    --max-realtime-sessions."""

    max_realtime_message_bytes: int = 24 * MIB
    """Bytes of a client's realtime event. The default fits OpenAI's 15 MiB of sound as base64."""

    max_realtime_message_values: int = 200_000
    """Values of a client's realtime event, of which an object counts as 10."""

    max_realtime_audio_s: float = 600.0
    """Seconds of users' sound that a realtime session keeps in its items, the newest, and as much that is not
    committed."""

    max_realtime_text_bytes: int = 64 * MIB
    """Bytes of texts and images that clients put into a realtime session; for more, its oldest turns are deleted."""

    max_total_realtime_bytes: int = 4 * GIB
    """Bytes that all realtime sessions hold: items, uncommitted sound, events that arrive, and text and speech that
    clients have not read, also those of other endpoints. What would exceed it is refused, and an answer is ended, with
    an error. At least --max-realtime-message-bytes."""

    max_client_realtime_bytes: int | None = None
    """Bytes that the realtime sessions of one API key or, without keys, address hold. At least
    --max-realtime-message-bytes; default: half of --max-total-realtime-bytes."""

    max_realtime_speculative_responses: int = 4
    """Answers of realtime sessions that are begun when the user pauses, before the turn has ended, at once, while no
    request waits; 0: none is."""

    max_realtime_session_s: float = 3600.0
    """Seconds after which a realtime session ends."""

    realtime_idle_timeout_s: float = 600.0
    """Seconds without an event or a response after which a realtime session ends."""

    realtime_lead_s: float = 5.0
    """How far speech that is sent in a realtime session may be ahead of its playing, in seconds. What has not been sent
    can still be cut."""


@dataclass(frozen=True)
class ApiOptions:
    """What OpenAI's API leaves open, what clients as they are need, and the page for a browser."""

    default_modalities: list[Modality] | None = None
    """Outputs of a chat request without `modalities`, such as `text audio`. Default: text, as in OpenAI's API; all
    outputs of a model that writes no text."""

    voice_map: dict[str, str] = field(default_factory=dict)
    """Further names of voices in requests for speech, each with the model's voice that it means: --voice-map
    '{"alloy": "ethan"}', or --voice-map.alloy ethan. The names of OpenAI's voices that are not given are mapped to the
    model's voices in turn; GET /v1/audio/voices shows the mapping."""

    model_aliases: bool = True
    """OpenAI's names of models, which some clients do not let a person change, mean the served model: tts-1, tts-1-hd
    and gpt-4o-mini-tts for speech, whisper-1, gpt-transcribe, gpt-4o-transcribe and gpt-4o-mini-transcribe for
    transcriptions, dall-e-2, dall-e-3, gpt-image-1 and gpt-image-2.5-flare for images. A name of --served-model-name
    wins."""

    api_key_file: str | None = None
    """A file of keys, one on each line, such as a secret of Docker or systemd: further keys beside those of --api-key,
    which are in the list of processes. Either wins over VLLM_API_KEY."""

    public_lists: bool = False
    """Answer GET /v1/models, /v1/audio/models and /v1/audio/voices without a key, for clients that send none there,
    such as Open WebUI. Every other path needs a key as before."""

    resumable_streams: bool = False
    """Keep a streamed answer for a minute, so that a client that has lost its connection goes on with GET
    /v1/streams/{id}. A disconnect then ends a request after this minute, or with DELETE at once."""

    playground: bool = False
    """Serve a page to try the model in a browser, at /playground. It needs the extra `ui`."""

    playground_auth: str | None = None
    """NAME:PASSWORD that the page asks visitors for. Needed with --api-key: who can use the page can use the model,
    without a key."""


Limits = TypeVar("Limits", RequestLimits, ServerLimits, RealtimeLimits)


def add_limit_arguments(group: argparse._ActionsContainer) -> None:
    """Adds a flag for each limit; its default is that of one of the classes above."""
    for limits in (RequestLimits, ServerLimits, RealtimeLimits):
        add_cli_args(group, limits, types={each.name: _parser_of(each) for each in fields(limits)})


def add_api_arguments(group: argparse._ActionsContainer) -> None:
    """Adds a flag for each of `ApiOptions`."""
    add_cli_args(group, ApiOptions, types={"voice_map": _voice_map})


def limits_from(args: argparse.Namespace, kind: type[Limits]) -> Limits:
    """The limits of parsed flags; defaults for flags that the program does not have."""
    given = vars(args)
    return kind(**{each.name: given[each.name] for each in fields(kind) if each.name in given})


def check_limits(args: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: Two limits contradict each other.
    """
    limits: dict[str, Any] = {
        **vars(limits_from(args, RequestLimits)),
        **vars(limits_from(args, ServerLimits)),
        **vars(limits_from(args, RealtimeLimits)),
    }
    for name, smaller in (
        ("max_total_request_bytes", "max_request_bytes"),
        ("max_client_request_bytes", "max_request_bytes"),
        ("max_total_decoded_bytes", "max_decoded_bytes"),
        ("max_client_decoded_bytes", "max_decoded_bytes"),
        ("max_total_realtime_bytes", "max_realtime_message_bytes"),
        ("max_client_realtime_bytes", "max_realtime_message_bytes"),
    ):
        value, largest = limits[name], limits[smaller]
        if value is not None and value < largest:
            what = "event" if smaller == "max_realtime_message_bytes" else "request"
            raise ValueError(
                f"{flag(name)} {value} is less than {flag(smaller)} {largest}: the largest {what} could never be "
                "read; raise the first or lower the second"
            )


def flag(name: str) -> str:
    """The flag that sets a limit, for messages."""
    return "--" + name.replace("_", "-")


def _parser_of(limit: Field[Any]) -> Callable[[str], Any]:
    if limit.name == "max_realtime_speculative_responses":
        return _not_negative_int
    return _positive_bytes if limit.name.endswith("_bytes") else _PARSERS[limit.type]


def _positive_int(text: str) -> int:
    return _at_least_1(int(text), text)


def _not_negative_int(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {text}")
    return value


def _positive_bytes(text: str) -> int:
    return _at_least_1(byte_size(text), text)


def _at_least_1(value: int, text: str) -> int:
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def _positive_float(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text}")
    return value


def _directory(text: str) -> str:
    if not os.path.isdir(text) or not os.access(text, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"must be an existing directory that the server can write to, not {text!r}")
    return text


def _voice_map(text: str) -> dict[str, str]:
    return parse_json_object(text, str, '{"NAME": "VOICE"}')


_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: _positive_int,
    int | None: _positive_int,
    float: _positive_float,
    str | None: _directory,
}
