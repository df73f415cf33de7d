# SPDX-License-Identifier: Apache-2.0
"""The grammars of a stage's requests: compiled beside the engine, and those of forced texts, which need no compiler."""

import contextlib
import copy
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, cast

import numpy as np
import torch
import xgrammar
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputKey,
)
from vllm.v1.structured_output.request import StructuredOutputRequest

from vllm_omni.core.sched.output import OmniRequest

COMPILE_TIMEOUT_S = 30.0
"""After which a grammar is refused. Its thread cannot be ended."""

MAX_REPLACED = 2
"""Threads of refused grammars that are replaced by others while they compile on."""

TRIAL_TOKENS = 256
TRIAL_TIME_S = 2.0
"""Of the processor, for the masks of so many tokens. They take less than 0.1 s with a vocabulary of 150,000."""

MAX_TRIED = 256
"""Grammars that are remembered as tried."""

_LOWEST_PRIORITY = 19


class OmniStructuredOutputManager(StructuredOutputManager):
    """vLLM's, which compiles grammars in a `CompilePool`. `adopt` makes it of vLLM's class.

    Attributes:
        on_compiled: Called with each grammar that was compiled, or refused; on another thread.
    """

    on_compiled: Callable[[], None]
    _backends: dict[str | None, StructuredOutputBackend | None]
    _tried: dict[StructuredOutputKey, None]

    @classmethod
    def adopt(cls, manager: StructuredOutputManager) -> None:
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager.on_compiled = _ignore
        manager._backends, manager._tried = {}, {}
        num_threads = max(1, (os.cpu_count() or 1) // 2)  # as vLLM's
        manager.executor = cast(Any, CompilePool(num_threads, COMPILE_TIMEOUT_S, lambda: manager.on_compiled()))

    def grammar_init(self, request: Request) -> None:
        """Starts to compile the grammar of a request, by the backend that can: vLLM has that of its first one only.

        vLLM calls it before the request is one of ours, too early.
        """
        if not isinstance(request, OmniRequest) or request.structured_output_request is None:
            return
        name = request.structured_output_request.params._backend
        with_backend = copy.copy(self)  # Its thread reads the backend later.
        with_backend.backend = self._backends.get(name)
        super(OmniStructuredOutputManager, with_backend).grammar_init(request)
        self.backend = self._backends[name] = with_backend.backend

    def _create_grammar(self, request: Request) -> StructuredOutputGrammar:
        """Compiles a grammar, and tries it: masks of some take longer with each token, without an end. The engine would
        wait for them in a step, with all its requests."""
        grammar = super()._create_grammar(request)
        constraint, params = request.structured_output_request, request.sampling_params
        assert constraint is not None and params is not None and self.backend is not None
        key = constraint.structured_output_key
        if key not in self._tried:
            _try(grammar, self.backend.allocate_token_bitmask(1), params.all_stop_token_ids)
            if len(self._tried) >= MAX_TRIED:
                self._tried.clear()
            self._tried[key] = None
        return grammar

    def force(self, request: OmniRequest, token_ids: Sequence[int]) -> None:
        """Has a request generate these tokens, and then a stop token. It can be scheduled at once."""
        assert request.sampling_params is not None
        # vLLM reads the parameters only to compile a grammar, and this one has none.
        grammar = ForcedTokens(token_ids, request.sampling_params.all_stop_token_ids)
        request.structured_output_request = StructuredOutputRequest(cast(Any, None), grammar, reasoning_ended=True)
        request.status = RequestStatus.WAITING
        if self._grammar_bitmask is None:  # Else a backend, or this, has made it.
            num_masks = self.vllm_config.scheduler_config.max_num_seqs * (1 + self.vllm_config.num_speculative_tokens)
            vocab_size = self.vllm_config.model_config.get_vocab_size()
            self._grammar_bitmask = xgrammar.allocate_token_bitmask(num_masks, vocab_size)


class ForcedTokens(StructuredOutputGrammar):
    """The grammar of one reply: these tokens, and then one that ends it."""

    def __init__(self, token_ids: Sequence[int], stop_token_ids: Collection[int]) -> None:
        self._allowed: list[Collection[int]] = [(token_id,) for token_id in token_ids]  # by position
        if stop_token_ids:
            self._allowed.append(stop_token_ids)
        self._num_accepted = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        accepted = self.validate_tokens(tokens)
        self._num_accepted += len(accepted)
        return self.is_terminated() or len(accepted) == len(tokens)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        count = 0
        for token, allowed in zip(tokens, self._allowed[self._num_accepted :], strict=False):
            if token not in allowed:
                break
            count += 1
        return tokens[:count]

    def rollback(self, num_tokens: int) -> None:
        self._num_accepted -= num_tokens

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        row = bitmask[batch_index].numpy().view("uint32")  # A token is bit id % 32 of word id // 32.
        row.fill(0)
        for token in self._allowed[self._num_accepted]:
            row[token // 32] |= 1 << token % 32

    def is_terminated(self) -> bool:
        return self._num_accepted == len(self._allowed)

    def reset(self) -> None:
        self._num_accepted = 0


def _try(grammar: StructuredOutputGrammar, mask: torch.Tensor, stop_token_ids: Collection[int]) -> None:
    """Writes the first tokens of a text that a grammar allows.

    Args:
        mask: int32 `[1, words]`.

    Raises:
        ValueError: It allows none, or is too slow.
    """
    end = time.thread_time() + TRIAL_TIME_S
    for _ in range(TRIAL_TOKENS):
        grammar.fill_bitmask(mask, 0)
        bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        if not len(allowed):
            raise ValueError("it allows no token; it must match some text that ends")
        token = next((int(token) for token in allowed if token not in stop_token_ids), None)
        if token is None or not grammar.accept_tokens("trial", [token]) or grammar.is_terminated():
            break
        if time.thread_time() > end:
            raise ValueError(f"it takes more than {TRIAL_TIME_S:g} s for {TRIAL_TOKENS} tokens; make it simpler")
    grammar.reset()


class CompilePool:
    """Threads that compile grammars, in turn for each owner of requests, and with little of the processor.

    In place of the `ThreadPoolExecutor` of vLLM's manager, which compiles in order of arrival.
    """

    def __init__(self, num_threads: int, timeout_s: float, on_done: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            num_threads: Grammars that are compiled at once.
            timeout_s: Seconds after which a grammar is refused.
            on_done: Called after each of them, with its future done.
        """
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._on_done = on_done
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._running: set[Future[Any]] = set()
        self._refused: set[Future[Any]] = set()  # of those that run

    def submit(self, compile_grammar: Callable[[OmniRequest], Any], request: OmniRequest) -> Future[Any]:
        """Queues a grammar. The future can be cancelled until its turn comes."""
        future: Future[Any] = Future()
        future.add_done_callback(lambda _: self._on_done())
        with self._lock:
            self._waiting.setdefault(request.owner, deque()).append((future, lambda: compile_grammar(request)))
            self._start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing more begins. What runs is not waited for: it holds what it needs."""
        with self._lock:
            waiting = [future for owned in self._waiting.values() for future, _ in owned]
            self._waiting.clear()
        for future in waiting:
            future.cancel()

    def _start(self) -> None:
        while self._has_thread and (task := self._next()) is not None:
            self._running.add(task[0])
            threading.Thread(target=self._run, args=task, name="omni-grammar", daemon=True).start()

    @property
    def _has_thread(self) -> bool:
        return len(self._running) - min(len(self._refused), MAX_REPLACED) < self._num_threads

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        while self._waiting:
            owner, owned = self._waiting.popitem(last=False)
            future, work = owned.popleft()
            if owned:
                self._waiting[owner] = owned  # behind the others
            if future.set_running_or_notify_cancel():
                return future, work
        return None

    def _run(self, future: Future[Any], work: Callable[[], Any]) -> None:
        if sys.platform == "linux":  # There it is the priority of the thread, and of threads that it starts.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        timer = threading.Timer(self._timeout_s, self._refuse, (future,))
        timer.daemon = True
        timer.start()
        try:
            _end(future, work(), None)
        except Exception as error:
            _end(future, None, error)
        timer.cancel()
        with self._lock:
            self._running.discard(future)
            self._refused.discard(future)
            self._start()

    def _refuse(self, future: Future[Any]) -> None:
        _end(future, None, TimeoutError(f"it is not ready after {self._timeout_s:g} s; make it simpler"))
        with self._lock:
            if future in self._running:
                self._refused.add(future)
                self._start()


def _end(future: Future[Any], result: Any, error: Exception | None) -> None:
    """No effect if it has ended, by its time limit or by its result."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _ignore() -> None:
    pass
