# SPDX-License-Identifier: Apache-2.0
"""Lets an omni model say many sentences at once, on one machine or on two, and keeps what it said.

`Speakers` starts this program and talks to it:

    python benchmarks/speakers.py MODEL FOLDER '{"distributed_backend": "ray", ...}'

Reads lines `NAME COUNT` from its standard input: makes that many requests at once, and writes the speech of the i-th to
`FOLDER/NAME-i.npy`. Writes lines of JSON: `ready`, each request's `first` sound and its `end` with its error, if any,
and the `health` of the stages, each with the time (`time.monotonic()`, the same for all processes of a machine).
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_omni.entrypoints.async_omni_llm import AsyncOmniLLM
from vllm_omni.events import ARSegmentEvent, CompletedEvent
from vllm_omni.testing.hosts import Host

PROMPT = "<|im_start|>user\nCount to {}.<|im_end|>\n<|im_start|>assistant\n"
"""Of Qwen3-Omni."""
LIMITS = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20}
TOLERANCE = 1e-4
"""Of speech that is computed in other batches."""
GREEDY = {"temperature": 0.0, "max_tokens": 64}
_HEALTH_EVERY_S = 0.1


def make_options(*, on_two_hosts: bool) -> dict[str, Any]:
    """Arguments of `AsyncOmniLLM`; with two hosts, talker and vocoder are on `h2`."""
    by_stage: dict[str, Any] = {
        "thinker": {"default_sampling_params": GREEDY | {"max_tokens": 16}},
        "talker": {"default_sampling_params": GREEDY},
    }
    options: dict[str, Any] = {"stage_overrides": by_stage, **LIMITS}
    if on_two_hosts:
        options["distributed_backend"] = "ray"
        by_stage["thinker"]["runtime"] = {"resources": {"h1": 0.1}}
        for name in ("talker", "code2wav"):
            by_stage.setdefault(name, {})["runtime"] = {"resources": {"h2": 0.1}}
    return options


class Speakers:
    """This program, on a host or here.

    Attributes:
        folder: Of what is said.
        told: What it has written so far.
    """

    def __init__(self, model: Path, folder: Path, host: Host | None = None, env: dict[str, str] | None = None) -> None:
        """`host`: It runs there, with the thinker; talker and vocoder are on `h2`."""
        self.folder = folder
        folder.mkdir()
        options = make_options(on_two_hosts=host is not None)
        command = [sys.executable, __file__, str(model), str(folder), json.dumps(options)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        start: Callable[..., subprocess.Popen[str]] = subprocess.Popen if host is None else host.popen
        self._process = start(command, env=env, **pipes)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.told: list[dict[str, Any]] = []

    def ask(self, name: str, count: int) -> None:
        self._input.write(f"{name} {count}\n")
        self._input.flush()

    def read_until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Reads up to a line with this property."""
        for line in self._output:
            if line.startswith("{"):
                self.told.append(json.loads(line))
                if condition(self.told[-1]):
                    return self.told[-1]
        raise AssertionError(f"it ended with {self._process.wait()}")

    def ends(self, name: str) -> dict[str, str | None]:
        """The error of each request of `ask(name, ...)`."""
        ends = [end for end in self.told if end["what"] == "end" and end["name"].startswith(f"{name}-")]
        assert len({end["name"] for end in ends}) == len(ends), "a request ends once"
        return {end["name"]: end["error"] for end in ends}

    def differs(self, name: str, expected: Path) -> bool:
        """Whether the speech of `NAME-i` is not that of `all-i` in another folder."""
        said = np.load(self.folder / f"{name}.npy")
        wave = np.load(expected / f"all-{name.rpartition('-')[2]}.npy")
        return len(said) != len(wave) or bool(np.abs(said - wave).max() > TOLERANCE)

    def close(self) -> None:
        self._input.close()
        self._process.wait()
        self._output.close()


def is_(what: str, **values: str) -> Callable[[dict[str, Any]], bool]:
    """A condition for `Speakers.read_until`."""
    return lambda line: line["what"] == what and values.items() <= line.items()


def say(what: str, **values: Any) -> None:
    # One write with both ends of the line: Ray writes what other nodes log to the same file.
    sys.stdout.write("\n" + json.dumps({"what": what, "time": time.monotonic(), **values}) + "\n")
    sys.stdout.flush()


async def speak(llm: AsyncOmniLLM, name: str, number: int, folder: Path) -> None:
    has_sound = False
    async for event in llm.generate(PROMPT.format(number)):
        if isinstance(event, ARSegmentEvent) and event.final_output_type == "audio" and not has_sound:
            has_sound = True
            say("first", name=name)
        if isinstance(event, CompletedEvent):
            np.save(folder / f"{name}.npy", event.outputs[-1].multimodal_output["audio"].numpy())
        if event.is_terminal:
            error = getattr(event, "error", None)
            say("end", name=name, error=None if error is None else f"{type(error).__name__}: {error}")


async def watch_health(llm: AsyncOmniLLM) -> None:
    before = None
    while True:
        health = [vars_of(stage) for stage in llm.health()]
        if health != before:
            say("health", stages=health)
            before = health
        await asyncio.sleep(_HEALTH_EVERY_S)


def vars_of(stage: Any) -> dict[str, Any]:
    return {name: getattr(stage, name) for name in ("name", "state", "node", "last_death", "waits_for")}


async def main(model: str, folder: Path, options: dict[str, Any]) -> None:
    with AsyncOmniLLM(model, **options) as llm:
        say("ready")
        watcher = asyncio.create_task(watch_health(llm))
        while line := await asyncio.to_thread(sys.stdin.readline):
            name, count = line.split()
            await asyncio.gather(*(speak(llm, f"{name}-{i}", i, folder) for i in range(int(count))))
            say("done", name=name)
        watcher.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])))
