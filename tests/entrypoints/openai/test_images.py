# SPDX-License-Identifier: Apache-2.0
"""The image endpoints, with OpenAI's client."""

import base64
import io
from typing import Any

import numpy as np
import openai
import pytest
from fastapi import FastAPI
from PIL import Image

from tests.entrypoints.openai.media_apps import MODEL, png, send, use, with_flags
from vllm_omni.entrypoints.openai.images import ImageEditRequest

GROUP = "llm"
SMALL: dict[str, Any] = {"num_inference_steps": 2, "seed": 1}


@pytest.fixture
def app(image_app: FastAPI) -> FastAPI:
    return image_app


def opened(b64_json: str | None) -> Image.Image:
    assert b64_json is not None
    return Image.open(io.BytesIO(base64.b64decode(b64_json)))


def pixels(b64_json: str | None) -> np.ndarray:
    return np.asarray(opened(b64_json).convert("RGB")).astype(float)


def masked(side: int = 32) -> bytes:
    """A mask of OpenAI's: the left half is transparent."""
    image = Image.new("RGBA", (side, side), (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, side // 2, side))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def generate(app: FastAPI, **fields: Any) -> Any:
    fields = {"prompt": "a hen", "size": "32x32", "extra_body": SMALL, **fields}
    return use(app, lambda client: client.images.generate(**fields))


def test_images_are_generated(app: FastAPI) -> None:
    answer = generate(app, model=MODEL, n=2)
    again = generate(app, n=1, extra_body={**SMALL, "seed": 2})

    assert [opened(image.b64_json).format for image in answer.data] == ["PNG"] * 2
    assert [opened(image.b64_json).size for image in answer.data] == [(32, 32)] * 2
    assert answer.size == "32x32" and answer.output_format == "png" and answer.usage.total_tokens == 0
    # The second image has the next seed.
    np.testing.assert_array_equal(pixels(answer.data[1].b64_json), pixels(again.data[0].b64_json))
    assert pixels(answer.data[0].b64_json).std() > 0


def test_settings_may_be_in_extra_body(app: FastAPI) -> None:
    body = {"prompt": "a hen", "extra_body": {"height": 32, "width": 64, **SMALL}, "output_format": "webp"}

    answer = send(app, "POST", "/v1/images/generations", json=body).json()

    assert opened(answer["data"][0]["b64_json"]).size == (64, 32)
    assert opened(answer["data"][0]["b64_json"]).format == "WEBP" and answer["size"] == "64x32"


def test_a_priority_reaches_the_pipeline(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, given = app.state.engine_client.llm, []
    start = llm.generate

    def record(*args: Any, **options: Any) -> Any:
        given.append(options["priority"])
        return start(*args, **options)

    monkeypatch.setattr(llm, "generate", record)
    for fields in ({}, {"priority": -3}):
        generate(app, extra_body={**SMALL, **fields})
    assert given == [0, -3]


def test_compression_makes_files_smaller(app: FastAPI) -> None:
    sizes = [
        len(generate(app, output_format="jpeg", output_compression=quality).data[0].b64_json) for quality in (5, 100)
    ]
    assert sizes[0] < sizes[1] / 2


def test_a_stream_has_previews_and_ends_with_each_image(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.images.generate(
            prompt="a hen",
            size="64x64",
            n=2,
            stream=True,
            partial_images=2,
            extra_body={"num_inference_steps": 6, "seed": 1},
        )
        return [event async for event in stream]

    events = use(app, main)
    whole = generate(app, n=2, size="64x64", extra_body={"num_inference_steps": 6, "seed": 1})

    partial = [event for event in events if event.type == "image_generation.partial_image"]
    assert sorted((event.index, event.partial_image_index) for event in partial) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(opened(event.b64_json).format == "PNG" for event in partial)
    completed = events[len(partial) :]
    assert [(event.type, event.index) for event in completed] == [
        ("image_generation.completed", 0),
        ("image_generation.completed", 1),
    ]
    for event, image in zip(completed, whole.data, strict=True):
        np.testing.assert_array_equal(pixels(event.b64_json), pixels(image.b64_json))
        assert event.size == "64x64" and event.usage.total_tokens == 0


def test_an_uploaded_image_is_edited(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> Any:
        return [
            await client.images.edit(
                image=("a.png", png(color=color), "image/png"),
                prompt="the same at night",
                size="32x32",
                extra_body={**SMALL, "num_inference_steps": 4, "strength": 0.3},
            )
            for color in ("red", "blue")
        ]

    red, blue = (pixels(answer.data[0].b64_json).mean((0, 1)) for answer in use(app, main))

    assert abs(red - blue).max() > 1  # The model has read it, with random weights.


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "I;16", "1"])
def test_an_image_of_any_mode_is_edited_as_it_is_shown(app: FastAPI, mode: str) -> None:
    image = Image.new(mode, (32, 32), {"RGBA": (255, 0, 0, 0), "LA": (0, 0), "P": 3, "I;16": 65535, "1": 1}[mode])
    file = io.BytesIO()
    image.save(file, "PNG", **({"transparency": 3} if mode == "P" else {}))

    def edit(data: bytes) -> Any:
        files, fields = {"image": ("a.png", data)}, {"prompt": "at night", "size": "32x32"}
        answer = send(app, "POST", "/v1/images/edits", files=files, data={**fields, **SMALL})
        assert answer.status_code == 200, answer.text
        return pixels(answer.json()["data"][0]["b64_json"])

    np.testing.assert_array_equal(edit(file.getvalue()), edit(png(color="white")))


def test_images_to_edit_come_in_json_too(app: FastAPI) -> None:
    uri = "data:image/png;base64," + base64.b64encode(png()).decode()
    answers = [
        send(app, "POST", "/v1/images/edits", json={"prompt": "at night", "size": "32x32", **SMALL, **form}).json()
        for form in ({"image": uri}, {"images": [{"image_url": uri}]}, {"image": [{"image_url": {"url": uri}}]})
    ]

    first = pixels(answers[0]["data"][0]["b64_json"])
    for answer in answers[1:]:
        np.testing.assert_array_equal(pixels(answer["data"][0]["b64_json"]), first)


def test_null_and_unfilled_fields_are_absent(app: FastAPI) -> None:
    uri = "data:image/png;base64," + base64.b64encode(png()).decode()
    names = [name for name in ImageEditRequest.model_fields if name not in ("image", "prompt", "size", *SMALL)]
    assert "mask" in names and "inputs" in names
    given = {"prompt": "at night", "size": "32x32", **SMALL}
    body = {**dict.fromkeys([*names, "images"]), "image": uri, **given}
    whole = send(app, "POST", "/v1/images/edits", json=body)
    files = [("image", ("a.png", png())), ("mask", ("", b"")), ("image", ("", b""))]
    form = send(app, "POST", "/v1/images/edits", data={**dict.fromkeys(names, ""), **given}, files=files)

    assert (whole.status_code, form.status_code) == (200, 200), whole.text[:200] + form.text[:200]
    np.testing.assert_array_equal(*(pixels(answer.json()["data"][0]["b64_json"]) for answer in (whole, form)))


def test_transparent_pixels_of_a_mask_are_edited(app: FastAPI) -> None:
    """With OpenAI's client as it is; diffusers' own mask, white there, gives the same."""
    photo, white = png(64, 64), Image.new("L", (64, 64))
    white.paste(255, (0, 0, 32, 64))
    file = io.BytesIO()
    white.save(file, "PNG")
    common: dict[str, Any] = {"image": photo, "prompt": "at night", "size": "64x64"}
    extra = {**SMALL, "strength": 1.0}

    async def main(client: openai.AsyncOpenAI) -> list[str | None]:
        edited = await client.images.edit(**common, mask=masked(64), extra_body=extra)
        whole = await client.images.edit(**common, extra_body=extra)
        named = await client.images.edit(**common, extra_body={**extra, "inputs": {"mask_image": uris[1]}})
        return [answer.data[0].b64_json for answer in (edited, whole, named)]  # type: ignore[index]

    uris = ["data:image/png;base64," + base64.b64encode(each).decode() for each in (photo, file.getvalue())]
    edited, whole, named = use(app, main)
    assert named == edited
    given = {"prompt": "at night", "size": "64x64", "image": uris[0], **extra}
    alike = send(app, "POST", "/v1/images/edits", json={**given, "mask_image": uris[1]}).json()
    nested = send(app, "POST", "/v1/images/edits", json={**given, "inputs": {"mask_image": uris[1]}}).json()
    form = send(
        app, "POST", "/v1/images/edits", data={"prompt": "at night", "size": "64x64", **extra},
        files={"image": ("a.png", photo), "mask_image": ("m.png", file.getvalue())},
    ).json()  # fmt: skip
    for answer in (alike, nested, form):
        np.testing.assert_array_equal(pixels(answer["data"][0]["b64_json"]), pixels(edited))
    change = np.abs(pixels(edited) - pixels(whole)).mean(axis=(0, 2))
    assert change[48:].mean() > change[:16].mean() + 1, "the right half is the photo's"
    assert app.state.omni_handlers["image"].media._connector._budget.taken_bytes == 0


def test_further_arguments_of_the_pipeline_have_limits(app: FastAPI) -> None:
    short = {"prompt": "a hen", "size": "32x32", **SMALL}
    whole = send(app, "POST", "/v1/images/generations", json=short).json()
    same = send(app, "POST", "/v1/images/generations", json={**short, "extra_args": {"cfg_normalization": False}})
    assert same.json()["data"] == whole["data"], same.text
    form = {"prompt": "at night", "size": "32x32", **SMALL, "extra_args[max_sequence_length]": "64"}
    edit = send(app, "POST", "/v1/images/edits", data=form, files={"image": ("a.png", png())})
    assert edit.status_code == 200, edit.text
    for given, words in (
        ({"max_sequence_length": 1 << 20}, "above 10000"),
        ({"max_sequence_length": 2000}, "at most 1024"),
        ({"max_sequence": 20}, "did you mean 'max_sequence_length'"),
        ({"joint_attention_kwargs": {"scale": 1}}, "is an object"),
        ({"sigmas": [0.5] * 300}, "at most 200 (max_steps)"),
        ({"output_type": "pil"}, "is set by the stage"),
        ({"num_inference_steps": 3}, "is a field of its own"),
    ):
        answer = send(app, "POST", "/v1/images/generations", json={**short, "extra_args": given})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_the_names_of_a_list_of_files(app: FastAPI) -> None:
    fields = {"prompt": "at night", "size": "32x32", **SMALL}
    for name in ("image", "image[]", "image[0]"):
        assert send(app, "POST", "/v1/images/edits", data=fields, files={name: ("a.png", png())}).status_code == 200
    two = [(f"image[{i}]", ("a.png", png())) for i in range(2)]
    answer = send(app, "POST", "/v1/images/edits", data=fields, files=two)
    assert answer.status_code == 400 and "takes one input image" in answer.text


def test_an_upload_without_a_name_is_refused_with_the_remedy(app: FastAPI) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na hen\r\n'
    part = b'--x\r\nContent-Disposition: form-data; name="image"\r\n\r\n' + png() + b"\r\n--x--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=x"}

    answer = send(app, "POST", "/v1/images/edits", content=head + part, headers=headers)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "image")
    assert "a file needs a name (with curl: -F image=@FILE)" in error["message"]


def test_an_edit_can_be_streamed(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.images.edit(
            image=png(), prompt="at night", size="32x32", stream=True, partial_images=1, extra_body=SMALL
        )
        return [event async for event in stream]

    assert use(app, main)[-1].type == "image_edit.completed"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "at least 1 character"),
        ({"prompt": "  "}, None, "prompt is empty"),
        ({"n": 11}, "n", "less than or equal to 10"),
        ({"size": "32by32"}, "size", "pattern"),
        ({"size": "33x32"}, None, "multiples of 16"),
        ({"size": "99999x99999"}, None, "max_pixels"),
        ({"size": "32x32", "height": 64}, "height", "set different values"),
        ({"num_inference_steps": 100_000}, None, "at most 200"),
        ({"response_format": "file"}, "response_format", "'b64_json' or 'url'"),
        ({"output_format": "tiff"}, "output_format", "'png'"),
        ({"output_compression": 50}, "output_compression", "jpeg or webp"),
        ({"partial_images": 2}, "partial_images", "stream"),
        ({"background": "transparent"}, "background", "opaque"),
        ({"wdith": 64}, "wdith", "wdith is not a field of this request; remove it"),
        ({"extra_body": {"wdith": 64}}, "extra_body.wdith", "did you mean 'width'"),
        ({"extra_body": {"num_frames": 5}}, None, "does not take 'num_frames'"),
        ({"seed": -1}, None, "seed -1: must be 0 to"),
        ({"seed": [1, 2]}, None, "2 entries"),
    ],
)
def test_wrong_fields_are_named(app: FastAPI, fields: dict[str, Any], param: str | None, words: str) -> None:
    answer = send(app, "POST", "/v1/images/generations", json={"prompt": "a hen", **fields})

    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"]
    assert param is None or error["param"] == param


def test_a_refused_stream_has_an_http_status(app: FastAPI) -> None:
    answer = send(app, "POST", "/v1/images/generations", json={"prompt": "a hen", "size": "33x32", "stream": True})
    assert answer.status_code == 400 and "multiples of 16" in answer.json()["error"]["message"]


def test_another_model_is_not_found(app: FastAPI) -> None:
    with pytest.raises(openai.NotFoundError, match=f"this server has {MODEL}"):
        generate(app, model="dall-e-4")
    for name in ("tts-1", "whisper-1"):  # of other endpoints
        with pytest.raises(openai.NotFoundError, match=f"this server has {MODEL}"):
            generate(app, model=name)


@pytest.mark.parametrize("name", ["dall-e-2", "dall-e-3", "gpt-image-1", "gpt-image-2.5-flare"])
def test_openais_names_of_models_mean_the_served_one(app: FastAPI, name: str) -> None:
    named, own = (generate(app, model=model, response_format="b64_json").data[0].b64_json for model in (name, MODEL))
    assert named == own
    form: dict[str, Any] = {"prompt": "a hen", "model": name, "size": "32x32", "num_inference_steps": 1}
    edit: dict[str, Any] = {"files": {"image": ("a.png", png())}, "data": form}
    assert send(app, "POST", "/v1/images/edits", **edit).status_code == 200
    chat = {"messages": [{"role": "user", "content": "a hen"}], "model": name, "extra_body": SMALL}
    assert send(app, "POST", "/v1/chat/completions", json=chat).status_code == 404  # of other endpoints
    assert send(with_flags(app, "--no-model-aliases"), "POST", "/v1/images/edits", **edit).status_code == 404
    with pytest.raises(openai.NotFoundError, match=f"this server has {MODEL}"):
        generate(with_flags(app, "--no-model-aliases"), model=name)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"image": b"no image"}, "image"),
        ({"image": png()[:-40]}, "image"),
        ({"image": png(200, 200)}, "max_pixels"),
        ({"image": png(), "mask": png()}, "no transparent pixels, which are where the image is edited"),
        ({"image": png(), "mask": masked(48)}, "mask is 48x48 and image is 32x32"),
        ({"image": png(), "mask": masked(), "mask_image": png()}, "mask and mask_image set the same"),
        ({"mask": masked()}, "image is missing"),
        ({"mask_image": png()}, "needs an input image"),
        ({"image": png(), "mask_image": png()[:-40]}, "image"),
        ({"image": png(), "markup": png()}, "no markup"),
        ({"prompt": png(), "image": png()}, "valid string"),
        ({"picture": png()}, "picture is not a field"),
        ({"image": png(), "control_image": png()}, "control_image is not a field"),
    ],
)
def test_broken_uploads_are_refused(app: FastAPI, files: dict[str, bytes], words: str) -> None:
    data = {} if "prompt" in files else {"prompt": "at night"}
    uploads = {name: (f"{name}.png", file, "image/png") for name, file in files.items()}

    answer = send(app, "POST", "/v1/images/edits", data=data, files=uploads)

    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_an_image_that_has_no_room_now_is_sent_later(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = {"data": {"prompt": "at night", "size": "32x32", **SMALL}, "files": {"image": ("a.png", png())}}
    budget = app.state.omni_handlers["image"].media._connector._budget
    with monkeypatch.context() as patch:
        patch.setattr(budget, "_max_total_bytes", 32 * 32 * 4 - 1)
        refused = send(app, "POST", "/v1/images/edits", **edit)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert "--max-total-decoded-bytes" in refused.json()["error"]["message"]
    assert send(app, "POST", "/v1/images/edits", **edit).status_code == 200
    assert budget.taken_bytes == 0


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://127.0.0.1/x.png", "ftp://host/x", "/etc/passwd"])
def test_private_files_and_addresses_are_refused(app: FastAPI, url: str) -> None:
    answer = send(app, "POST", "/v1/images/edits", json={"prompt": "x", "image": url})
    assert answer.status_code in (400, 422)


def test_a_body_that_is_neither_json_nor_a_form(app: FastAPI) -> None:
    answer = send(app, "POST", "/v1/images/edits", content=b"x", headers={"content-type": "text/plain"})
    assert answer.status_code == 415


def test_videos_of_an_image_model(app: FastAPI) -> None:
    answer = send(app, "POST", "/v1/videos", json={"prompt": "a boat"})
    assert answer.status_code == 400 and "cannot output video; it outputs image" in answer.json()["error"]["message"]


def test_the_api_description_has_forms_and_json(app: FastAPI) -> None:
    paths = send(app, "GET", "/openapi.json").json()["paths"]
    for path, field in (("/v1/images/edits", "image"), ("/v1/videos", "input_reference")):
        content = paths[path]["post"]["requestBody"]["content"]
        assert {"prompt", "size", field} <= content["application/json"]["schema"]["properties"].keys()
        assert "binary" in str(content["multipart/form-data"]["schema"]["properties"][field])
    assert "/v1/images/generations" in paths and "$defs" not in str(paths)
