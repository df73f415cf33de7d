# SPDX-License-Identifier: Apache-2.0
"""Fires bad requests at a server, with good ones between them, and looks at what is left over afterwards."""

import asyncio
import base64
import io
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import av
import httpx
import numpy as np
import psutil
import soundfile
from PIL import Image

from tests.fuzz.bad_requests import CHAT, IMAGES, MAKERS, VIDEOS
from tests.fuzz.described import described_shots
from tests.fuzz.shots import Outcome, Shot, fire

CONCURRENCY = 4
GOOD_EVERY = 25
HELD_EVERY = 1000
IDLE_LIMIT_S = 120.0
MEDIA_TOLERANCE = 0.2  # A video's codec makes much of little; another request's media differs by more.
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
    "painting": (IMAGES, {"prompt": "A hen", "size": "32x32", "num_inference_steps": 2, "seed": 1}),
    "video": (VIDEOS, {"prompt": "A hen", "size": "32x32", "num_inference_steps": 1, "num_frames": 5, "seed": 1}),
}
"""A request that is always answered alike, by kind of server."""


@dataclass(frozen=True)
class Answer:
    """What a good request brought.

    Attributes:
        text: All of it but the media.
        media: Pixels or samples; 1.0 is the largest value. Their last bits depend on what is made beside them.
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
class Held:
    """What a server and its stages hold.

    Attributes:
        server: Bytes of memory of the API process that are its own.
        stages: Those of its children.
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
        counts: How often each status came, by endpoint.
        faults: What went wrong.
        accepted: Of requests that break the description, by endpoint: how many were answered well all the same.
        before, after: What the server held after the first of the requests, and at the end.
    """

    counts: Counter[tuple[str, int | str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    accepted: Counter[str] = field(default_factory=Counter)
    num_good: int = 0
    before: Held = field(default_factory=lambda: Held(0, 0, 0))
    after: Held = field(default_factory=lambda: Held(0, 0, 0))

    def take(self, outcome: Outcome) -> None:
        self.counts[_template(outcome.shot), outcome.status] += 1
        if outcome.fault:
            self.faults.append(outcome.fault)
        if outcome.status == 200 and outcome.shot.what.startswith("negative"):
            self.accepted[_template(outcome.shot)] += 1

    def __str__(self) -> str:
        lines = [f"{count:6} {status!s:>9}  {endpoint}" for (endpoint, status), count in _by_text(self.counts)]
        lines.append(f"{sum(self.counts.values())} bad requests, {self.num_good} good ones")
        lines.append(f"before: {self.before}; after: {self.after}")
        return "\n".join([*lines, *(f"FAULT {fault}" for fault in self.faults)])


class Campaign:
    """One server under fire."""

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
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)

    def run(self, num_written: int, num_described: int) -> Summary:
        """
        Args:
            num_written: Requests from `bad_requests`.
            num_described: Of either kind, for each operation of the server's description.
        """
        summary = Summary()
        expected = self._ask_well()
        shots = list(self._shots(num_written, num_described))
        self._rng.shuffle(shots)
        warm_up = max(len(shots) // 4, min(len(shots), 20))
        for start in range(0, len(shots), GOOD_EVERY):
            asyncio.run(self._fire_all(shots[start : start + GOOD_EVERY], summary))
            summary.num_good += 1
            if not (answer := self._ask_well()).is_like(expected):
                summary.faults.append(f"a good request was answered with {answer}, not {expected}")
            done = min(start + GOOD_EVERY, len(shots))
            if done % HELD_EVERY == 0:
                self._wait_until_idle()
                print(f"{done:6} bad requests: {self._held()}", flush=True)
            if start < warm_up <= start + GOOD_EVERY:
                self._wait_until_idle()
                summary.before = self._held()
        self._wait_until_idle()
        summary.after = self._held()
        return summary

    def _shots(self, num_written: int, num_described: int) -> Iterator[Shot]:
        makers = MAKERS[self._kind]
        for number in range(num_written):
            yield makers[number % len(makers)](self._rng)
        if num_described:
            yield from described_shots(self._client.get("/openapi.json").json(), num_described, self._seed)

    async def _fire_all(self, shots: Iterable[Shot], summary: Summary) -> None:
        waiting = iter(shots)

        async def shooter() -> None:
            for shot in waiting:
                summary.take(await fire(self._port, shot))

        await asyncio.gather(*(shooter() for _ in range(CONCURRENCY)))

    def _ask_well(self) -> Answer:
        """What the answer to the good request is."""
        self._delete_videos()
        path, body = GOOD[self._kind]
        answer = self._client.post(path, json=body)
        while answer.status_code == 429:  # Those who left have not been told of yet.
            time.sleep(float(answer.headers["Retry-After"]))
            answer = self._client.post(path, json=body)
        if answer.status_code != 200:
            return Answer(f"{answer.status_code} {answer.text}")
        return {"omni": _spoken, "painting": _painted, "video": self._filmed}[self._kind](answer.json())

    def _filmed(self, video: dict[str, Any]) -> Answer:
        while video["status"] in ("queued", "in_progress"):
            time.sleep(0.1)  # So clients do.
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
            TimeoutError: A stage has work left, or is not well.
        """
        deadline = time.monotonic() + IDLE_LIMIT_S
        self._delete_videos()
        while busy := self._busy():
            if time.monotonic() > deadline:
                raise TimeoutError(f"left over: {busy}")
            time.sleep(0.2)  # The stages are asked; none of them says by itself that it has nothing to do.

    def _busy(self) -> list[str]:
        health = self._client.get("/health")
        lines = self._client.get("/metrics").text.splitlines()
        names = ("vllm_omni:num_requests_running{", "vllm_omni:num_requests_waiting{", "vllm_omni:kv_blocks_used{")
        busy = [line for line in lines if line.startswith(names) and float(line.rpartition(" ")[2])]
        return busy if health.status_code == 200 else [health.text, *busy]

    def _delete_videos(self) -> None:
        if self._kind == "video":
            while videos := self._client.get(VIDEOS).json()["data"]:
                for video in videos:
                    self._client.delete(f"{VIDEOS}/{video['id']}")

    def _held(self) -> Held:
        processes = [self._process, *self._process.children(recursive=True)]
        server, *stages = (process.memory_full_info().uss for process in processes)
        return Held(server, sum(stages), sum(process.num_fds() for process in processes))


def _spoken(answer: dict[str, Any]) -> Answer:
    message = answer["choices"][0]["message"]
    samples, _ = soundfile.read(io.BytesIO(base64.b64decode(message["audio"]["data"])))
    return Answer(repr(message["content"]), samples)


def _painted(answer: dict[str, Any]) -> Answer:
    image = Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"])))
    return Answer("painted", np.asarray(image) / 255)


def _template(shot: Shot) -> str:
    """The endpoint; made-up paths count together."""
    path = shot.path.partition("?")[0]
    if shot.what == "no such path":
        return "(no such path)"
    return f"{shot.method} {VIDEOS}/..." if path.startswith(VIDEOS + "/") else shot.endpoint


def _by_text(counts: Counter[tuple[str, int | str]]) -> list[tuple[tuple[str, int | str], int]]:
    return sorted(counts.items(), key=lambda item: (item[0][0], str(item[0][1])))
