# SPDX-License-Identifier: Apache-2.0
"""`vllm run-batch --omni`: answers the requests of a file, in the form of OpenAI's batches.

The requests go to the application of `vllm serve --omni` in this process, without a socket: what a server answers can
be in a batch, with the same limits and errors.
"""

import argparse
import asyncio
import base64
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx2
from fastapi import FastAPI
from tqdm import tqdm
from vllm.entrypoints.launchers.run_batch import download_bytes_from_url
from vllm.utils import random_uuid

from vllm_omni.entrypoints.async_omni_llm import AsyncOmniLLM
from vllm_omni.entrypoints.cli.serve import OmniServeCommand, make_llm_args, set_up_logging
from vllm_omni.entrypoints.openai import media_input
from vllm_omni.entrypoints.openai.api_server import build_omni_app
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.middleware import api_keys
from vllm_omni.errors import UsageError

USAGE = "vllm run-batch --omni -i INPUT.jsonl -o OUTPUT.jsonl --model MODEL [options of vllm serve MODEL --omni]"
DESCRIPTION = """Answer the requests of a file. Each line of INPUT is one, in the form of OpenAI's batches:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
The url may be any that a server of the model answers; a transcription has the sound's address as "file_url". Each
answer is written to OUTPUT as soon as it is there. Run it again, and it continues: lines that failed are tried again.
"""
_SOUND_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""They take forms with a file."""
_HOST = "http://batch"


@dataclass(frozen=True)
class Line:
    """A request of the file.

    Attributes:
        number: From 1.
        custom_id: The caller's name of it; the line's number where it has none.
        url: Path, and perhaps query.
        problem: Why it cannot be sent; empty: it can.
    """

    number: int
    custom_id: str
    url: str = ""
    body: Mapping[str, Any] | None = None
    problem: str = ""


def run_batch(arguments: list[str]) -> None:
    """Runs the command; exits with 1 if a line failed.

    Raises:
        UsageError: The command line or the input file is wrong.
        OmniError: The pipeline cannot be started.
    """
    parser = argparse.ArgumentParser(
        usage=USAGE, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("-i", "--input-file", required=True, help="A path, or an address that is read by GET.")
    parser.add_argument("-o", "--output-file", required=True, type=Path, help="A path.")
    own, rest = parser.parse_known_args(arguments)
    parsed = OmniServeCommand().parse(rest)
    set_up_logging(parsed)
    try:
        text = _read_input(own.input_file)
    except (OSError, UnicodeDecodeError, httpx2.HTTPError, ValueError) as error:
        raise UsageError(f"--input-file {own.input_file}: cannot be read: {error}") from error
    lines = list(read_lines(text))
    answered = keep_answered(own.output_file)
    waiting = [line for line in lines if line.custom_id not in answered]
    print(f"{len(lines)} requests, {len(lines) - len(waiting)} answered before", file=sys.stderr)
    if not waiting:
        return
    media_input.install(parsed.args)
    with own.output_file.open("a", encoding="utf-8") as file, AsyncOmniLLM(**make_llm_args(parsed)) as llm:
        num_failed = asyncio.run(_run(llm, parsed.args, waiting, file))
    print(f"{len(waiting) - num_failed} answers, {num_failed} failed: {own.output_file}", file=sys.stderr)
    if num_failed:
        sys.exit(1)


def _read_input(path_or_url: str) -> str:
    if path_or_url.startswith(("http://", "https://")):
        return httpx2.get(path_or_url, follow_redirects=True).raise_for_status().text
    return Path(path_or_url).read_text(encoding="utf-8")


def read_lines(text: str) -> Iterator[Line]:
    """The requests of a file. One that is wrong has its problem, and the others are as they are.

    Raises:
        UsageError: Two have one `custom_id`.
    """
    numbers: dict[str, int] = {}
    for number, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        line = _read_line(number, content)
        if (other := numbers.setdefault(line.custom_id, number)) != number:
            raise UsageError(f"lines {other} and {number} have one custom_id, {line.custom_id!r}")
        yield line


def _read_line(number: int, content: str) -> Line:
    try:
        fields = json.loads(content)
    except ValueError as error:
        return Line(number, f"line-{number}", problem=f"no JSON: {error}")
    if not isinstance(fields, dict):
        return Line(number, f"line-{number}", problem="no JSON object")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str):
        return Line(number, f"line-{number}", problem="custom_id is missing, or no string")
    url, body = fields.get("url"), fields.get("body")
    problem = ""
    if fields.get("method", "POST") != "POST":
        problem = "method must be POST"
    elif not (isinstance(url, str) and url.startswith("/")):
        problem = 'url must be a path, such as "/v1/chat/completions"'
    elif not isinstance(body, dict):
        problem = "body must be an object"
    elif body.get("stream"):
        problem = "body.stream must be false: an answer is one line"
    return Line(number, custom_id, str(url), body if isinstance(body, dict) else None, problem)


def keep_answered(output: Path) -> set[str]:
    """The `custom_id`s that a file has answers to. Lines that failed, or were not written to their end, are removed."""
    if not output.exists():
        return set()
    answered, kept = set(), []
    content = output.read_bytes()
    for line in content.splitlines(keepends=True):  # Of bytes: a text may have other ends of lines than these.
        try:
            written = json.loads(line)
            is_answer = line.endswith(b"\n") and written["error"] is None
            custom_id = written["custom_id"]
        except (ValueError, KeyError, TypeError):
            continue
        if is_answer:
            answered.add(custom_id)
            kept.append(line)
    if (whole := b"".join(kept)) != content:
        new = output.with_name(f"{output.name}.new")
        new.write_bytes(whole)
        os.replace(new, output)
    return answered


async def _run(llm: AsyncOmniLLM, args: argparse.Namespace, lines: Sequence[Line], file: TextIO) -> int:
    client = OmniEngineClient(llm, voice_map=args.voice_map)
    app = await build_omni_app(client, args)
    key = next(iter(api_keys(args)), None)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    num_at_once = llm.config.runtime.max_inflight
    return await answer(app, lines, file, num_at_once, headers, args.allowed_media_domains or None)


async def answer(
    app: FastAPI,
    lines: Iterable[Line],
    file: TextIO,
    num_at_once: int,
    headers: Mapping[str, str] | None = None,
    allowed_media_domains: list[str] | None = None,
) -> int:
    """Sends requests to an application, and writes each answer when it is there.

    Args:
        num_at_once: Requests that run at the same time.
        headers: Of each.
        allowed_media_domains: Of sounds to transcribe; None: all.

    Returns:
        How many failed.
    """
    waiting, num_failed = iter(lines), 0
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    with tqdm(total=len(lines) if isinstance(lines, Sequence) else None, unit="request", mininterval=1) as bar:
        async with httpx2.AsyncClient(transport=transport, base_url=_HOST, headers=headers, timeout=None) as client:

            async def work() -> None:
                nonlocal num_failed
                for line in waiting:
                    written = await _answer_line(client, line, allowed_media_domains)
                    num_failed += written["error"] is not None
                    file.write(json.dumps(written, ensure_ascii=False) + "\n")
                    file.flush()
                    bar.update()

            await asyncio.gather(*(work() for _ in range(num_at_once)))
    return num_failed


async def _answer_line(client: httpx2.AsyncClient, line: Line, domains: list[str] | None) -> dict[str, Any]:
    """The line of the output, as OpenAI's batches and vLLM have it."""
    request_id = f"batch-{random_uuid()}"
    written: dict[str, Any] = {"id": f"vllm-{random_uuid()}", "custom_id": line.custom_id}
    if line.problem:
        error = {"message": f"line {line.number}: {line.problem}", "type": "BadRequestError", "code": 400}
        return written | {"response": None, "error": error}
    try:
        response = await _send(client, line, request_id, domains)
    except Exception as error:  # Of the sound's address, or a defect: the other lines go on.
        message = {"message": f"line {line.number}: {error}", "type": type(error).__name__, "code": 400}
        return written | {"response": None, "error": message}
    head = {"status_code": response.status_code, "request_id": request_id}
    if response.is_success:
        return written | {"response": {**head, "body": _content(response)}, "error": None}
    body = _content(response)
    return written | {"response": {**head, "body": None}, "error": body.get("error", body)}


async def _send(client: httpx2.AsyncClient, line: Line, request_id: str, domains: list[str] | None) -> httpx2.Response:
    """The answer to a request. One that finds the queue full is sent again: several sequences take several places."""
    assert line.body is not None
    arguments: dict[str, Any] = {"json": line.body}
    if line.url.partition("?")[0] in _SOUND_PATHS and "file_url" in line.body:
        fields = dict(line.body)
        sound = await download_bytes_from_url(fields.pop("file_url"), domains)
        arguments = {"data": dict(_form(fields)), "files": {"file": ("sound", sound)}}
    while True:
        response = await client.post(line.url, headers={"X-Request-Id": request_id}, **arguments)
        if response.status_code != httpx2.codes.TOO_MANY_REQUESTS:
            return response
        await asyncio.sleep(float(response.headers.get("Retry-After", 1)))


def _form(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, list):
            yield f"{name}[]", [str(each) for each in value]
        else:
            yield name, str(value).lower() if isinstance(value, bool) else str(value)


def _content(response: httpx2.Response) -> dict[str, Any]:
    """The body of an answer: JSON as it is, a text, or the bytes of a file in base64."""
    kind = response.headers.get("Content-Type", "").partition(";")[0]
    if kind == "application/json":
        found = response.json()
        return found if isinstance(found, dict) else {"data": found}
    if kind.startswith("text/") or kind == "application/x-subrip":
        return {"content_type": kind, "text": response.text}
    return {"content_type": kind, "b64_json": base64.b64encode(response.content).decode()}
