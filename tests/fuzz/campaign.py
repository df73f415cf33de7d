# SPDX-License-Identifier: Apache-2.0
"""Sends bad requests to a server, with good ones between them, and checks what it still holds afterwards."""

import asyncio
import base64
import io
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import psutil
import soundfile
from PIL import Image

from tests.coloured_shapes.recordings import recording
from tests.fuzz.bad_requests import CHAT, IMAGES, MAKERS, SPEECH, VIDEOS, VOICES
from tests.fuzz.described import described_requests
from tests.fuzz.fuzz_conversations import fuzz_conversation
from tests.fuzz.fuzz_requests import ANSWER_LIMIT_S, FuzzRequest, Outcome, send
from tests.fuzz.fuzz_sessions import fuzz_session

CONCURRENCY = 4
GOOD_EVERY = 25
NUM_STEPS = 25  # Of a conversation.
PRINT_EVERY = 1000
MEDIA_TOLERANCE = 0.2  # A video codec amplifies rounding; another request's media differs by more.
_GREEDY = {"temperature": 0, "max_tokens": 6, "min_tokens": 6}
_CODES = {"temperature": 0, "max_tokens": 6, "min_tokens": 6, "detokenize": False}

GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "omni": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Why is the sea blue?"}],
            "modalities": ["text", "audio"],
            "sampling_params_list": [_GREEDY, _CODES, None],
        },
    ),
    "voice": (
        SPEECH,
        {
            "input": "Hello",
            "response_format": "wav",
            "stream": False,
            "sampling_params_list": [{"temperature": 0, "max_tokens": 9, "ignore_eos": True}, None],
        },
    ),
    "image": (IMAGES, {"prompt": "A hen", "size": "32x32", "num_inference_steps": 2, "seed": 1}),
    "video": (VIDEOS, {"prompt": "A hen", "size": "32x32", "num_inference_steps": 1, "num_frames": 5, "seed": 1}),
}
"""A request that always has the same answer, by kind of server."""


@dataclass(frozen=True)
class Answer:
    """The answer to a good request.

    Attributes:
        text: Everything but the media.
        media: Pixels or samples; 1.0 is the largest value. Their last bits depend on concurrent requests.
    """

    text: str
    media: np.ndarray = field(default_factory=lambda: np.empty(0))

    def is_like(self, other: "Answer") -> bool:
        return (
            self.text == other.text
            and self.media.shape == other.media.shape
            and float(np.abs(self.media - other.media).max(initial=0.0)) < MEDIA_TOLERANCE
        )


@dataclass
class Usage:
    """Resources of a server and its stages.

    Attributes:
        server: Bytes of private memory of the API process.
        stages: Those of its child processes.
        files: Open files of all.
    """

    server: int
    stages: int
    files: int

    @property
    def memory(self) -> int:
        return self.server + self.stages

    def __str__(self) -> str:
        return f"server {self.server >> 20} MiB, stages {self.stages >> 20} MiB, {self.files} open files"


@dataclass
class Summary:
    """
    Attributes:
        counts: The number of answers by endpoint and status.
        faults: Wrong outcomes.
        accepted: By endpoint, the requests that are invalid by the description and were answered with 200.
        before, after: The server's resources after the first requests, and at the end.
    """

    counts: Counter[tuple[str, int | str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    accepted: Counter[str] = field(default_factory=Counter)
    num_good: int = 0
    before: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    after: Usage = field(default_factory=lambda: Usage(0, 0, 0))

    def take(self, outcome: Outcome) -> None:
        self.counts[_template(outcome.request), outcome.status] += 1
        if outcome.fault:
            self.faults.append(outcome.fault)
        if outcome.status == 200 and outcome.request.what.startswith("negative"):
            self.accepted[_template(outcome.request)] += 1

    def __str__(self) -> str:
        lines = [f"{count:6} {status!s:>9}  {endpoint}" for (endpoint, status), count in _by_text(self.counts)]
        lines.append(f"{sum(self.counts.values())} bad requests, {self.num_good} good ones")
        lines.append(f"before: {self.before}; after: {self.after}")
        return "\n".join([*lines, *(f"FAULT {fault}" for fault in self.faults)])


class Campaign:
    """A test of one server."""

    def __init__(self, kind: str, port: int, pid: int, seed: int = 0) -> None:
        """
        Args:
            kind: A key of `MAKERS`.
            pid: The server's process.
        """
        self._kind = kind
        self._port = port
        self._process = psutil.Process(pid)
        self._rng = random.Random(seed)
        self._seed = seed
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_LIMIT_S)

    def run(self, num_written: int, num_described: int) -> Summary:
        """
        Args:
            num_written: Requests from `bad_requests`.
            num_described: Requests of either kind for each operation of the server's description.
        """
        summary = Summary()
        expected = self._send_good()
        fuzz_requests = list(self._requests(num_written, num_described))
        self._rng.shuffle(fuzz_requests)
        warm_up = max(len(fuzz_requests) // 4, min(len(fuzz_requests), 20))
        for start in range(0, len(fuzz_requests), GOOD_EVERY):
            asyncio.run(self._send_all(fuzz_requests[start : start + GOOD_EVERY], summary))
            if self._kind == "omni":
                summary.faults += asyncio.run(fuzz_session(self._port, self._rng))
                speech = recording("how many shapes are there")
                summary.faults += asyncio.run(fuzz_conversation(self._port, self._rng, NUM_STEPS, speech))
            summary.num_good += 1
            if not (answer := self._send_good()).is_like(expected):
                summary.faults.append(f"a good request was answered with {answer}, not {expected}")
            done = min(start + GOOD_EVERY, len(fuzz_requests))
            if done % PRINT_EVERY == 0:
                self._wait_until_idle()
                print(f"{done:6} bad requests: {self._usage()}", flush=True)
            if start < warm_up <= start + GOOD_EVERY:
                self._wait_until_idle()
                summary.before = self._usage()
        self._wait_until_idle()
        summary.after = self._usage()
        return summary

    def _requests(self, num_written: int, num_described: int) -> Iterator[FuzzRequest]:
        makers = MAKERS[self._kind]
        for number in range(num_written):
            yield makers[number % len(makers)](self._rng)
        if num_described:
            yield from described_requests(self._client.get("/openapi.json").json(), num_described, self._seed)

    async def _send_all(self, fuzz_requests: Iterable[FuzzRequest], summary: Summary) -> None:
        waiting = iter(fuzz_requests)

        async def sender() -> None:
            for request in waiting:
                summary.take(await send(self._port, request))

        await asyncio.gather(*(sender() for _ in range(CONCURRENCY)))

    def _send_good(self) -> Answer:
        """The answer to the good request."""
        self._delete_stored()
        path, body = GOOD[self._kind]
        deadline = time.monotonic() + ANSWER_LIMIT_S
        answer = self._client.post(path, json=body)
        while answer.status_code == 429 and time.monotonic() < deadline:  # Client aborts are not processed yet.
            time.sleep(float(answer.headers["Retry-After"]))
            answer = self._client.post(path, json=body)
        if answer.status_code != 200:
            return Answer(f"{answer.status_code} {answer.text}")
        if self._kind == "voice":
            return Answer("speech", _samples_of(answer.content))
        return {"omni": _read_chat, "image": _read_image, "video": self._read_video}[self._kind](answer.json())

    def _read_video(self, video: dict[str, Any]) -> Answer:
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while video["status"] in ("queued", "in_progress") and time.monotonic() < deadline:
            time.sleep(0.1)  # As clients poll.
            video = self._client.get(f"{VIDEOS}/{video['id']}").json()
        content = self._client.get(f"{VIDEOS}/{video['id']}/content").content
        self._client.delete(f"{VIDEOS}/{video['id']}")
        if video["status"] != "completed":
            return Answer(f"{video}")
        with av.open(io.BytesIO(content)) as container:
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        return Answer("completed", frames / 255)

    def _wait_until_idle(self) -> None:
        """
        Raises:
            TimeoutError: A stage still has work, or is not ready.
        """
        deadline = time.monotonic() + ANSWER_LIMIT_S
        self._delete_stored()
        while busy := self._busy():
            if time.monotonic() > deadline:
                raise TimeoutError(f"left over: {busy}")
            time.sleep(0.2)  # Stages send no event when they become idle.

    def _busy(self) -> list[str]:
        health = self._client.get("/health")
        lines = self._client.get("/metrics").text.splitlines()
        names = ("vllm_omni:num_requests_running{", "vllm_omni:num_requests_waiting{", "vllm_omni:kv_blocks_used{")
        busy = [line for line in lines if line.startswith(names) and float(line.rpartition(" ")[2])]
        return busy if health.status_code == 200 else [health.text, *busy]

    def _delete_stored(self) -> None:
        if self._kind == "voice":
            for voice in self._client.get(VOICES).json()["uploaded_voices"]:
                self._client.delete(f"{VOICES}/{voice['id']}")
        if self._kind == "video":
            while videos := self._client.get(VIDEOS).json()["data"]:
                for video in videos:
                    self._client.delete(f"{VIDEOS}/{video['id']}")

    def _usage(self) -> Usage:
        processes = [self._process, *self._process.children(recursive=True)]
        server, *stages = (process.memory_full_info().uss for process in processes)
        return Usage(server, sum(stages), sum(map(num_files, processes)))


def num_files(process: psutil.Process) -> int:
    """Without segments of shared memory: senders keep those that they have used, up to a limit in bytes."""
    names = []
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # It is closed.
            names.append(os.readlink(link))
    return sum(not name.startswith("/dev/shm/vllm_omni-run-") for name in names)


def _read_chat(answer: dict[str, Any]) -> Answer:
    message = answer["choices"][0]["message"]
    return Answer(repr(message["content"]), _samples_of(base64.b64decode(message["audio"]["data"])))


def _samples_of(file: bytes) -> np.ndarray:
    samples, _ = soundfile.read(io.BytesIO(file))
    return samples


def _read_image(answer: dict[str, Any]) -> Answer:
    image = Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"])))
    return Answer("image", np.asarray(image) / 255)


def _template(request: FuzzRequest) -> str:
    """The endpoint; unknown paths count together."""
    path = request.path.partition("?")[0]
    if request.what == "no such path":
        return "(no such path)"
    for stored in (VIDEOS, VOICES):
        if path.startswith(stored + "/"):
            return f"{request.method} {stored}/..."
    return request.endpoint


def _by_text(counts: Counter[tuple[str, int | str]]) -> list[tuple[tuple[str, int | str], int]]:
    return sorted(counts.items(), key=lambda item: (item[0][0], str(item[0][1])))
