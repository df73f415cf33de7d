# SPDX-License-Identifier: Apache-2.0
"""The vocoder against HF's `chunked_decode`, request by request, whatever else is in the batch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from vllm.sampling_params import SamplingParams

from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.model_executor.models.qwen3_omni_moe.code2wav import (
    CHUNK_FRAMES,
    CONTEXT_FRAMES,
    Chunk,
    OmniQwen3OmniMoeCode2Wav,
    group_by_length,
    split_into_chunks,
)
from vllm_omni.testing.hf_oracle import HFOracle

from .helpers import Case, run_engine

LENGTHS = [1, 2, 40, 0, 45, CHUNK_FRAMES + 1]


@pytest.fixture(scope="module")
def vocoder(oracle: HFOracle, config: PretrainedConfig) -> OmniQwen3OmniMoeCode2Wav:
    vllm_config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=config.code2wav_config))
    vocoder = OmniQwen3OmniMoeCode2Wav(vllm_config=vllm_config)
    loaded = vocoder.load_weights(oracle.model.named_parameters())
    assert loaded == {name for name, _ in vocoder.named_parameters()}
    return vocoder


def random_codes(length: int, config: PretrainedConfig) -> torch.Tensor:
    """`[length, num_code_groups]`"""
    sizes = config.code2wav_config
    return torch.randint(
        sizes.codebook_size, (length, sizes.num_quantizers), generator=torch.Generator().manual_seed(length)
    )


@torch.inference_mode()
@pytest.mark.parametrize("max_batch_frames", [1, 10_000])
def test_every_request_of_a_batch_equals_hf(
    max_batch_frames: int, vocoder: OmniQwen3OmniMoeCode2Wav, oracle: HFOracle, config: PretrainedConfig
) -> None:
    codes = [random_codes(length, config) for length in LENGTHS]
    vocoder.max_batch_frames = max_batch_frames
    ids = torch.empty(0)
    outputs = vocoder(ids, ids, runtime_additional_information=[{"codes": c} for c in codes])
    for length, c, output in zip(LENGTHS, codes, outputs, strict=True):
        audio = output["audio"]
        assert audio.dtype == torch.float32
        expected = oracle.model.code2wav.chunked_decode(c.T[None])[0, 0] if length else torch.empty(0)
        assert audio.shape == expected.shape
        torch.testing.assert_close(audio, expected, rtol=0, atol=1e-4)


def test_the_number_of_samples_of_a_decode_is_known(vocoder: OmniQwen3OmniMoeCode2Wav) -> None:
    assert vocoder.num_samples(100) == 100 * 1920 - 555


def test_chunks_are_the_reference_s() -> None:
    codes = torch.arange(700)[None]
    chunks = list(split_into_chunks(3, codes))
    assert [chunk.context for chunk in chunks] == [0, CONTEXT_FRAMES, CONTEXT_FRAMES]
    assert torch.equal(torch.cat([chunk.codes[0, chunk.context :] for chunk in chunks]), codes[0])
    assert {chunk.request for chunk in chunks} == {3}


def test_batches_hold_every_chunk_once_and_little_padding() -> None:
    lengths = [5, 300, 41, 299, 38, 5, 40, 325, 6]
    chunks = [Chunk(i, torch.zeros(4, length, dtype=torch.int64), 0) for i, length in enumerate(lengths)]
    batches = list(group_by_length(chunks, max_frames=700))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        sizes = [lengths[index] for index in batch]
        assert max(sizes) * len(sizes) <= 700
        assert min(sizes) >= 0.8 * max(sizes)
    assert len(batches) == 4


def test_the_engine_gives_the_oracle_s_waveforms(code2wav_engine: OmniLLMEngine, cases: dict[str, Case]) -> None:
    prompts = {
        name: {
            "prompt_token_ids": [0] * case.expected.codes.shape[1],
            "additional_information": {"codes": case.expected.codes.T},
        }
        for name, case in cases.items()
    }
    outputs = run_engine(code2wav_engine, prompts, SamplingParams(max_tokens=1, detokenize=False))
    for name, case in cases.items():
        audio = outputs[name].multimodal_output["audio"]  # type: ignore[attr-defined]
        torch.testing.assert_close(audio, case.expected.audio, rtol=0, atol=1e-4)
