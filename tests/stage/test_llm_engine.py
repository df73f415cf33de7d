# SPDX-License-Identifier: Apache-2.0
"""An autoregressive stage: input in chunks, output in pieces, aborts. With a real engine and a tiny checkpoint."""

from pathlib import Path

import pytest
import torch
from vllm import SamplingParams

from tests.engine.running import greedy, random_prompts
from tests.stage.running_engine import RunningEngine, chunk, is_readable, new_request
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines.base import AbortRequest, Error, NewRequest, Outbox, Result, Stream, StreamChunk
from vllm_omni.stage.engines.llm import LLMStageEngine

HIDDEN = 128


@pytest.fixture(scope="module")
def feed() -> torch.Tensor:
    """`[16, hidden]`, large enough to change the most likely tokens."""
    return torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.2


def whole(request_id: str, prompt: list[int], params: SamplingParams, feed=None, **attributes) -> NewRequest:
    information = {} if feed is None else {"feed": feed}
    return new_request(request_id, as_input(prompt, **information), params, **attributes)


def as_input(prompt: list[int], num_ready_tokens: int | None = None, **information) -> StageInput:
    return StageInput(prompt_token_ids=prompt, additional_information=information, num_ready_tokens=num_ready_tokens)


def first_part(request_id: str, prompt: list[int], params: SamplingParams, feed: torch.Tensor, size: int) -> NewRequest:
    """The prompt, and the part of the feed for the first generated rows."""
    stage_input = as_input(prompt, len(prompt) + size, feed=feed[:size])
    return new_request(request_id, stage_input, params, is_last=False)


def next_part(
    request_id: str, prompt: list[int], feed: torch.Tensor, start: int, stop: int, is_last: bool = False
) -> StreamChunk:
    stage_input = as_input([], len(prompt) + stop, feed=feed[start:stop])
    return chunk(request_id, stage_input, is_last)


def assert_equal(output: StageOutput, expected: StageOutput) -> None:
    assert output.completions == expected.completions
    assert output.prompt_token_ids == expected.prompt_token_ids
    assert output.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(output.tensors[name], tensor, rtol=0, atol=1e-5)


def assert_nothing_is_left(running: RunningEngine) -> None:
    engine = running.engine._engine
    runner = engine.model_executor.driver_worker.model_runner
    used, total = running.engine.kv_blocks()
    assert (used, total) == (0, 10)
    assert not engine.has_unfinished_requests() and not running.engine._requests
    assert (runner.requests, runner.omni_info, runner.open_inputs) == ({}, {}, set())
    assert (runner._row_tracker._next_position, runner._row_tracker._pending) == ({}, {})


class TestInputInChunks:
    def test_the_result_equals_that_of_whole_input_and_others_continue(self, ar, feed):
        prompt, other = random_prompts(21, 40)
        ar.put(whole("whole", prompt, greedy(30), feed), whole("alone", other, greedy(25)))
        expected, expected_other = ar.finish("whole", "alone")
        assert expected.completions[0].token_ids != expected_without_feed(ar, prompt)

        ar.put(first_part("held", prompt, greedy(30), feed, 0), whole("other", other, greedy(25)))
        (output,) = ar.finish("other")
        assert_equal(output, expected_other)
        assert not ar.items["held"]
        for start, stop in ((0, 1), (1, 9)):
            ar.put(next_part("held", prompt, feed, start, stop))
            ar.wait_asleep()
            assert not ar.items["held"]
        ar.put(next_part("held", prompt, feed, 9, 16, is_last=True))
        (output,) = ar.finish("held")
        assert_equal(output, expected)
        assert_nothing_is_left(ar)

    def test_it_computes_exactly_what_its_input_allows(self, ar, feed):
        """With n rows of feed: the prompt, n generated rows, and then it waits."""
        (prompt,) = random_prompts(10)
        ar.put(first_part("a", prompt, greedy(30), feed, 3))
        ar.wait_asleep()
        assert ar.counter.batch_sizes == [1] * 4
        ar.put(next_part("a", prompt, feed, 3, 5))
        ar.wait_asleep()
        assert ar.counter.batch_sizes == [1] * 6
        ar.put(chunk("a", is_last=True))
        (output,) = ar.finish("a")
        assert len(output.completions[0].token_ids) == 30

    def test_chunks_that_arrive_before_the_first_step(self, ar, feed):
        """All sequence slots are in use for some steps."""
        prompt, *others = random_prompts(12, 5, 6, 7, 8)
        ar.put(whole("whole", prompt, greedy(18), feed))
        ar.wait_asleep()
        ar.put(
            *(whole(str(index), other, greedy(4)) for index, other in enumerate(others)),
            first_part("a", prompt, greedy(18), feed, 2),
            next_part("a", prompt, feed, 2, 7),
            next_part("a", prompt, feed, 7, 16),
            chunk("a", is_last=True),
        )
        assert_equal(*ar.finish("a", "whole"))
        assert ar.counter.batch_sizes[18:] == [4] * 4 + [1] * 18

    def test_a_prompt_that_is_not_ready_waits(self, ar, feed):
        prompt, other = random_prompts(20, 5)
        stage_input = as_input(prompt, num_ready_tokens=19, feed=feed)
        ar.put(new_request("a", stage_input, greedy(4), is_last=False), whole("b", other, greedy(4)))
        (output,) = ar.finish("b")
        assert len(output.completions[0].token_ids) == 4 and not ar.items["a"]
        assert ar.counter.batch_sizes == [1] * 4
        ar.put(chunk("a", is_last=True))
        (output,) = ar.finish("a")
        assert len(output.completions[0].token_ids) == 4

    def test_held_requests_are_preempted_and_recomputed(self, ar, feed):
        """Two held requests have 10 of 10 blocks; the next request needs 4."""
        first, second, other = random_prompts(140, 150, 100)
        ar.put(whole("0", first, greedy(20), feed))
        ar.wait_asleep()
        ar.put(whole("1", second, greedy(20), feed))
        ar.wait_asleep()
        ar.put(first_part("a", first, greedy(20), feed, 8), first_part("b", second, greedy(20), feed, 8))
        ar.wait_asleep()
        assert ar.engine.kv_blocks() == (10, 10)
        ar.put(whole("c", other, greedy(10)))
        (output,) = ar.finish("c")
        assert len(output.completions[0].token_ids) == 10
        ar.put(next_part("b", second, feed, 8, 16, is_last=True), next_part("a", first, feed, 8, 16, is_last=True))
        for request_id, expected in (("a", "0"), ("b", "1")):
            assert_equal(*ar.finish(request_id, expected))
        assert_nothing_is_left(ar)

    def test_a_running_request_preempts_a_held_one(self, ar, feed):
        """The running request needs an 11th block of 10, and arrived last: it is not the one that is preempted."""
        held, other = random_prompts(150, 158)
        ar.put(first_part("held", held, greedy(5), feed, 1))
        ar.wait_asleep()
        ar.counter.batch_sizes.clear()
        ar.put(whole("other", other, greedy(20)))
        ar.finish("other")
        assert ar.counter.batch_sizes == [1] * (3 + 19)  # The prompt takes 3 steps of at most 64 tokens.
        ar.put(chunk("held", is_last=True))
        ar.finish("held")
        assert_nothing_is_left(ar)

    def test_chunks_wait_for_their_request(self, ar, feed):
        """Steps of other requests do not consume them."""
        prompt, other = random_prompts(12, 20)
        ar.put(whole("whole", prompt, greedy(18), feed))
        ar.wait_asleep()
        ar.put(first_part("a", prompt, greedy(18), feed, 2))
        ar.wait_asleep()
        ar.put(chunk("a", as_input([], len(prompt) + 2, feed=feed[2:9])), whole("b", other, greedy(4)))
        ar.finish("b")
        ar.put(next_part("a", prompt, feed, 9, 16, is_last=True))
        assert_equal(*ar.finish("a", "whole"))

    def test_a_request_may_end_before_its_input(self, ar, feed):
        (prompt,) = random_prompts(10)
        ar.put(first_part("a", prompt, greedy(3), feed, 8))
        ar.wait_asleep()
        assert isinstance(ar.items["a"][-1], Result)
        ar.put(next_part("a", prompt, feed, 8, 9), chunk("a", is_last=True))
        ar.wait_asleep()
        assert len(ar.items["a"]) == 1
        assert_nothing_is_left(ar)

    def test_a_chunk_that_cannot_be_encoded_fails_its_request(self, ar, feed):
        prompt, other = random_prompts(10, 12)
        ar.put(first_part("a", prompt, greedy(9), feed, 2), whole("b", other, greedy(9)))
        ar.put(chunk("a", as_input([], what=object())))
        ar.wait_asleep()
        assert ar.error("a").invalid and "object" in ar.error("a").error
        assert len(ar.output("b").completions[0].token_ids) == 9
        assert_nothing_is_left(ar)

    def test_several_sequences_share_the_input(self, ar, feed):
        (prompt,) = random_prompts(10)
        params = SamplingParams(n=2, seed=5, max_tokens=12, ignore_eos=True)
        ar.put(whole("whole", prompt, params, feed))
        ar.wait_asleep()
        ar.put(first_part("a", prompt, params, feed, 4))
        ar.wait_asleep()
        assert not ar.items["a"]
        ar.put(next_part("a", prompt, feed, 4, 16, is_last=True))
        assert_equal(*ar.finish("a", "whole"))


class TestOutputInPieces:
    @pytest.mark.parametrize(
        "parameters",
        [
            {"max_tokens": 12},
            {"max_tokens": 1},
            {"max_tokens": 12, "logprobs": 2},
            {"max_tokens": 12, "logprobs": 0, "detokenize": False},
            {"max_tokens": 12, "n": 3, "temperature": 1.0, "seed": 7, "logprobs": 1},
            {"max_tokens": 12, "stream_interval": 5, "logprobs": 1},
        ],
        ids=str,
    )
    def test_merged_pieces_equal_the_whole(self, ar, feed, parameters):
        (prompt,) = random_prompts(70)
        params = greedy(**parameters)
        ar.put(whole("whole", prompt, params, feed))
        ar.wait_asleep()
        ar.put(whole("a", prompt, params, feed, streams_output=True))
        assert_equal(*ar.finish("a", "whole"))
        (expected,) = ar.items["whole"]
        counts = (expected.num_input_tokens, expected.num_output_tokens)
        assert counts == (70, sum(len(c.token_ids) for c in ar.output("a").completions))
        assert (ar.items["a"][-1].num_input_tokens, ar.items["a"][-1].num_output_tokens) == counts

    @pytest.mark.parametrize("keeps_it", [False, True])
    def test_stop_strings(self, ar, keeps_it):
        (prompt,) = random_prompts(6)
        ar.put(whole("long", prompt, greedy(30)))
        (long,) = ar.finish("long")
        text = long.completions[0].text
        params = greedy(30, stop=[text[len(text) // 2 :][:3]], include_stop_str_in_output=keeps_it)
        ar.put(whole("whole", prompt, params), whole("a", prompt, params, streams_output=True))
        output, expected = ar.finish("a", "whole")
        assert_equal(output, expected)
        assert expected.completions[0].finish_reason == "stop" and len(expected.completions[0].text) < len(text)

    def test_a_stop_token_from_the_stage_input(self, ar):
        (prompt,) = random_prompts(6)
        ar.put(whole("long", prompt, greedy(12)))
        (long,) = ar.finish("long")
        stop_token = long.completions[0].token_ids[5]
        ar.put(
            *(
                new_request(
                    request_id,
                    StageInput(prompt_token_ids=prompt, stop_token_ids=[stop_token], max_tokens=9),
                    greedy(12),
                    streams_output=request_id == "a",
                )
                for request_id in ("a", "whole")
            )
        )
        output, expected = ar.finish("a", "whole")
        assert_equal(output, expected)
        assert expected.completions[0].stop_reason == stop_token

    def test_pieces_have_only_new_output(self, ar):
        (prompt,) = random_prompts(9)
        ar.put(whole("a", prompt, greedy(5), streams_output=True))
        ar.wait_asleep()
        *pieces, last = ar.items["a"]
        assert all(isinstance(piece, Stream) and not piece.output.is_last for piece in pieces)
        assert isinstance(last, Result) and last.output.is_last
        assert [len(item.output.completions[0].token_ids) for item in (*pieces, last)] == [1] * 5
        assert [item.output.prompt_token_ids for item in (*pieces, last)] == [prompt, [], [], [], []]
        # The last token is not an input, and the first row belongs to the first token.
        assert [len(item.output.tensors.get("latent", ())) for item in (*pieces, last)] == [0, 1, 1, 1, 1]

    def test_in_chunks_and_in_pieces(self, ar, feed):
        (prompt,) = random_prompts(21)
        ar.put(whole("whole", prompt, greedy(24), feed))
        ar.wait_asleep()
        start = first_part("a", prompt, greedy(24), feed, 5)
        start.streams_output = True
        ar.put(start)
        ar.wait_asleep()
        assert len(ar.items["a"]) == 6  # The prompt gives a token, and each of the 5 rows another.
        ar.put(next_part("a", prompt, feed, 5, 16, is_last=True))
        assert_equal(*ar.finish("a", "whole"))

    def test_a_step_wakes_the_reader_once(self, ar, monkeypatch):
        outbox, was_awake = ar.engine.outbox, []
        put = outbox.put
        monkeypatch.setattr(outbox, "put", lambda item: (was_awake.append(is_readable(outbox)), put(item)))
        monkeypatch.setattr(ar.counter, "step", lambda seconds, batch_size: ar.take_items())
        prompts = random_prompts(5, 6, 7, 8)
        ar.put(*(whole(str(i), prompt, greedy(5), streams_output=True) for i, prompt in enumerate(prompts)))
        ar.finish(*map(str, range(4)))
        assert was_awake == [False] * 4 * 5


class TestAbort:
    @pytest.mark.parametrize("streams_output", [False, True])
    def test_running_held_and_unknown(self, ar, feed, streams_output):
        prompts = random_prompts(30, 40, 50)
        held = first_part("held", prompts[0], greedy(40), feed, 3)
        held.streams_output = streams_output
        ar.put_after(
            4,
            AbortRequest("running"),
            AbortRequest("held"),
            next_part("held", prompts[0], feed, 3, 9),
            AbortRequest("unknown"),
            whole("next", prompts[2], greedy(3)),
        )
        ar.put(held, whole("running", prompts[1], greedy(140), streams_output=True))
        (output,) = ar.finish("next")
        assert len(output.completions[0].token_ids) == 3
        assert 0 < len(ar.items["running"]) < 140 and isinstance(ar.items["running"][-1], Stream)
        assert all(isinstance(item, Stream) for item in ar.items["held"])
        assert_nothing_is_left(ar)

    def test_in_the_inbox_and_between_chunks(self, ar, feed):
        prompts = random_prompts(30, 40)
        ar.put(whole("queued", prompts[0], greedy(40)), AbortRequest("queued"))
        ar.wait_asleep()
        assert ar.counter.batch_sizes == []
        ar.put(first_part("held", prompts[1], greedy(40), feed, 3))
        ar.wait_asleep()
        assert ar.engine.kv_blocks()[0] == 2
        ar.put(AbortRequest("held"))
        ar.wait_asleep()
        ar.put(next_part("held", prompts[1], feed, 3, 9), chunk("held", is_last=True))
        ar.wait_asleep()
        assert not ar.items
        assert_nothing_is_left(ar)

    def test_waiting_for_its_first_step(self, ar, feed):
        prompts = random_prompts(20, 30)
        ar.put(new_request("a", as_input(prompts[0], num_ready_tokens=5), greedy(4), is_last=False))
        ar.wait_asleep()
        ar.put(AbortRequest("a"))
        ar.wait_asleep()
        assert not ar.items and ar.counter.batch_sizes == []
        assert_nothing_is_left(ar)

    def test_several_sequences(self, ar):
        (prompt,) = random_prompts(40)
        ar.put_after(4, AbortRequest("a"))
        ar.put(whole("a", prompt, SamplingParams(n=3, max_tokens=100, ignore_eos=True), streams_output=True))
        ar.wait_asleep()
        assert isinstance(ar.items["a"][-1], Stream)
        assert_nothing_is_left(ar)


def test_an_idle_engine_sends_ended_requests_to_its_workers(ar):
    prompts = random_prompts(8, 40)
    ar.put(*(whole(str(index), prompt, greedy(5)) for index, prompt in enumerate(prompts)))
    ar.finish("0", "1")
    assert ar.counter.batch_sizes == [2] * 5
    assert_nothing_is_left(ar)


def preprocessed(running: RunningEngine, request_id: str, prompt: list[int], params: SamplingParams) -> NewRequest:
    """A request of a first stage, preprocessed by its caller."""
    processor = running.engine._engine.input_processor
    engine_request = processor.process_inputs(request_id, {"prompt_token_ids": prompt}, params)
    return NewRequest(StageRequest(request_id=request_id, engine_request=engine_request, sampling_params=params))


def test_requests_that_were_preprocessed_by_their_caller(ar):
    (prompt,) = random_prompts(30)
    ar.put(whole("whole", prompt, greedy(9, logprobs=1)))
    ar.wait_asleep()
    requests = [preprocessed(ar, request_id, prompt, greedy(9, logprobs=1)) for request_id in ("a", "b")]
    requests[0].streams_output = True
    requests[0].request.trace_headers = {"traceparent": "00-1-2-01"}
    ar.put(*requests)
    streamed, complete, expected = ar.finish("a", "b", "whole")
    assert_equal(streamed, expected)
    assert_equal(complete, expected)
    assert (len(ar.items["a"]), len(ar.items["b"])) == (9, 1)
    assert requests[0].request.engine_request.request_id == "a"  # The given request is unchanged.


def test_the_engine_gets_the_trace_headers(ar, feed):
    (prompt,) = random_prompts(8)
    request = first_part("a", prompt, greedy(5), feed, 1)
    request.request.trace_headers = {"traceparent": "00-1-2-01"}
    ar.put(request, first_part("b", prompt, greedy(5), feed, 1))
    ar.wait_asleep()
    requests = ar.engine._engine._core.scheduler.requests.values()
    assert [r.trace_headers for r in requests] == [{"traceparent": "00-1-2-01"}, None]
    ar.put(AbortRequest("a"), AbortRequest("b"))
    ar.wait_asleep()


def test_capacity(ar):
    assert ar.engine.capacity == 4


def test_a_duplicate_id_of_a_running_request(ar, feed):
    prompts = random_prompts(8, 9)
    ar.put(first_part("a", prompts[0], greedy(5), feed, 1))
    ar.put(whole("a", prompts[1], greedy(5)))
    ar.wait_asleep()
    (error,) = ar.items.pop("a")
    assert isinstance(error, Error) and error.invalid
    ar.put(chunk("a", is_last=True))
    (output,) = ar.finish("a")
    assert output.prompt_token_ids == prompts[0]


def expected_without_feed(running: RunningEngine, prompt: list[int]) -> list[int]:
    running.put(whole("plain", prompt, greedy(30)))
    (output,) = running.finish("plain")
    return output.completions[0].token_ids


@pytest.mark.parametrize(("is_eager", "compiles"), [(True, False), (False, True)])
def test_whether_it_compiles_is_known_before_it_starts(tiny_qwen3: Path, is_eager: bool, compiles: bool) -> None:
    engine = LLMStageEngine(Outbox(), 0, str(tiny_qwen3), "ar", {"enforce_eager": is_eager})
    assert engine.compiles_at_start() is compiles
