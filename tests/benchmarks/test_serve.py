# SPDX-License-Identifier: Apache-2.0
"""The backend of `benchmarks/serve.py` that calls `AsyncOmniLLM` directly."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput

from vllm_omni.events import ARSegmentEvent

pytestmark = pytest.mark.slow


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
    import_benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
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
