# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks' figures depend on. That the programs run is tested elsewhere (`tests/test_programs.py`)."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput

from benchmarks.report import mean, percentile, underrun
from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.events import ARSegmentEvent
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput

pytestmark = pytest.mark.slow

ImportBenchmark = Callable[[str], ModuleType]


def test_statistics() -> None:
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert [percentile(range(1, 101), percent) for percent in (0, 50, 95, 100)] == [1, 50, 95, 100]
    assert percentile([3.0], 95) == 3.0


def test_an_underrun_is_silence_after_the_first_sound() -> None:
    assert underrun([(3.0, 1.0), (3.5, 1.0)]) == 0
    assert underrun([(3.0, 1.0), (4.5, 1.0), (6.0, 1.0)]) == pytest.approx(0.5 + 0.5)


def test_sound_is_in_time_if_it_arrives_before_it_would_be_played(import_benchmark: ImportBenchmark) -> None:
    response = import_benchmark("voice").Response([(0.5, 1.0), (1.5, 2.0), (5.5, 2.0)])  # played from 1, 2 and 4 on
    assert response.seconds_in_time(patience=1.0) == pytest.approx(1.0 + 2.0 + 0.5)
    assert response.seconds_in_time(patience=10.0) == response.seconds == 5.0
    assert response.seconds_in_time(patience=0.0) == pytest.approx(0.5 + 1.5)


def test_a_server_without_concurrency_has_a_queue(import_benchmark: ImportBenchmark) -> None:
    voice = import_benchmark("voice")
    plan = voice.Plan(["a", "b"], patience=2.0, seconds=0, num_rounds=1)
    alone = [voice.Response([(1.0, 3.0)], ended=2.0), voice.Response([(1.0, 3.0)], ended=4.0)]
    rare = plan.one_after_the_other(alone, 1e-6, seed=0)
    assert [response.pieces for response in rare] == [[(1.0, 3.0)]] * 8 and plan.share_continuous(rare) == 1
    at_once = plan.one_after_the_other(alone, 1e6, seed=0)
    waits = [response.first_sound - 1.0 for response in at_once]
    assert waits == pytest.approx([0, 2, 6, 8, 12, 14, 18, 20], abs=1e-3)
    assert plan.share_continuous(at_once) == 1 / 8


@pytest.mark.parametrize("limit", [0.03, 0.2, 0.33, 5.0])
def test_the_rate_is_the_highest_that_is_kept(import_benchmark: ImportBenchmark, limit: float) -> None:
    voice = import_benchmark("voice")
    tried = []

    def is_kept(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = voice.find_rate(is_kept)
    assert found <= limit < found * 2 ** (1 / 2**voice.NUM_HALVINGS) * 1.001
    assert len(tried) < 10


class FakeLLM:
    """Two tokens, then a second of speech."""

    async def generate(self, prompt: dict[str, Any], params: list[Any]) -> AsyncIterator[ARSegmentEvent]:
        self.prompt, self.params = prompt, params
        common = {"request_id": "r", "sequence": 0, "ts": 0.0}
        for tokens in ([1], [2]):
            yield ARSegmentEvent(**common, stage_id=0, final_output_type="text", tokens=tokens)
        for _ in range(2):
            audio = {"audio": torch.zeros(12_000)}
            yield ARSegmentEvent(**common, stage_id=2, final_output_type="audio", multimodal_output=audio)


def test_the_direct_backend_measures_as_the_one_of_servers(
    import_benchmark: ImportBenchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = import_benchmark("serve")
    monkeypatch.setattr(serve, "AutoProcessor", SimpleNamespace(from_pretrained=lambda model: SimpleNamespace()))
    llm = FakeLLM()
    backend = serve.DirectBackend(llm, Path("model"))
    backend._processor.apply_chat_template = lambda chat, **_: f"<{chat[0]['content'][0]['text']}>"
    body = {"modalities": ["text", "audio"], "sampling_params_list": [None, {"max_tokens": 9}, None]}
    request = RequestFuncInput("Hi", "", 3, 16, "model", extra_body=body)

    output = asyncio.run(backend.request(request_func_input=request, session=None))

    assert output.success and output.output_tokens == 2 and output.audio_duration == 1.0
    assert 0 < output.ttft <= output.text_latency <= output.ttfa <= output.latency
    assert llm.prompt == {"prompt": "<Hi>", "modalities": ["text", "audio"]}
    assert llm.params == [{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}, {"max_tokens": 9}, None]


def test_a_hop_is_timed_from_function_to_function_and_includes_the_mapping_of_memory(
    import_benchmark: ImportBenchmark,
) -> None:
    stages = import_benchmark("runtime_stages")
    request = StageRequest(request_id="r", options={"num_bytes": 1 << 20})
    sent = stages.send(request, {})
    time.sleep(0.05)
    source = StageOutput(request_id="r", stage_id=0, tensors={"payload": sent["payload"]}, data={"sent": sent["sent"]})
    assert torch.equal(sent["payload"], torch.ones(1 << 20, dtype=torch.uint8))
    assert float(stages.receive(request, {0: source})["text"]) >= 0.05


def test_six_stages_are_twice_the_three(import_benchmark: ImportBenchmark, tmp_path: Path) -> None:
    config = load_pipeline_config(import_benchmark("runtime").write_doubled_config(tmp_path))
    assert [stage.engine_input_source for stage in config.stage_args] == [[], [0], [1], [], [3], [4]]
    assert [stage.name for stage in config.stage_args[3:]] == ["thinker_2", "talker_2", "code2wav_2"]


def test_a_round_trip_is_one_between_two_processes(import_benchmark: ImportBenchmark, tmp_path: Path) -> None:
    with import_benchmark("runtime").round_trips(tmp_path) as round_trip:
        assert all(round_trip() > 0 for _ in range(5))
