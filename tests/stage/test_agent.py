# SPDX-License-Identifier: Apache-2.0
"""Function stages in a Python of their own: the same outputs as in the stage's own process, and every fault."""

import importlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vllm_omni
from tests.stage import agent_stages
from tests.stage.running_engine import PATIENCE, RunningEngine
from vllm_omni import function_stage
from vllm_omni.config.stage import OmniStageConfig, StageRuntimeConfig
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.engines import agent, agent_program
from vllm_omni.stage.engines.agent import AgentDiedError
from vllm_omni.stage.engines.base import AbortRequest, Error, NewRequest, Outbox, Stream, StreamChunk
from vllm_omni.stage.engines.function import FunctionStageEngine

MODULE = agent_stages.__name__
OWN = {"python": os.environ.get("AGENT_PYTHON", sys.executable)}
"""The agent's Python is the one of the tests, in which it does not see this package."""
Open = Callable[..., RunningEngine]


def make_engine(function: str = "Speech", runtime: dict[str, Any] = OWN, **keys: Any) -> FunctionStageEngine:
    if "batch_function" not in keys:
        keys["function"] = f"{MODULE}.{function}"
    stage = OmniStageConfig(stage_id=1, engine_type="function", runtime=StageRuntimeConfig(**runtime), **keys)
    return stage.kind.make_engine("the model", Outbox())


@pytest.fixture
def run() -> Iterator[Open]:
    """Starts an engine, and closes it."""
    running: list[RunningEngine] = []

    def run(*args: Any, **kwargs: Any) -> RunningEngine:
        engine = make_engine(*args, **kwargs)
        engine.start()
        running.append(RunningEngine(engine))
        return running[-1]

    yield run
    for each in running:
        each.stop()
        each.engine.close()


def source(text: str, **fields: Any) -> dict[int, StageOutput]:
    return {0: StageOutput(request_id="", stage_id=0, completions=[Completion(text=text)], **fields)}


def new(
    name: str, text: str, is_last: bool = True, tensors: dict[str, torch.Tensor] | None = None, **fields: Any
) -> NewRequest:
    request = StageRequest(request_id=name, **fields)
    return NewRequest(request, sources=source(text, tensors=tensors or {}), is_last=is_last)


def more(name: str, text: str, is_last: bool = False) -> StreamChunk:
    return StreamChunk(name, sources=source(text), is_last=is_last)


def outcome(running: RunningEngine, name: str) -> Any:
    """What a request has ended with, comparable."""
    last = running.items[name][-1]
    if isinstance(last, Error):
        return last.error, last.kind, last.invalid
    output = running.output(name)
    tensors = {key: (value.dtype, value.tolist()) for key, value in output.tensors.items()}
    return len(running.items[name]), [c.text for c in output.completions], tensors, output.data


TENSORS = {
    "f4": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,  # not contiguous
    "f2": torch.ones(3, dtype=torch.float16),
    "i8": torch.tensor(7),
    "bool": torch.tensor([True, False]),
    "empty": torch.empty(2, 0, 3),
    "complex": torch.ones(2, dtype=torch.complex64),
    "large": torch.arange(1_000_000, dtype=torch.int64),
}


def test_outputs_are_those_of_the_stages_own_process(run: Open) -> None:
    requests = (
        (new("speech", "abc", is_last=False, parameters={"voice": "bob", "speed": 2.0, "marks": ["x"]}),),
        (more("speech", "de"), more("speech", "f", is_last=True)),
        (new("types", "types", tensors=TENSORS),),
        (new("ended", "abc", is_last=False), StreamChunk("ended", is_last=True)),
        *((new(text, text),) for text in ("", "a!b", "invalid", "wrong", "fail")),
        (new("range", "a", parameters={"speed": 9.0}),),
    )
    outcomes = []
    for runtime in ({}, OWN, {**OWN, "max_batch_size": 3}):
        running = run(runtime=runtime)
        for items in requests:
            running.put(*items)
        names = dict.fromkeys(item.request_id for items in requests for item in items)
        finish(running, names)
        outcomes.append({name: outcome(running, name) for name in names})
    here, *there = outcomes
    assert here["speech"][1] == ["abcdef<3>"] and here["speech"][3]["marks"] == ["x"]
    assert here["invalid"] == ("no words", "InvalidRequestError", True)
    assert (
        here["fail"][1] == "AttributeError"
        and here["wrong"][0] == "TypeError: Speech must return or yield dicts, not str"
    )
    tensors, data = here["types"][2:]
    assert set(tensors) == set(TENSORS) and data["raw"] == b"\0\xff" and data["model"] == "the model"
    for other in there:
        other["types"][3]["nested"] = here["types"][3]["nested"]  # A tuple is a list there, as for every later stage.
        assert other == here


def finish(running: RunningEngine, names: Iterable[str]) -> None:
    """Waits until all these requests have ended."""
    for name in names:
        deadline = time.monotonic() + PATIENCE
        while not running.items[name] or isinstance(running.items[name][-1], Stream):
            assert time.monotonic() < deadline and running._thread.is_alive(), name
            running.take_items()
            time.sleep(0.001)


def data_of(running: RunningEngine, name: str, text: str) -> dict[str, Any]:
    running.put(new(name, text))
    finish(running, [name])
    return running.output(name).data


def test_it_runs_in_a_process_of_its_own_that_ends_with_the_engine(run: Open) -> None:
    running = run()
    found = data_of(running, "r", "where")
    assert running.output("r").completions[0].text == f"{OWN['python']}<1>"
    assert found["parent"] == os.getpid() and running.engine.processes == (found["process"],)
    running.stop()
    running.engine.close()
    assert not Path(f"/proc/{found['process']}").exists()


def test_what_a_package_prints_is_in_the_stages_log(run: Open, capsys: pytest.CaptureFixture[str]) -> None:
    data_of(run(), "r", "where")
    assert "a package prints on stdout" in capsys.readouterr().err


def test_an_abort_stops_a_stream_and_releases_the_state(run: Open) -> None:
    running = run()
    running.put(new("r", "~", is_last=False))
    running.wait_for("r", 3)
    running.put(AbortRequest("r"))
    assert data_of(running, "s", "open")["open"] == ["aborted", "ann", "closed"]
    assert not any(isinstance(item, Error) for item in running.items["r"])


def test_the_traceback_is_that_of_the_agent(run: Open) -> None:
    running = run()
    running.put(new("r", "fail"), new("s", "strange"))
    finish(running, "rs")
    error = running.error("r")
    assert "agent_stages.py" in error.traceback and 'return {"text": self.nothing}' in error.traceback
    assert running.error("s").error == (
        "TypeError: object cannot pass between the stage and its Python; plain values, bytes, arrays and tensors can"
    )
    assert data_of(running, "next", "where")


def test_threads_of_the_agent_are_those_of_the_stage(run: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    running = run()
    (process,) = running.engine.processes
    variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    assert f"OMP_NUM_THREADS={torch.get_num_threads()}".encode() in variables
    assert not any(variable.startswith(b"PYTHONPATH=") for variable in variables)


@pytest.mark.parametrize("function", ["shout", "spell"])
def test_a_plain_function(run: Open, function: str) -> None:
    outcomes = []
    for runtime in ({}, OWN):
        running = run(function, runtime)
        running.put(*(NewRequest(StageRequest(request_id=name, prompt=name)) for name in ("word", "wrong")))
        finish(running, ("word", "wrong"))
        outcomes.append([outcome(running, name) for name in ("word", "wrong")])
    assert outcomes[0] == outcomes[1]


def test_a_batch_function(run: Open) -> None:
    outcomes = []
    for runtime in ({}, OWN):
        running = run(runtime={**runtime, "max_batch_size": 3}, batch_function=f"{MODULE}.count")
        running.put(*(NewRequest(StageRequest(request_id=name, prompt=name)) for name in ("a", "b")))
        running.put(NewRequest(StageRequest(request_id="none")))
        finish(running, ("a", "b", "none"))
        running.put(NewRequest(StageRequest(request_id="short", prompt="short")))
        finish(running, ["short"])
        outcomes.append({name: outcome(running, name)[:2] for name in ("a", "b", "none", "short")})
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["short"][0].endswith("must return a list with one result for each of 1")
    assert outcomes[0]["none"][0] == "ValueError: no prompt"


@pytest.mark.parametrize("function", ["Speech", "crash"])
@pytest.mark.parametrize(
    ("text", "words"),
    [("crash", "was killed by SIGKILL"), ("exit", "exited with status 3; it printed last: it gives up")],
)
def test_the_end_of_the_agent_ends_the_engine(text: str, words: str, function: str) -> None:
    engine = make_engine(function)
    engine.start()
    if function == "Speech":
        engine.inbox.put(new("r", text))
    else:
        engine.inbox.put(NewRequest(StageRequest(request_id="r", prompt=text)))
    with pytest.raises(AgentDiedError, match=rf"stage 1 \(stage1\): its Python, {OWN['python']}, {words}"):
        engine.run()
    engine.close()


def test_the_end_of_an_idle_agent_ends_the_engine() -> None:
    engine = make_engine()
    engine.start()
    os.kill(engine.processes[0], signal.SIGTERM)
    with pytest.raises(AgentDiedError, match="was killed by SIGTERM"):
        engine.run()
    engine.close()


def test_the_log_has_the_stacks_of_a_call_that_takes_long(run: Open, capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(runtime={**OWN, "step_timeout_s": 0.5})
    engine.start()
    engine.inbox.put(new("r", "hang"))
    with ThreadPoolExecutor() as threads:
        ended = threads.submit(engine.run)
        wait_for_stacks(capsys)
        os.kill(engine.processes[0], signal.SIGKILL)
        with pytest.raises(AgentDiedError):
            ended.result()
    engine.close()


def wait_for_stacks(capsys: pytest.CaptureFixture[str]) -> None:
    printed, deadline = "", time.monotonic() + PATIENCE
    while "in window" not in printed:
        assert time.monotonic() < deadline
        printed += capsys.readouterr().err
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import nothing_here", "ModuleNotFoundError: No module named 'nothing_here'"),
        ("from vllm_omni.media import encode_audio", "ModuleNotFoundError: No module named 'vllm_omni.media'"),
        ("raise OSError('no libcudart')", "OSError: no libcudart"),
    ],
)
def test_an_import_that_fails_there_is_named(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module can be imported here."""
    monkeypatch.syspath_prepend(str(tmp_path))
    code = f"import sys\nif not hasattr(sys, 'imported_here'):\n    {line}\ndef say(request, sources): pass\n"
    (tmp_path / "only_here.py").write_text(code)
    monkeypatch.setattr(sys, "imported_here", True, raising=False)
    monkeypatch.delitem(sys.modules, "only_here", raising=False)
    importlib.import_module("only_here")
    stage = OmniStageConfig(
        stage_id=1, engine_type="function", function="only_here.say", runtime=StageRuntimeConfig(**OWN)
    )
    engine = stage.kind.make_engine("", Outbox())
    kind, _, message = words.partition(": ")
    with pytest.raises(Exception, match=re.escape(message)) as raised:
        engine.start()
    assert type(raised.value).__name__ == kind and "only_here.py" in str(raised.value.__cause__)
    engine.close()
    sys.modules.pop("only_here")


def test_a_start_that_fails_is_named() -> None:
    engine = make_engine(engine_args={"fails": True})
    with pytest.raises(Exception, match="no weights here") as raised:
        engine.start()
    assert type(raised.value).__name__ == "LookupError"
    engine.close()


def test_the_agents_names_are_those_of_the_package() -> None:
    assert agent_program._NAMES["vllm_omni"].keys() <= set(vllm_omni.__all__)
    assert agent_program.FunctionStage.__dict__.keys() >= {"start", "begin", "window", "end", "abort", "voices"}
    for name, value in agent_program._NAMES["vllm_omni.function_stage"].items():
        there = getattr(function_stage, name)
        assert value == there if isinstance(value, int) else there is not None
    methods = {name for name in vars(function_stage.FunctionStage) if not name.startswith("_")}
    assert methods <= set(vars(agent_program.FunctionStage))
    for fields, struct in (
        (agent._REQUEST, StageRequest),
        (agent._OUTPUT, StageOutput),
        (agent._COMPLETION, Completion),
    ):
        assert set(fields) <= set(struct.__struct_fields__)


def test_a_frame_has_any_plain_value() -> None:
    ours, theirs = map(agent_program.Channel, socket.socketpair())
    values = [
        None,
        True,
        -(2**70),
        1.5,
        "\ud800",
        b"",
        {"array": 0},
        {"items": []},
        {1: {2: []}},
        [[], {}],
        np.float64(2),
    ]
    values += [torch.ones(2, dtype=torch.bfloat16), np.arange(4, dtype=">i2")[::2], np.int64(3), np.bool_(True)]
    ours.send(values)
    *plain, half, swapped, integer, boolean = theirs.receive()
    assert plain == values[: len(plain)] and integer == 3 and boolean is True
    assert half.tolist() == [1.0, 1.0] and swapped.tolist() == [0, 2] and swapped.dtype == np.int16
    for wrong in (object(), np.array(["text"]), {1, 2}):
        with pytest.raises(TypeError, match="cannot pass"):
            ours.send([wrong])
    theirs.close()
    with pytest.raises(agent_program.DisconnectedError):
        ours.receive()
    ours.close()
