# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with `revision`: nothing is read from the revision `main`."""

from pathlib import Path

import pytest
import torch

from tests.hub_cache import NAME, HubCache
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.entrypoints.request_builder import RequestBuilder
from vllm_omni.entrypoints.resolve import resolve_pipeline
from vllm_omni.model_executor.stage_input_processor import load_stage_input_processor


def test_voices_are_those_of_the_revision(
    tiny_qwen2_5_omni: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = HubCache(tmp_path, monkeypatch)
    cache.add(tiny_qwen2_5_omni, "main")
    file = cache.add(tiny_qwen2_5_omni, "v2") / "spk_dict.pt"
    (voice, *_) = torch.load(file, weights_only=True).values()
    torch.save({"Ada": voice}, file)
    engine_args = {"revision": "v2", "max_model_len": 2048, "dtype": "float32"}

    resolved = resolve_pipeline(OmniArgs(model=NAME, engine_args=engine_args))

    assert RequestBuilder(resolved.config, NAME).voices == ["ada"]
    for stage in resolved.config.stage_args[1:]:
        processor = load_stage_input_processor(stage, NAME)  # as in the stage's process
        assert processor is not None and processor.voices in (("ada",), ())
