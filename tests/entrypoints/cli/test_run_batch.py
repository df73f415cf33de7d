# SPDX-License-Identifier: Apache-2.0
"""`run-batch`: a file of requests, answered line by line; what fails fails alone, and the next run goes on."""

import asyncio
import base64
import io
import json
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from vllm_omni.entrypoints.cli import main
from vllm_omni.entrypoints.cli.run_batch import Line, answer, keep_answered, read_lines
from vllm_omni.errors import UsageError


def line(custom_id: str = "a", url: str = "/v1/chat/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ('{"url": "/v1/chat/completions", "body": {}}', "custom_id is missing"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/models", "body": {}}', "method must be POST"),
        ('{"custom_id": "a", "url": "https://host/v1/chat/completions", "body": {}}', "url must be a path"),
        ('{"custom_id": "a", "url": "/v1/chat/completions"}', "body must be an object"),
        (line(stream=True), "body.stream must be false"),
    ],
)
def test_a_wrong_line_has_its_problem(content: str, problem: str) -> None:
    wrong, right = read_lines(f"{content}\n\n{line('b')}\n")
    assert problem in wrong.problem and wrong.number == 1
    assert right == Line(3, "b", "/v1/chat/completions", {})


def test_an_id_is_that_of_one_line() -> None:
    with pytest.raises(UsageError, match="lines 1 and 2 have one custom_id, 'a'"):
        list(read_lines(f"{line()}\n{line()}"))


def test_answers_are_kept_and_what_failed_or_was_cut_off_is_not(tmp_path: Path) -> None:
    output = tmp_path / "output.jsonl"
    assert keep_answered(output) == set()
    good = json.dumps({"custom_id": "a", "error": None, "text": "\u2028"}, ensure_ascii=False) + "\n"
    failed = json.dumps({"custom_id": "b", "error": {"message": "no"}}) + "\n"
    output.write_text(good + failed + good.replace('"a"', '"c"') + good.replace('"a"', '"d"')[:-1])
    assert keep_answered(output) == {"a", "c"}
    assert output.read_text() == good + good.replace('"a"', '"c"')
    assert keep_answered(output) == {"a", "c"}


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    app.state.num_full = 0

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        if body.get("n") == 2 and app.state.num_full < 2:
            app.state.num_full += 1
            return JSONResponse({"error": {"message": "full"}}, 429, {"Retry-After": "0"})
        if "messages" not in body:
            return JSONResponse({"error": {"message": "messages is missing", "code": 400}}, 400)
        return JSONResponse({"echo": body, "key": request.headers["Authorization"]})

    @app.post("/v1/audio/speech")
    async def speech() -> Response:
        return Response(b"RIFF", media_type="audio/wav")

    @app.post("/v1/audio/transcriptions")
    async def transcription(request: Request) -> Response:
        form = await request.form()
        sound = await form["file"].read()  # type: ignore[union-attr]
        rest = {name: form.getlist(name) for name in form if name != "file"}
        return PlainTextResponse(f"{sound.decode()} {json.dumps(rest)}")

    return app


def test_each_line_has_the_answer_of_its_path(app: FastAPI) -> None:
    sound = "data:audio/wav;base64," + base64.b64encode(b"hello").decode()
    content = [
        line("chat", messages=[], n=2),
        line("wrong"),
        line("speech", "/v1/audio/speech", input="Hi."),
        line("sound", "/v1/audio/transcriptions", file_url=sound, temperature=0, timestamp_granularities=["word"]),
        line("no sound", "/v1/audio/transcriptions", file_url="ftp://host/a.wav"),
        line("unknown", "/v1/nothing"),
        "{",
    ]
    file = io.StringIO()
    lines = list(read_lines("\n".join(content)))
    num_failed = asyncio.run(answer(app, lines, file, 3, {"Authorization": "Bearer key"}))
    written = {each["custom_id"]: each for each in map(json.loads, file.getvalue().splitlines())}

    assert num_failed == 4 and len(written) == len(content)
    chat = written["chat"]["response"]
    assert chat["status_code"] == 200 and app.state.num_full == 2 and written["chat"]["error"] is None
    assert chat["body"] == {"echo": {"messages": [], "n": 2}, "key": "Bearer key"}
    assert written["wrong"]["response"] == {**written["wrong"]["response"], "status_code": 400, "body": None}
    assert written["wrong"]["error"]["message"] == "messages is missing"
    assert written["speech"]["response"]["body"] == {
        "content_type": "audio/wav", "b64_json": base64.b64encode(b"RIFF").decode(),
    }  # fmt: skip
    text = written["sound"]["response"]["body"]["text"]
    assert text == 'hello {"temperature": ["0"], "timestamp_granularities[]": ["word"]}'
    assert "ftp" in written["no sound"]["error"]["message"] and written["no sound"]["response"] is None
    assert written["unknown"]["response"]["status_code"] == 404
    assert "no JSON" in written["line-7"]["error"]["message"]


@pytest.mark.parametrize("by_address", [False, True])
def test_a_file_that_was_answered_starts_nothing(
    by_address: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    input_file, output = tmp_path / "input.jsonl", tmp_path / "output.jsonl"
    input_file.write_text(line("\u00e4") + "\n", encoding="utf-8")
    output.write_text(json.dumps({"custom_id": "\u00e4", "error": None}) + "\n")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        address = f"http://127.0.0.1:{server.server_port}/input.jsonl" if by_address else str(input_file)
        monkeypatch.setattr(sys, "argv", ["vllm-omni", "run-batch", "-i", address, "-o", str(output), "--model", "m"])
        try:
            main.main()
            assert "1 requests, 1 answered before" in capfd.readouterr().err
            sys.argv[3] += "s"
            with pytest.raises(SystemExit):
                main.main()
            assert f"--input-file {address}s: cannot be read" in capfd.readouterr().err
        finally:
            server.shutdown()


@pytest.mark.slow
def test_a_pipeline_answers_a_file_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    input_file, output = tmp_path / "input.jsonl", tmp_path / "output.jsonl"
    messages = [{"role": "user", "content": "Say: a red circle."}]
    chat = line("chat", messages=messages, temperature=0)
    speech = line("speech", "/v1/audio/speech", input="a red circle", response_format="wav")
    wrong = line("wrong", messages=[])
    words = ["vllm-omni", "run-batch", "-i", str(input_file), "-o", str(output), "--model", "shapes"]

    def run() -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", words)
        main.main()
        return {each["custom_id"]: each for each in map(json.loads, output.read_text().splitlines())}

    input_file.write_text(f"{chat}\n{wrong}\n")
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 1 and "1 answers, 1 failed" in capfd.readouterr().err
    first = next(each for each in map(json.loads, output.read_text().splitlines()) if each["custom_id"] == "chat")

    input_file.write_text(f"{chat}\n{speech}\n")
    answers = run()
    assert answers.keys() == {"chat", "speech"} and answers["chat"] == first
    assert "red circle" in answers["chat"]["response"]["body"]["choices"][0]["message"]["content"].lower()
    assert base64.b64decode(answers["speech"]["response"]["body"]["b64_json"])[:4] == b"RIFF"
    assert "2 requests, 1 answered before" in capfd.readouterr().err
    run()
    assert "2 requests, 2 answered before" in capfd.readouterr().err
