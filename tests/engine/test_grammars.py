# SPDX-License-Identifier: Apache-2.0
"""Grammars are compiled beside the engine, in turn for each owner; forced tokens need none."""

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import xgrammar
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from tests.engine.running import greedy, last_outputs, run
from vllm_omni.engine import grammars
from vllm_omni.engine.grammars import CompilePool, ForcedTokens
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine

PROMPT = [5, 6, 7]
PROMPTS = [{"prompt_token_ids": PROMPT}]


def constrained(**constraint: Any) -> SamplingParams:
    return greedy(8, structured_outputs=StructuredOutputsParams(**constraint), ignore_eos=False)


@pytest.fixture
def engine(text_engine: OmniLLMEngine) -> Iterator[OmniLLMEngine]:
    """Without requests, and without a step to report that they have ended."""
    drain(text_engine)
    yield text_engine
    drain(text_engine)


def drain(engine: OmniLLMEngine) -> None:
    engine.abort_request(list(engine.output_processor.external_req_ids))
    while engine.has_work():
        engine.step()


class Compiler:
    """Stands for a compiler of grammars whose work ends when the test says so."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_end: dict[str, threading.Event] = {}
        self.changed = threading.Condition()

    def request(self, name: str, owner: str = "") -> Any:
        self.may_end[name] = threading.Event()
        return SimpleNamespace(name=name, owner=owner)

    def compile(self, request: Any) -> str:
        with self.changed:
            self.begun.append(request.name)
            self.changed.notify_all()
        self.may_end[request.name].wait()
        return request.name.upper()

    def wait_for(self, *begun: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.begun == list(begun), timeout=60), self.begun


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    for event in compiler.may_end.values():
        event.set()


class TestThePool:
    def test_compiles_in_turn_for_each_owner(self, compiler: Compiler) -> None:
        pool = CompilePool(1, 60)
        names = [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c")]
        futures = [pool.submit(compiler.compile, compiler.request(*each)) for each in names]
        for event in compiler.may_end.values():
            event.set()
        assert [future.result(60) for future in futures] == ["A1", "A2", "A3", "B1", "C1"]
        assert compiler.begun == ["a1", "a2", "b1", "c1", "a3"]

    def test_what_was_cancelled_is_not_compiled(self, compiler: Compiler) -> None:
        pool = CompilePool(1, 60)
        first, dropped, last = (pool.submit(compiler.compile, compiler.request(name)) for name in "abc")
        compiler.wait_for("a")
        assert dropped.cancel() and not first.cancel()
        for event in compiler.may_end.values():
            event.set()
        assert (first.result(60), last.result(60)) == ("A", "C")
        assert compiler.begun == ["a", "c"]

    def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_begins(
        self, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(grammars, "MAX_REPLACED", 1)
        pool = CompilePool(1, 0.01)
        futures = [pool.submit(compiler.compile, compiler.request(name)) for name in "abc"]
        for future in futures[:2]:
            assert isinstance(future.exception(60), TimeoutError)
        compiler.wait_for("a", "b")  # The second one that does not end is not replaced.
        compiler.may_end["c"].set()
        compiler.may_end["b"].set()
        compiler.wait_for("a", "b", "c")

    def test_an_error_is_that_of_its_grammar(self) -> None:
        done: list[int] = []
        pool = CompilePool(1, 60, lambda: done.append(1))

        def fail(request: Any) -> None:
            raise ValueError(request.owner)

        futures = [pool.submit(fail, SimpleNamespace(owner=owner)) for owner in ("x", "y")]
        assert [str(future.exception(60)) for future in futures] == ["x", "y"]
        assert len(done) == 2

    def test_a_shutdown_cancels_what_waits(self, compiler: Compiler) -> None:
        pool = CompilePool(1, 60)
        first, last = (pool.submit(compiler.compile, compiler.request(name)) for name in "ab")
        pool.shutdown(wait=True, cancel_futures=True)
        assert last.cancelled()
        compiler.may_end["a"].set()
        assert first.result(60) == "A"


class TestForcedTokens:
    def test_each_position_allows_its_token(self) -> None:
        forced = ForcedTokens([0, 31, 32, 99], {64, 2})
        mask = xgrammar.allocate_token_bitmask(2, 100)
        for expected in ([0], [31], [32], [99], [2, 64]):
            forced.fill_bitmask(mask, 1)
            allowed = [token for token in range(100) if int(mask[1][token // 32]) >> token % 32 & 1]
            assert allowed == expected and not forced.is_terminated()
            wrong = [token for token in range(100) if token not in expected]
            assert not any(forced.accept_tokens("", [token]) for token in wrong)
            assert forced.accept_tokens("", expected[:1])
        assert forced.is_terminated() and forced.accept_tokens("", [5])
        assert bool((mask[0] == -1).all())

    def test_drafts(self) -> None:
        forced = ForcedTokens([4, 5, 6], {7})
        assert forced.validate_tokens([4, 5, 9, 7]) == [4, 5]
        assert forced.accept_tokens("", [4, 5, 6])
        forced.rollback(2)
        assert forced.validate_tokens([5, 6, 7, 1]) == [5, 6, 7]
        forced.reset()
        assert forced.validate_tokens([4]) == [4]


def test_forced_tokens_do_not_wait_for_a_compiler(engine: OmniLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = engine.engine_core.engine_core.structured_output_manager  # type: ignore[attr-defined]
    create, may_begin = manager._create_grammar, threading.Event()
    monkeypatch.setattr(manager, "_create_grammar", lambda request: may_begin.wait() and create(request))
    try:
        for index, text in enumerate(("a", "b", "c")):
            engine.add_request(str(index), {"prompt_token_ids": PROMPT}, constrained(choice=[text]))
        assert not engine.has_work()
        engine.add_request("3", {"prompt_token_ids": PROMPT, "forced_token_ids": [9, 300, 9, 8]}, greedy(5))
        ended: list[RequestOutput] = []
        while not ended:
            ended = [output for output in engine.step() if output.finished]  # type: ignore[misc]
        (forced,) = ended[0].outputs
        assert list(forced.token_ids)[:4] == [9, 300, 9, 8] and ended[0].request_id == "3"
        engine.abort_request(["1"])
    finally:
        may_begin.set()
    assert [output.outputs[0].text for output in last_outputs(engine)] == ["a", "c"]
    assert engine.kv_blocks()[0] == 0


def test_each_grammar_has_the_backend_that_can_compile_it(engine: OmniLLMEngine) -> None:
    """In a fresh manager the first one would choose for all."""
    manager = engine.engine_core.engine_core.structured_output_manager  # type: ignore[attr-defined]
    manager._backends.clear()
    constraints = [{"json": {"const": 12, "multipleOf": 3, "type": "integer"}}, {"grammar": 'root ::= "x" | "yy"'}] * 2
    for index, constraint in enumerate(constraints):
        engine.add_request(str(index), {"prompt_token_ids": PROMPT}, constrained(**constraint))
    texts = [output.outputs[0].text for output in last_outputs(engine)]
    assert texts[0] == texts[2] == "12" and texts[1] == texts[3] in ("x", "yy")
    assert manager._backends.keys() == {"guidance", "xgrammar"}


def test_a_grammar_without_a_text_is_the_requests_fault(engine: OmniLLMEngine) -> None:
    for constraint, words in (
        ({"json": {"$ref": "#"}}, "cannot be compiled: it allows no token"),
        ({"grammar": 'root ::= "a" b\nb ::= b'}, "allows no token"),
    ):
        (output,) = run(engine, PROMPTS, constrained(**constraint))
        assert output.outputs[0].finish_reason == "error"
        assert words in str(output.outputs[0].stop_reason), constraint
    (output,) = run(engine, PROMPTS, constrained(choice=["yes"]))
    assert output.outputs[0].text == "yes"


def test_a_grammar_whose_masks_take_too_long_is_refused(engine: OmniLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = constrained(regex="((a{1,100}){1,100}){1,100}b")
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "TRIAL_TIME_S", 0.0)
        (output,) = run(engine, PROMPTS, slow)
    assert "takes more than 0 s for 256 tokens" in str(output.outputs[0].stop_reason)
    (output,) = run(engine, PROMPTS, constrained(choice=["yes"]))
    assert output.outputs[0].text == "yes"


class TestTheTrial:
    def try_it(self, monkeypatch: pytest.MonkeyPatch, allowed: list[list[int]], seconds: float = 0.0) -> list[int]:
        """The tokens that were written, of a grammar that allows these."""
        written: list[int] = []
        now = iter(itertools.count(0.0, seconds))
        monkeypatch.setattr(grammars, "time", SimpleNamespace(thread_time=lambda: next(now)))

        def fill_bitmask(mask: torch.Tensor, index: int) -> None:
            ForcedTokens([], allowed[min(len(written), len(allowed) - 1)]).fill_bitmask(mask, index)

        grammar = SimpleNamespace(
            fill_bitmask=fill_bitmask,
            accept_tokens=lambda _, tokens: written.extend(tokens) or True,
            is_terminated=lambda: False,
            reset=lambda: written.append(-1),
        )
        grammars._try(cast(Any, grammar), xgrammar.allocate_token_bitmask(1, 100), {2})
        return written

    def test_writes_the_first_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.try_it(monkeypatch, [[2, 40], [5]]) == [40, *[5] * (grammars.TRIAL_TOKENS - 1), -1]
        assert self.try_it(monkeypatch, [[40], [2]]) == [40, -1]

    def test_refuses_what_is_slow_or_empty(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert len(self.try_it(monkeypatch, [[5]], seconds=0.005)) == grammars.TRIAL_TOKENS + 1
        with pytest.raises(ValueError, match="takes more than 2 s"):
            self.try_it(monkeypatch, [[5]], seconds=0.3)


def test_an_error_of_the_compiler_is_the_requests_fault(engine: OmniLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = engine.engine_core.engine_core.structured_output_manager  # type: ignore[attr-defined]

    def fail(request: Any) -> None:
        raise RuntimeError("too many states")

    with monkeypatch.context() as patch:
        patch.setattr(manager, "_create_grammar", fail)
        (output,) = run(engine, PROMPTS, constrained(choice=["yes"]))
    assert "cannot be compiled: too many states" in str(output.outputs[0].stop_reason)
    (output,) = run(engine, PROMPTS, constrained(choice=["yes"]))
    assert output.outputs[0].text == "yes"
