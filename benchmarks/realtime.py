# SPDX-License-Identifier: Apache-2.0
"""Realtime sessions at once against the same requests as streamed chats, and the server's memory meanwhile.

    python benchmarks/realtime.py [--sessions 1 8 64] [--turns N] [--minutes M] [--pauses MODEL] [--output FILE.json]
        [--quick]

A tiny model with random weights, greedy, answers of equal length. A session speaks its turns one after the other, each
a second of sound; a chat sends the same messages. Both run in one server, one after the other. Speech is not held back
(`--realtime-lead-s`), so that the time of the protocol is seen.

`--minutes`: instead, users talk for so long, with pauses, in one session after the other; the memory of the server and
its stages is read every minute. The KV caches, and oneDNN's cache of compiled kernels, are so small that they are full
when it is first compared.

`--pauses MODEL` (`shapes` or `talk`): instead, users of `--sessions` speak questions in real time to two servers by
turns. Their turn detection ends the turns; one begins answers at the pause, the other does not
(`--max-realtime-speculative-responses 0`). Every other question has a pause of a third of a second after its first
half.
"""

import asyncio
import base64
import io
import os
import random
import re
import statistics
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import openai
import psutil
from report import Report, make_parser, parse, percentile, progress, tiny_checkpoint
from servers import omni_server, start_server

from vllm_omni.entrypoints.openai.audio_formats import wav_header

NUM_TOKENS, NUM_FRAMES = 16, 25
KV_CACHE_BYTES, SMALL_KV_CACHE_BYTES = 256 << 20, 32 << 20
NUM_KERNELS = "64"
"""In oneDNN's cache, with `--minutes`: it keeps one for each number of tokens in a step, 1,024 by default."""
WARM_UP_MINUTES = 3
FLAGS = (
    "--dtype=float32", "--enforce-eager", "--max-model-len=4096", "--max-num-seqs=64",
    "--served-model-name=tiny", "--realtime-lead-s=600",
    f"--stage.thinker.default_sampling_params.max_tokens={NUM_TOKENS}",
    "--stage.thinker.default_sampling_params.temperature=0",
    f"--stage.talker.default_sampling_params.max_tokens={NUM_FRAMES}",
    "--stage.talker.default_sampling_params.ignore_eos=true",
)  # fmt: skip
PAUSE_S = 20.0
"""Mean of the seconds between an answer and the next turn, with `--minutes`: about that of a user who listens."""
SOUND = (np.sin(np.arange(24_000) / 20) * 8000).astype("<i2").tobytes()
"""A user's turn: a second at 24 kHz."""

QUESTIONS = {
    "shapes": ("how many shapes are there?", "what is at the top left?", "what colour is the circle?", "is it small?"),
    "talk": ("Why is the sky blue?", "What is the capital of France?", "How do birds fly?", "Why do we sleep?"),
}
GOES_ON_S, PIECE_S, MICROPHONE_RATE = 0.35, 0.02, 24_000
ALIGNMENT = 24 * 160
"""Samples of whole pieces, and of whole windows of 32 ms."""
SHORT_ANSWERS = {"shapes": (), "talk": ("--stage.llm.default_sampling_params.max_tokens=24",)}


@dataclass
class Times:
    """Seconds from the request for each answer to its first sound and to its end."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


async def talk(client: openai.AsyncOpenAI, num_turns: int, times: Times, pause_s: float = 0.0) -> None:
    """A session of spoken turns, with pauses of this mean length."""
    audio = base64.b64encode(SOUND).decode()
    async with client.realtime.connect(model="tiny") as connection:
        settings: Any = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
        await connection.session.update(session=settings)
        for _ in range(num_turns):
            started, first = time.perf_counter(), 0.0
            await connection.input_audio_buffer.append(audio=audio)
            await connection.input_audio_buffer.commit()
            await connection.response.create()
            async for event in connection:
                if event.type == "error":
                    raise RuntimeError(event.error.message)
                if event.type == "response.output_audio.delta":
                    first = first or time.perf_counter() - started
                if event.type == "response.done":
                    if event.response.status not in ("completed", "incomplete"):  # its text ended at the limit
                        raise RuntimeError(f"a response is {event.response.status}")
                    break
            times.first.append(first)
            times.whole.append(time.perf_counter() - started)
            await asyncio.sleep(random.uniform(0, 2 * pause_s))


async def chat(client: openai.AsyncOpenAI, num_turns: int, times: Times) -> None:
    """The same messages as streamed chats."""
    uri = "data:audio/wav;base64," + base64.b64encode(wav_header(24_000, 1, len(SOUND)) + SOUND).decode()
    messages: list[Any] = []
    for _ in range(num_turns):
        messages.append({"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": uri}}]})
        started, first, text = time.perf_counter(), 0.0, ""
        stream: Any = await client.chat.completions.create(
            model="tiny", messages=messages, modalities=["text", "audio"], audio={"format": "pcm16", "voice": "alloy"},
            stream=True,
        )  # fmt: skip
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                if choice.delta.audio and choice.delta.audio.data:
                    first = first or time.perf_counter() - started
        messages.append({"role": "assistant", "content": text})
        times.first.append(first)
        times.whole.append(time.perf_counter() - started)


async def crowd(
    user: Callable[[openai.AsyncOpenAI, int, Times], Awaitable[None]], url: str, count: int, num_turns: int
) -> Times:
    times = Times()
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        await asyncio.gather(*(user(client, num_turns, times) for _ in range(count)))
    return times


async def soak(url: str, count: int, num_turns: int, minutes: float, report: Report) -> None:
    """Users that talk at once; adds a row for each minute, and the memory at the end over that after warming up."""
    ends = time.monotonic() + 60 * minutes
    times, num_complete, memory = Times(), 0, []

    async def user(client: openai.AsyncOpenAI) -> None:
        nonlocal num_complete
        while time.monotonic() < ends:
            await talk(client, num_turns, times, PAUSE_S)
            num_complete += 1

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        users = asyncio.gather(*(user(client) for _ in range(count)))
        while not users.done():
            num_before = len(times.first)
            await asyncio.wait([users], timeout=60)
            api, stages = memory_of(url), stage_memory_of(url)
            memory.append(api + stages)
            report.rows.append(
                {
                    "minute": len(memory),
                    "sessions complete": num_complete,
                    "answers": len(times.whole),
                    "first audio p50 ms": 1000 * statistics.median(times.first[num_before:] or [0.0]),
                    "server MiB": api,
                    "stages MiB": stages,
                }
            )
            progress(str(report.rows[-1]))
        await users
    report.ratios["memory"] = memory[-1] / memory[min(WARM_UP_MINUTES, len(memory)) - 1]
    report.notes.append(f"memory: of all processes, at the end over that after {WARM_UP_MINUTES} minutes")


@dataclass
class Answers:
    """Of one server to all questions.

    Attributes:
        first: Seconds from the end of each question to the first sound of its answer.
        texts: Their transcripts.
        num_tokens: Of the texts.
    """

    first: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_tokens: int = 0


async def record(client: openai.AsyncOpenAI, question: str, goes_on: bool) -> np.ndarray:
    """A question, perhaps with a pause after half of its words: int16 `[n]` at 24 kHz."""
    words = question.split()
    parts = [" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])] if goes_on else [question]
    pieces = []
    for part in parts:
        speech: Any = {"model": "tiny", "input": part, "response_format": "pcm", "voice": "alloy"}
        samples = np.frombuffer((await client.audio.speech.create(**speech)).content, "<i2")
        loud = np.flatnonzero(np.abs(samples) > 500)
        pieces += [samples[loud[0] : loud[-1] + 1], np.zeros(int(GOES_ON_S * MICROPHONE_RATE), "<i2")]
    return np.concatenate(pieces[:-1])


async def converse(
    client: openai.AsyncOpenAI, detection: str, picture: str | None, questions: Sequence[np.ndarray]
) -> Answers:
    """A session that the server's turn detection divides into turns."""
    answers, num_sent = Answers(), 0
    async with client.realtime.connect(model="tiny") as connection:

        async def send(samples: np.ndarray) -> None:
            nonlocal num_sent
            num_sent += len(samples)
            audio = base64.b64encode(samples.astype("<i2").tobytes()).decode()
            await connection.input_audio_buffer.append(audio=audio)

        settings: Any = {"type": "realtime", "audio": {"input": {"turn_detection": {"type": detection}}}}
        await connection.session.update(session=settings)
        if picture is not None:
            content: Any = [{"type": "input_image", "image_url": picture}]
            await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        for question in questions:
            ended, text, first = 0.0, "", 0.0

            async def speak(samples: np.ndarray) -> None:
                nonlocal ended
                size, due, start = int(PIECE_S * MICROPHONE_RATE), time.perf_counter(), 0
                while True:
                    if start >= len(samples):
                        ended = ended or time.perf_counter()
                    piece = np.pad(samples[start : start + size], (0, max(0, size - max(0, len(samples) - start))))
                    await send(piece)
                    start, due = start + size, due + PIECE_S
                    await asyncio.sleep(due - time.perf_counter())

            # Each question begins with a window of the detector, or its pauses would be others in each session.
            await send(np.zeros(-num_sent % ALIGNMENT, "<i2"))
            microphone = asyncio.create_task(speak(question))
            async for event in connection:
                if event.type == "error":
                    raise RuntimeError(event.error.message)
                if event.type == "response.output_audio.delta":
                    first = first or time.perf_counter()
                elif event.type == "response.output_audio_transcript.done":
                    text = event.transcript
                elif event.type == "response.done" and event.response.status in ("completed", "incomplete"):
                    assert event.response.usage is not None
                    details = event.response.usage.output_token_details
                    answers.num_tokens += (details and details.text_tokens) or 0
                    break
            microphone.cancel()
            with suppress(asyncio.CancelledError):
                await microphone
            answers.first.append(first - ended)
            answers.texts.append(text)
    return answers


def counts_of(url: str) -> dict[str, float]:
    """The server's counts of speculative answers."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        found = re.findall(r"realtime_speculative_responses_(\w+)_total{.*} (\S+)", response.read().decode())
    return {name: float(value) for name, value in found}


async def compare_pauses(
    urls: dict[str, str], model: str, detection: str, num_sessions: int, num_rounds: int, report: Report
) -> None:
    """Has the servers converse by turns; adds a row for each, and the ratios."""
    clients = {
        name: openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        for name, url in urls.items()
    }
    recorder = next(iter(clients.values()))
    questions = [await record(recorder, question, i % 2 == 1) for i, question in enumerate(QUESTIONS[model])]
    picture = _picture() if model == "shapes" else None
    found = {name: Answers() for name in urls}
    for client in clients.values():
        await converse(client, detection, picture, questions[:2])  # The first requests compile kernels.
    before = {name: counts_of(url) for name, url in urls.items()}
    for number in range(num_rounds):
        for name in sorted(clients, reverse=bool(number % 2)):
            progress(f"{name}, round {number + 1} of {num_rounds}")
            sessions = (converse(clients[name], detection, picture, questions) for _ in range(num_sessions))
            for answers in await asyncio.gather(*sessions):
                found[name].first += answers.first
                found[name].texts += answers.texts
                found[name].num_tokens += answers.num_tokens
    for name, answers in found.items():
        counts = {key: value - before[name][key] for key, value in counts_of(urls[name]).items()}
        wasted = counts["wasted_tokens"]
        report.rows.append(
            {
                "answers": name,
                "at once": num_sessions,
                "turns": len(answers.first),
                "first audio p50 ms": 1000 * statistics.median(answers.first),
                "p95 ms": 1000 * percentile(answers.first, 95),
                "begun": int(counts["started"]),
                "promoted": int(counts["promoted"]),
                "wasted tokens": f"{100 * wasted / (wasted + answers.num_tokens):.0f}%",
            }
        )
    waiting, begun = found["waiting"], found["at the pause"]
    report.ratios[f"pause_c{num_sessions}"] = statistics.median(begun.first) / statistics.median(waiting.first)
    num_equal = sum(a == b for a, b in zip(waiting.texts, begun.texts, strict=True))
    report.notes.append(f"{num_sessions} at once: {num_equal} of {len(begun.texts)} answers are equal")


def _picture() -> str:
    from coloured_shapes.language import random_scene
    from coloured_shapes.pictures import draw

    file = io.BytesIO()
    draw(random.Random(25), random_scene(random.Random(25))).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@contextmanager
def two_servers(model: str) -> Iterator[dict[str, str]]:
    """The URLs of one that waits, and of one that begins answers at the pause."""
    flags = ("--served-model-name=tiny", "--realtime-lead-s=600", *SHORT_ANSWERS[model])
    with TemporaryDirectory() as folder, ExitStack() as servers:
        urls = {}
        for name, own in (("waiting", ("--max-realtime-speculative-responses=0",)), ("at the pause", ())):
            progress(f"the server: {name}")
            urls[name] = servers.enter_context(start_server(omni_server(Path(model), *flags, *own), Path(folder)))
        yield urls


def process_of(url: str) -> psutil.Process:
    """The API process that listens at a URL."""
    port = int(url.rpartition(":")[2])
    (pid,) = {c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port}
    return psutil.Process(pid)


def memory_of(url: str) -> float:
    """Private memory of the API process, in MiB."""
    return process_of(url).memory_full_info().uss / 2**20


def stage_memory_of(url: str) -> float:
    """Private memory of its stages, in MiB."""
    return sum(process.memory_full_info().uss for process in process_of(url).children(recursive=True)) / 2**20


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--sessions", type=int, nargs="+", help="sessions at once (default 1 8 64; 1 of --pauses with --quick)"
    )
    parser.add_argument("--turns", type=int, default=5, help="turns of a session")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="talk for so long, the largest of --sessions at once")
    parser.add_argument("--pauses", choices=QUESTIONS, help="compare answers begun at the pause, of this model")
    parser.add_argument("--turn-detection", choices=["server_vad", "semantic_vad"], default="server_vad")
    args = parse(parser)
    args.sessions = args.sessions or ([1] if args.pauses and args.quick else [1, 8, 64])
    num_rounds, num_turns = (1, min(args.turns, 2)) if args.quick else (args.rounds, args.turns)
    report = Report("realtime", {"turns": num_turns, "rounds": num_rounds})
    if args.pauses:
        with two_servers(args.pauses) as urls:
            for count in args.sessions:
                asyncio.run(compare_pauses(urls, args.pauses, args.turn_detection, count, num_rounds, report))
        report.notes.append("pause_cN: first sound after the end of speech, begun at the pause over waiting, N at once")
        report.finish(args.output)
        return
    with tiny_checkpoint("qwen3_omni_moe") as model:
        if args.minutes:
            os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = NUM_KERNELS
        num_bytes = SMALL_KV_CACHE_BYTES if args.minutes else KV_CACHE_BYTES
        command = omni_server(model, *FLAGS, f"--kv-cache-memory-bytes={num_bytes}")
        with start_server(command, model.parent) as url:
            for user in (chat, talk):
                asyncio.run(crowd(user, url, 1, 2))  # The first requests compile kernels.
            if args.minutes:
                asyncio.run(soak(url, max(args.sessions), num_turns, args.minutes, report))
            for count in [] if args.minutes else args.sessions:
                found: dict[str, Times] = {"chat": Times(), "realtime": Times()}
                for _ in range(num_rounds):
                    for name, user in (("chat", chat), ("realtime", talk)):
                        progress(f"{name}, {count} at once")
                        times = asyncio.run(crowd(user, url, count, num_turns))
                        found[name].first += times.first
                        found[name].whole += times.whole
                    memory = memory_of(url)
                for name, times in found.items():
                    report.rows.append(
                        {
                            "client": name,
                            "at once": count,
                            "answers": len(times.whole),
                            "first audio p50 ms": 1000 * statistics.median(times.first),
                            "whole p50 ms": 1000 * statistics.median(times.whole),
                            "server MiB": memory,
                        }
                    )
                direct, ours = (statistics.median(times.first) for times in found.values())
                report.ratios[f"first_audio_c{count}"] = ours / direct
    if not args.minutes:
        report.notes.append("first_audio_cN: realtime over chat, N at once; the server's memory after the last round")
    report.finish(args.output)


if __name__ == "__main__":
    main()
