# SPDX-License-Identifier: Apache-2.0
"""Faces of pipelines of fake stages, which need no model and start in no time."""

import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import yaml

from tests.fork_server_cache import QuickForkServer
from tests.orchestrator.pipelines import fake_stage
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.omni_base import OmniBase
from vllm_omni.events import ARSegmentEvent, CompletedEvent, OmniEvent

Face = TypeVar("Face", bound=OmniBase)

# The writer makes tokens and their rows; the speaker reads the rows three at a time and makes rows of them.
WRITER = fake_stage(0, "writer", (), "text")
SPEAKER = fake_stage(1, "speaker", (0,), "audio")
STAGES = (WRITER, SPEAKER)
WINDOWS = {"edges": [{"from": 0, "to": 1, "window_size": 3, "unit": "rows"}]}


def quick_servers() -> AbstractContextManager:
    """Pipelines that are opened in this block need not wait for imports."""
    return mock.patch("vllm_omni.entrypoints.omni_base.ForkServer", QuickForkServer)


def make_pipeline(cls: type[Face], path: Path, stages: Iterable[dict] = STAGES, *, args: dict, **runtime: Any) -> Face:
    """Starts a pipeline; `args` are the face's, `runtime` is the configuration's."""
    path.write_text(yaml.safe_dump({"stage_args": list(stages), "runtime": runtime}))
    with quick_servers():
        return cls("", str(path), **args)


@contextmanager
def running(
    cls: type[Face], folder: Path, stages: Iterable[dict] = STAGES, args: dict | None = None, **runtime: Any
) -> Iterator[Face]:
    with make_pipeline(cls, folder / "stages.yaml", stages, args=args or {}, **runtime) as face:
        yield face


def ask(text: str = "p", modalities: list[str] | None = None, **options: Any) -> dict[str, Any]:
    """A prompt with options for the fake stages."""
    prompt: dict[str, Any] = {"prompt": text, "additional_information": options}
    return prompt if modalities is None else prompt | {"modalities": modalities}


def long(text: str = "p", **options: Any) -> dict[str, Any]:
    """A prompt whose text comes token by token, for much longer than a test takes."""
    return ask(text, fake_tokens=100_000, fake_seconds=0.01, fake_only="writer", **options)


def make_chat(num_tokens: int) -> dict[str, Any]:
    """A prompt of so many tokens for the tiny Qwen3-Omni, of which 8 are not text; the talker's prompt has 6 more."""
    text = "!" * (num_tokens - 8)
    return {"prompt": f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"}


def is_idle(face: OmniBase) -> bool:
    """No stage works on anything. Asked after an abort, this sees its effect: a stage takes messages in order."""
    stats = face.stats()
    return len(stats) > 0 and all(s.num_running == s.queue_depth == 0 for s in stats)


def wait_until_free(face: OmniBase) -> None:
    """No stage works on anything, and the engines have given back their memory, which they do between two steps."""
    assert is_idle(face)
    deadline = time.monotonic() + 10
    while any(stage.kv_blocks_used for stage in face.stats()):
        assert time.monotonic() < deadline, face.stats_table()


def record_events(llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch) -> list[OmniEvent]:
    """All events that the pipeline gives from now on."""
    events: list[OmniEvent] = []

    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[OmniEvent, None]:
        async with aclosing(AsyncOmniLLM.generate(llm, *args, **kwargs)) as given:
            async for event in given:
                events.append(event)
                yield event

    monkeypatch.setattr(llm, "generate", generate)
    return events


def by_request(events: Iterable[OmniEvent]) -> dict[str, list[OmniEvent]]:
    stories: dict[str, list[OmniEvent]] = {}
    for event in events:
        stories.setdefault(event.request_id, []).append(event)
    return stories


def check_story(events: list[OmniEvent]) -> CompletedEvent:
    """What holds of all events of any request that completes: order, one end, and pieces that make up the whole."""
    assert [event.sequence for event in events] == list(range(len(events)))
    assert [event.is_terminal for event in events] == [False] * (len(events) - 1) + [True]
    assert sorted(event.ts for event in events) == [event.ts for event in events]
    end = events[-1]
    assert isinstance(end, CompletedEvent), end
    for output in end.outputs:
        pieces = [e for e in events if isinstance(e, ARSegmentEvent) and e.stage_id == output.stage_id]
        assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        for completion in output.outputs:
            own = [piece for piece in pieces if piece.index == completion.index]
            assert "".join(piece.text for piece in own) == completion.text
            assert [token for piece in own for token in piece.tokens] == list(completion.token_ids)
        for name, tensor in output.multimodal_output.items():
            made = [piece.multimodal_output[name] for piece in pieces if name in piece.multimodal_output]
            assert torch.equal(torch.cat(made), tensor)
    return end
