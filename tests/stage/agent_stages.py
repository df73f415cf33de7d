# SPDX-License-Identifier: Apache-2.0
"""Stages that run in this Python and in one of their own: a module of a user, which imports neither torch nor vLLM."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from vllm_omni.errors import InvalidRequestError
from vllm_omni.function_stage import CALLER, FunctionStage


class Settings(msgspec.Struct):
    voice: str = "ann"
    speed: Annotated[float, msgspec.Meta(ge=0.5, le=2.0)] = 1.0
    marks: list[str] = []


@dataclass
class Talk:
    name: str
    settings: Settings
    num_windows: int = 0


class Speech(FunctionStage):
    """Does what the text says, with all types that an output may have."""

    parameters = Settings

    @classmethod
    def voices(cls):
        return ("ann", "bob")

    def start(self):
        print("a package prints on stdout")
        self.open = {}
        if self.stage.engine_args.get("fails"):
            raise LookupError("no weights here")

    def begin(self, request, parameters):
        self.open[request.request_id] = parameters.voice
        return Talk(request.request_id, parameters)

    def window(self, state, sources):
        (source,) = sources.values()
        text = source.completions[0].text if source.completions else ""
        state.num_windows += 1
        if text == "where":
            return {"text": sys.executable, "numpy": np.__version__, "process": os.getpid(), "parent": os.getppid()}
        if text == "process":
            return {"text": str(os.getpid())}
        if text == "numpy":
            return {"text": f"{np.__version__} {np.asarray(source.data['numbers']).tolist()}"}
        if text == "types":
            given = {name: np.asarray(value) for name, value in source.tensors.items()}
            plain = {
                "nested": [{"a": (1, 2.5, None)}, True],
                "raw": b"\0\xff",
                "by number": {1: "one"},
                "nan": float("inf"),
            }
            return {**given, **plain, "model": self.model, "is_last": source.is_last, "of_caller": CALLER in sources}
        if text == "open":
            return {"open": sorted(self.open.values())}
        if text == "invalid":
            raise InvalidRequestError("no words", state.name)
        if text == "wrong":
            return "no dict"
        if text == "strange":
            return {"text": "x", "object": object()}
        if text == "fail":
            return {"text": self.nothing}
        if text == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "exit":
            print("it gives up", file=sys.stderr)
            os._exit(3)
        if text == "hang":
            time.sleep(1e6)
        return self._speak(state, text)

    def _speak(self, state, text):
        try:
            for place, character in enumerate(text):
                if character == "!":
                    raise ValueError("cannot shout")
                samples = np.arange(1000, dtype=np.float32) * np.float32(state.settings.speed / (1 + ord(character)))
                yield {"audio": samples, "text": character, "place": place}
                if character == "~":
                    while True:  # until it is aborted
                        yield {"audio": samples}
        finally:
            self.open[state.name + " closed"] = "closed"

    def end(self, state):
        del self.open[state.name]
        return {"text": f"<{state.num_windows}>", "voice": state.settings.voice, "marks": state.settings.marks}

    def abort(self, state):
        self.open[state.name] = "aborted"


def shout(request, sources):
    if request.prompt == "wrong":
        raise ValueError("cannot shout this")
    return {"text": request.prompt.upper(), "audio": np.ones((2, 0), np.int16)}


def spell(request, sources):
    for character in request.prompt:
        yield {"text": character}


def count(requests, sources):
    results = [
        ValueError("no prompt") if not request.prompt else {"text": f"{request.prompt} of {len(requests)}"}
        for request in requests
    ]
    return results[1:] if any(request.prompt == "short" for request in requests) else results


def crash(request, sources):
    if request.prompt == "exit":
        print("it gives up")
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)
