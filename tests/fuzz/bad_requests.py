# SPDX-License-Identifier: Apache-2.0
"""Bad requests by kind of server: wrong fields, media, bodies and HTTP, and client aborts.

Every maker gets a random generator, and returns a request that depends on its state only.
"""

import base64
import gzip
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.fuzz import broken_media as media
from tests.fuzz.fuzz_requests import FuzzRequest, post_json

Maker = Callable[[random.Random], FuzzRequest]

CHAT, COMPLETIONS, SPEECH = "/v1/chat/completions", "/v1/completions", "/v1/audio/speech"
BATCH, VOICES, TRANSCRIPTIONS = "/v1/audio/speech/batch", "/v1/audio/voices", "/v1/audio/transcriptions"
IMAGES, EDITS, VIDEOS = "/v1/images/generations", "/v1/images/edits", "/v1/videos"

# A valid request without a limit may take long.
_ABORT_AFTER_S = 2.0

_HUGE: list[Any] = [1e308, -1e308, 10**400, -(10**400), 2**63, -(2**63) - 1]
_WRONG: list[Any] = [[], {}, [[]], {"a": None}, "\ud800", "x" * 100, [None], "NaN"]
_MESSAGES = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> dict[str, Any]:
    """Few tokens, in case the request is valid."""
    return {"messages": _MESSAGES, "max_tokens": 2, "modalities": ["text"], **fields}


def _uri(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


OMNI_BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat(),
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 2},
    SPEECH: {"input": "Hello", "sampling_params_list": [None, {"max_tokens": 4}, None]},
    BATCH: {"inputs": ["Hello", "a"], "sampling_params_list": [None, {"max_tokens": 4}, None]},
    TRANSCRIPTIONS: {"file": _uri("audio/wav", media.audio_file("wav")), "prompt": "Hello"},
}
VOICE_BODIES: dict[str, dict[str, Any]] = {
    SPEECH: {"input": "Hello", "sampling_params_list": [{"max_tokens": 4}, None]},
    BATCH: {"inputs": ["Hello", "a"], "sampling_params_list": [{"max_tokens": 4}, None]},
    VOICES: {
        "name": "Hello",
        "consent": "I agree.",
        "ref_text": "a b",
        "audio_sample": _uri("audio/flac", media.audio_file("flac")),
    },
}
IMAGE_BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": _MESSAGES, "extra_body": {"num_inference_steps": 1, "height": 32, "width": 32}},
    IMAGES: {"prompt": "A hen", "size": "32x32", "num_inference_steps": 1},
}
VIDEO_BODIES: dict[str, dict[str, Any]] = {
    VIDEOS: {"prompt": "A hen", "size": "32x32", "num_inference_steps": 1, "num_frames": 5},
}

_BAD_SOUNDS: list[Any] = [
    1, {}, "", "x", "data:,", "data:audio/wav;base64,AAAA", "data:audio/wav;base64,%%%", "file:///etc/passwd",
    "http://127.0.0.1:1/x", "http://169.254.169.254/latest", "gopher://x",
]  # fmt: skip

# Fields of each endpoint, with values that are not valid.
BAD_FIELDS: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        "messages": [None, 1, "x", [1], [None], [{"role": "nobody", "content": 1}],
                     [{"role": "user", "content": [{"type": "hologram"}]}],
                     [{"role": "user", "content": [{"type": "image_url"}]}],
                     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}],
                     [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
                     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "ftp://x/y"}}]}],
                     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]],
        "modalities": ["text", ["smell"], [1], {}, []],
        "audio": [1, "wav", {"format": "midi"}, {"voice": 7}, {"format": ["wav"]}],
        "sampling_params_list": [{}, [], [None] * 50, [1, 2, 3], ["a"], [{"colour": 1}]],
        "extra_body": [1, "x", [1], {"num_inference_steps": -1}, {"height": 10**9}, {"nothing": 1}],
    },
    COMPLETIONS: {"prompt": [None, {}, [[[1]]], [-1], [10**9], [2**63], [1.5]]},
    SPEECH: {
        "input": [None, 1, "", "   ", ["x"], "x" * 5000, {}],
        "voice": ["nobody", 1, {}, ["ethan"], "../../etc/passwd", ""],
        "response_format": ["midi", 1, [], ""],
        "speed": [0, -1, 100, "fast", 1e308, {}],
        "stream_format": ["x", 1],
        "instructions": [1, {}, "x" * 5000],
        "language": [1, {}, "x" * 101],
        "lang_code": [1, {}, "x" * 101],
        "sample_rate": [0, -1, 7999, 10**9, "high", 1.5, {}],
        "volume_multiplier": [-1, 11, 1e308, "loud", {}],
        "ref_audio": [*_BAD_SOUNDS, {"audio_url": 1}, ["a", "b"]],
        "ref_text": ["a", "", " ", 1, {}],
        "context": [1, "x", [1], [{}], [{"text": "a"}], *([{"text": "a", "audio": sound}] for sound in _BAD_SOUNDS)],
        "sampling_params_list": [[], [1], {}, [{"x": 1}, {"x": 1}, {"x": 1}]],
        "colour": [1],
    },
    BATCH: {
        "inputs": [None, 1, "x", [], [""], [1], [["a"]], ["x" * 5000], ["a"] * 33],
        "input": ["a"], "stream": [True], "voice": ["nobody", 1], "ref_audio": _BAD_SOUNDS, "colour": [1],
    },
    VOICES: {
        "name": [None, 1, "", " ", "a/b", "a\x00", "alloy", "DEFAULT", "x" * 200],
        "audio_sample": [None, *_BAD_SOUNDS],
        "consent": [None, 1, "", " ", "x" * 5000],
        "ref_text": [1, "", " ", "x" * 5000],
        "language": ["english", 1], "type": ["prompt", 1], "colour": [1],
    },
    TRANSCRIPTIONS: {
        "file": [None, *_BAD_SOUNDS],
        "response_format": ["srt", "vtt", "diarized_json", "xml", 1],
        "language": ["english", "xx", 1], "temperature": [-1, 2, "hot"], "prompt": [1, {}, "x" * 5000],
        "timestamp_granularities": [["word"]], "include": [["logprobs"]], "chunking_strategy": [{"type": "server_vad"}],
        "colour": [1],
    },
    IMAGES: {
        "prompt": [None, 1, "", [], "x" * 40_000],
        "size": ["0x0", "big", "99999x99999", "1x", 512, "-1x5"],
        "n": [0, -1, 11, 10**9, "many", 1.5],
        "num_inference_steps": [0, -1, 10**9, "x"],
        "guidance_scale": [-1, 1e300, "x", {}],
        "seed": [-1, 2**70, "x", {}, [1, 2, 3]],
        "response_format": ["file", 1],
        "output_format": ["bmp", 1],
        "background": ["transparent"],
        "height": [0, -5, 10**9], "width": [0, -5, 10**9],
        "negative_prompt": [1, {}],
        "extra_body": [1, [], {"nothing": 1}],
        "colour": [1],
    },
    VIDEOS: {
        "prompt": [None, 1, "", [], "x" * 40_000],
        "size": ["0x0", "big", "99999x99999", 5],
        "seconds": [0, -1, 1e9, "long", {}],
        "num_frames": [0, -1, 10**9, "x", 1.5],
        "fps": [0, -1, 1e9, "x"],
        "num_inference_steps": [0, -1, 10**9],
        "input_reference": [1, "x", {"image_url": 1}, ["a", "b"], "file:///etc/passwd"],
        "colour": [1],
    },
}  # fmt: skip

# Fields of vLLM's requests with limits.
_SAMPLING = {
    "temperature": [-1, "hot", 1e400], "top_p": [0, -1, 2, "x"], "top_k": [-5, "x", 1.5], "min_p": [-1, 2],
    "max_tokens": [-1, "x", 2**70, 1.5], "n": [0, -1, "x", 10**9], "presence_penalty": [-9, 9, "x"],
    "frequency_penalty": [-9, 9], "repetition_penalty": [-1, 0], "stop": [1, {}, [1]], "seed": ["x", 2**70, {}],
    "logit_bias": [1, {"x": 1}, {"99999999": 1}], "stop_token_ids": ["x", ["x"]], "min_tokens": [-1, 10**9],
    "allowed_token_ids": [[], [10**9], "x"], "response_format": [1, {"type": "x"}], "logprobs": ["x", 10**9, -9],
}  # fmt: skip
for _endpoint in (CHAT, COMPLETIONS):
    BAD_FIELDS[_endpoint] |= _SAMPLING


def wrong_fields(bodies: dict[str, dict[str, Any]], *, samples: bool) -> list[Maker]:
    """A valid request with one wrong field; `samples`: the server's model samples tokens."""

    def make(rng: random.Random) -> FuzzRequest:
        path = rng.choice(list(bodies))
        name = rng.choice([name for name in BAD_FIELDS[path] if samples or name not in _SAMPLING or path != CHAT])
        value = rng.choice(BAD_FIELDS[path][name])
        return _not_strictly_json(f"bad {name}", path, {**bodies[path], name: value})

    def make_odd(rng: random.Random) -> FuzzRequest:
        path = rng.choice(list(bodies))
        name = rng.choice(list(BAD_FIELDS[path]))
        value = rng.choice([*_HUGE, *_WRONG])
        request = _not_strictly_json("odd value", path, {**bodies[path], name: value}, must_fail=False)
        return replace(request, abort_after_s=_ABORT_AFTER_S)

    return [make, make, make_odd]


def _not_strictly_json(what: str, path: str, body: Any, **kwargs: Any) -> FuzzRequest:
    """As Python writes it, but 1e999 for numbers beyond the range of a float."""
    return post_json(what, path, json.dumps(body).replace("Infinity", "1e999").encode("utf-8"), **kwargs)


def broken_bodies(bodies: dict[str, dict[str, Any]]) -> list[Maker]:
    """Bodies that are not JSON, or JSON that a server should refuse."""
    paths = list(bodies)

    def text(rng: random.Random) -> bytes:
        return json.dumps(bodies[rng.choice(paths)]).encode()

    makers: dict[str, Callable[[random.Random], bytes]] = {
        "no body": lambda rng: b"",
        "noise": lambda rng: rng.randbytes(rng.randrange(1, 2000)),
        "half of the JSON": lambda rng: text(rng)[: rng.randrange(1, 20)],
        "invalid UTF-8": lambda rng: (
            text(rng).replace(b"Hello", b"\xff\xfe").replace(b"A hen", b"\xc3\x28")[:-1] + b"}"
        ),
        "NaN": lambda rng: text(rng)[:-1] + b', "temperature": NaN}',
        "Infinity": lambda rng: text(rng)[:-1] + b', "seed": -Infinity}',
        "half of a surrogate pair": lambda rng: text(rng).replace(b"H", b"\\ud800").replace(b"A", b"\\udfff"),
        "deep list": lambda rng: b"[" * 100_000,
        "deep object": lambda rng: b'{"messages":' * 5000 + b"1" + b"}" * 5000,
        "deep field": lambda rng: text(rng)[:-1] + b', "metadata": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        "not an object": lambda rng: rng.choice([b"[]", b"1", b'"x"', b"null", b"true"]),
        "UTF-16": lambda rng: text(rng).decode().encode("utf-16"),
        "gzip bomb": lambda rng: gzip.compress(bytes(4 << 20)),
    }

    def make(rng: random.Random) -> FuzzRequest:
        what = rng.choice(list(makers))
        request = post_json(what, rng.choice(paths), makers[what](rng))
        return (
            replace(request, headers={**request.headers, "Content-Encoding": "gzip"})
            if what == "gzip bomb"
            else request
        )

    return [make]


def broken_http(bodies: dict[str, dict[str, Any]]) -> list[Maker]:
    """Wrong headers, methods and paths, and requests that are cut off."""
    paths = list(bodies)

    def make(rng: random.Random) -> FuzzRequest:
        path = rng.choice(paths)
        good = post_json("", path, bodies[path])
        whole = len(good.wire)
        chunked = {**good.headers, "Transfer-Encoding": "chunked"}
        return rng.choice(
            [
                replace(good, what="wrong method", method=rng.choice(["PUT", "PATCH", "TRACE"])),
                replace(good, what="no such path", path=rng.choice([path + "/x", "/../etc/passwd", "/v1/%00", "//"])),
                replace(good, what="no content type", headers={}, must_fail=False),
                replace(good, what="form as JSON", headers={"Content-Type": "multipart/form-data; boundary=x"}),
                replace(good, what="form without end", headers={"Content-Type": "multipart/form-data"}),
                replace(good, what="other type", headers={"Content-Type": "image/png"}, must_fail=False),
                replace(good, what="huge length", headers={**good.headers, "Content-Length": str(10**12)}),
                replace(good, what="negative length", headers={**good.headers, "Content-Length": "-5"}),
                replace(good, what="wrong chunks", headers=chunked, body=b"zz\r\nnothing\r\n"),
                replace(good, what="long header", headers={**good.headers, "X-A": "a" * 100_000}, must_fail=False),
                replace(good, what="cut in the middle", cut=rng.randrange(1, whole)),
                replace(good, what="cut chunks", headers=chunked, body=b"ff\r\n" + good.body, cut=whole),
            ]
        )

    return [make]


def client_aborts(bodies: dict[str, dict[str, Any]], long: dict[str, dict[str, Any]]) -> list[Maker]:
    """Valid requests that the client aborts after a random time."""

    def make(rng: random.Random) -> FuzzRequest:
        path = rng.choice(list(bodies))
        body = {**bodies[path], **long.get(path, {})}
        if path in (CHAT, COMPLETIONS, SPEECH):
            body["stream"] = rng.random() < 0.5
        return post_json("client abort", path, body, must_fail=False, abort_after_s=rng.uniform(0.0, 0.6))

    return [make]


_CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
_SAID = {"id": "audio-0", "data": "AAAA", "expires_at": 1, "transcript": "Hello."}
# Turns of the assistant as OpenAI's objects dump them, and as clients join them from streams.
_HISTORY: list[list[dict[str, Any]]] = [
    [{"role": "assistant", "content": "Hi.", "refusal": None, "annotations": None, "audio": None, "function_call": None,
      "tool_calls": None}],
    [{"role": "assistant", "content": None, "audio": _SAID}],
    [{"role": "assistant", "audio": {"id": "audio-of-another-server"}}],
    [{"role": "assistant", "content": None, "tool_calls": [_CALL]},
     {"role": "tool", "tool_call_id": "call-1", "content": "A hen."}],
    [{"role": "assistant", "content": "", "tool_calls": []}],
]  # fmt: skip
_NULLS: dict[str, list[str]] = {
    CHAT: [
        "stop",
        "n",
        "seed",
        "tools",
        "audio",
        "modalities",
        "response_format",
        "logprobs",
        "user",
        "stream_options",
    ],
    COMPLETIONS: ["stop", "n", "seed", "suffix", "logprobs", "user"],
    SPEECH: ["response_format", "speed", "stream_format", "stream", "voice", "instructions"],
    IMAGES: ["n", "size", "quality", "response_format", "output_format", "background", "user", "seed"],
    VIDEOS: ["size", "seconds", "input_reference", "seed", "fps"],
}
_LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def odd_clients(bodies: dict[str, dict[str, Any]]) -> list[Maker]:
    """What other clients send: null where a field is meant to be absent, dumped histories, and other HTTP."""
    paths = [path for path in bodies if path in _NULLS]

    def nulls(rng: random.Random) -> FuzzRequest:
        path = rng.choice(paths)
        names = rng.sample(_NULLS[path], rng.randrange(1, 4))
        return _odd("null fields", path, {**bodies[path], **dict.fromkeys(names)})

    def history(rng: random.Random) -> FuzzRequest:
        body = bodies[CHAT]
        return _odd("history", CHAT, {**body, "messages": [*_MESSAGES, *rng.choice(_HISTORY), *_MESSAGES]})

    def stock_chat(rng: random.Random) -> FuzzRequest:
        fields = {
            "messages": [{"role": "system", "content": "Be kind."}, *_MESSAGES], "tools": rng.choice([[], [_LOOK]]),
            "response_format": {"type": "text"}, "modalities": rng.choice([["image", "text"], ["text", "audio"]]),
            "stream": rng.random() < 0.5,
        }  # fmt: skip
        return _odd("stock client", CHAT, {**bodies[CHAT], **fields})

    def http(rng: random.Random) -> FuzzRequest:
        method, path = rng.choice(
            [("HEAD", "/health"), ("HEAD", "/v1/models"), ("GET", "/v1/models/x"), ("HEAD", f"{VIDEOS}/x/content"),
             ("GET", f"{VIDEOS}/x/content"), ("OPTIONS", paths[0])]
        )  # fmt: skip
        headers = {"Range": rng.choice(["bytes=0-1", "bytes=-1", "bytes=9-1", "x"]), "Origin": "http://example.com"}
        return FuzzRequest("other method", method, path, headers=headers, must_fail=False)

    return [nulls, http, *([history, stock_chat] if CHAT in bodies else [])]


def _odd(what: str, path: str, body: dict[str, Any]) -> FuzzRequest:
    return post_json(what, path, body, must_fail=False, abort_after_s=_ABORT_AFTER_S)


def odd_parts() -> list[Maker]:
    """Chat with media that are valid, but odd, or that browsers and shells write in their own way."""

    def make(rng: random.Random) -> FuzzRequest:
        kind, makers = rng.choice([("image", media.ODD_IMAGES), ("audio", media.ODD_SOUNDS)])
        name = rng.choice(list(makers))
        return replace(_chat_with(kind, name, makers[name](rng), rng), must_fail=False)

    def written_by_others(rng: random.Random) -> FuzzRequest:
        wav = base64.b64encode(media.audio_file("wav")).decode()
        mp4 = base64.b64encode(media.video(rng.choice([1, 2, 4]))).decode()
        in_lines = "\n".join(mp4[i : i + 76] for i in range(0, len(mp4), 76))
        sound_format = rng.choice(
            ["wav", "mp3", "flac", "opus", "aac", "ogg", "webm", "m4a", "pcm16", None, "", "midi"]
        )
        part = rng.choice(
            [
                {"type": "video_url", "video_url": {"url": f"data:video/webm;codecs=vp8,opus;base64,{mp4}"}},
                {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{in_lines}"}},
                {"type": "input_audio", "input_audio": {"data": f"data:audio/wav;base64,{wav}", "format": "wav"}},
                {"type": "input_audio", "input_audio": {"data": wav, "format": sound_format}},
                {"type": "image_url", "image_url": {"url": _uri("image/png", media.image_file("PNG")), "detail": None}},
            ]
        )
        return replace(_chat("written by others", [part]), must_fail=False)

    return [make, written_by_others]


def odd_uploads(path: str, field: str, fields: dict[str, str]) -> list[Maker]:
    """Forms with an image that is valid, but odd, and with parts that are unfilled or have no file name."""

    def make(rng: random.Random) -> FuzzRequest:
        name = rng.choice(list(media.ODD_IMAGES))
        request = _form(name, path, field, fields, media.ODD_IMAGES[name](rng))
        if rng.random() < 0.3:
            request = replace(request, body=request.body.replace(b'; filename="a.png"', b""))
        return replace(request, must_fail=False)

    return [make]


def _kind_of(doubtful: str) -> str:
    """Of one of `media.DOUBTFUL`."""
    if doubtful == "half a JPEG":
        return "image"
    return {"PNG": "image", "JPEG": "image", "a": "image", "MP4": "video"}.get(doubtful.split()[0], "audio")


def broken_parts() -> list[Maker]:
    """Chat with an image, audio or video part that is broken."""

    def make(rng: random.Random) -> FuzzRequest:
        kind, makers = rng.choice(
            [("image", media.BROKEN_IMAGES), ("audio", media.BROKEN_AUDIO), ("video", media.BROKEN_VIDEOS)]
        )
        name = rng.choice(list(makers))
        return _chat_with(kind, name, makers[name](rng), rng)

    def make_doubtful(rng: random.Random) -> FuzzRequest:
        name = rng.choice(list(media.DOUBTFUL))
        return replace(_chat_with(_kind_of(name), name, media.DOUBTFUL[name](rng), rng), must_fail=False)

    def make_address(rng: random.Random) -> FuzzRequest:
        url = rng.choice(
            ["file:///etc/passwd", "http://127.0.0.1:1/x", "http://169.254.169.254/latest", "http://[::1]/",
             "http://localhost/x", "gopher://x", "data:image/png;base64,%%%", "data:image/png,abc", "x", "http://",
             "http://0x7f000001/", "data:image/png;base64," + "A" * 11]
        )  # fmt: skip
        kind = rng.choice(["image", "audio", "video"])
        return _chat("address", [{"type": f"{kind}_url", f"{kind}_url": {"url": url}}])

    return [make, make, make_doubtful, make_address]


def _chat_with(kind: str, name: str, data: bytes, rng: random.Random) -> FuzzRequest:
    encoded = base64.b64encode(data).decode()
    if kind == "audio" and rng.random() < 0.5:
        return _chat(name, [{"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}])
    media_type = {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}[kind]
    url = f"data:{media_type};base64,{encoded}"
    return _chat(name, [{"type": f"{kind}_url", f"{kind}_url": {"url": url}}])


def _chat(what: str, parts: list[dict[str, Any]]) -> FuzzRequest:
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return post_json(what, CHAT, chat(messages=[{"role": "user", "content": content}]))


def broken_uploads(path: str, field: str, fields: dict[str, str]) -> list[Maker]:
    """Forms with a file that is not an image."""

    def make(rng: random.Random) -> FuzzRequest:
        name = rng.choice(list(media.BROKEN_IMAGES))
        return _form(name, path, field, fields, media.BROKEN_IMAGES[name](rng))

    def make_doubtful(rng: random.Random) -> FuzzRequest:
        name, data = media.doubtful_image(rng)
        return replace(_form(name, path, field, fields, data), must_fail=False)

    def make_json(rng: random.Random) -> FuzzRequest:
        name = rng.choice(list(media.BROKEN_IMAGES))
        url = "data:image/png;base64," + base64.b64encode(media.BROKEN_IMAGES[name](rng)).decode()
        return post_json(name, path, {**fields, field: rng.choice([url, {"image_url": url}])})

    return [make, make_doubtful, make_json]


def broken_recordings(path: str, field: str, fields: dict[str, str]) -> list[Maker]:
    """Forms with a file that is no sound, or an odd one."""
    doubtful = [name for name in media.DOUBTFUL if _kind_of(name) == "audio"]

    def make(rng: random.Random) -> FuzzRequest:
        name = rng.choice(list(media.BROKEN_AUDIO))
        return _form(name, path, field, fields, media.BROKEN_AUDIO[name](rng))

    def make_doubtful(rng: random.Random) -> FuzzRequest:
        name = rng.choice(doubtful)
        request = _form(name, path, field, fields, media.DOUBTFUL[name](rng))
        return replace(request, must_fail=False, abort_after_s=_ABORT_AFTER_S)

    return [make, make_doubtful]


def _form(what: str, path: str, field: str, fields: dict[str, str], data: bytes) -> FuzzRequest:
    parts = [
        f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()
    ]
    head = f'--x\r\nContent-Disposition: form-data; name="{field}"; filename="a.png"\r\n\r\n'
    body = "".join(parts).encode() + head.encode() + data + b"\r\n--x--\r\n"
    return FuzzRequest(what, "POST", path, body, {"Content-Type": "multipart/form-data; boundary=x"})


def _common(bodies: dict[str, dict[str, Any]], long: dict[str, dict[str, Any]]) -> list[Maker]:
    return [
        *wrong_fields(bodies, samples=CHAT in bodies and SPEECH in bodies),
        *broken_bodies(bodies),
        *broken_http(bodies),
        *client_aborts(bodies, long),
        *odd_clients(bodies),
    ]


_LONG_SPEECH = {"max_tokens": 40, "modalities": ["text", "audio"], "min_tokens": 40}
_IMAGE_FIELDS = {"prompt": "A hen", "size": "32x32", "num_inference_steps": "1"}

MAKERS: dict[str, list[Maker]] = {
    "omni": [
        *_common(OMNI_BODIES, {CHAT: _LONG_SPEECH, COMPLETIONS: {"max_tokens": 200, "min_tokens": 200}}),
        *broken_parts(),
        *broken_recordings(TRANSCRIPTIONS, "file", {"language": "en"}),
        *odd_parts(),
    ],
    "voice": [
        *_common(VOICE_BODIES, {}),
        *broken_recordings(SPEECH, "ref_audio", {"input": "Hello", "ref_text": "a b"}),
        *broken_recordings(VOICES, "audio_sample", {"name": "Hello", "consent": "I agree.", "ref_text": "a b"}),
    ],
    "image": [
        *_common(IMAGE_BODIES, {IMAGES: {"num_inference_steps": 40}}),
        *broken_uploads(EDITS, "image", _IMAGE_FIELDS),
        *odd_uploads(EDITS, "image", _IMAGE_FIELDS),
    ],
    "video": [
        *_common(VIDEO_BODIES, {}),
        *broken_uploads(VIDEOS, "input_reference", {**_IMAGE_FIELDS, "num_frames": "5"}),
        *odd_uploads(VIDEOS, "input_reference", {**_IMAGE_FIELDS, "num_frames": "5"}),
    ],
}
"""By kind of server. An entry that appears twice is used twice as often."""
