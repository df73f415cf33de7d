# SPDX-License-Identifier: Apache-2.0
"""The recognizers are whole: HF transformers reads them, and writes what a voice says."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from vllm_omni_talk import SAMPLE_RATE, whisper
from vllm_omni_talk.speech_recognition import resample
from vllm_omni_talk.whisper import WhisperBase, WhisperTinyEnglish

KINDS = (WhisperTinyEnglish, WhisperBase)
pytestmark = pytest.mark.skipif(
    not all(find_spec(module) for kind in KINDS for module in kind.modules), reason="their packages are not installed"
)
SENTENCE = "Water is made of hydrogen and oxygen."
RATE = 16_000


@pytest.fixture(scope="module")
def speech() -> np.ndarray:
    """Float32 `[samples]`."""
    hibari = pytest.importorskip("hibari", reason="the extra talk is not installed")
    return resample(np.concatenate(list(hibari.Hibari("heart").stream(SENTENCE))), SAMPLE_RATE, RATE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_checkpoint_is_whole(kind: type[whisper.Whisper], speech: np.ndarray, tmp_path: Path) -> None:
    made, config, whole = kind(), tmp_path / "config", tmp_path / "whole"
    made.convert_config(config)
    made.convert(whole)
    assert (config / "config.json").read_text() == (whole / "config.json").read_text()
    assert sum(path.stat().st_size for path in whole.iterdir()) < made.num_bytes

    model, processor = (
        WhisperForConditionalGeneration.from_pretrained(whole).float(),
        WhisperProcessor.from_pretrained(whole),
    )
    tokenizer = processor.tokenizer
    names = ["<|endoftext|>", "<|startoftranscript|>", "<|0.00|>", "<|30.00|>"]
    ids = tokenizer.convert_tokens_to_ids(names)
    assert ids[:2] == [model.config.eos_token_id, model.config.decoder_start_token_id]
    assert ids[3] - ids[2] == 1500 and ids[3] == model.config.vocab_size - 1 == len(tokenizer) - 1

    features = processor.feature_extractor(speech, sampling_rate=RATE, return_tensors="pt").input_features
    prompt = "<|startoftranscript|><|notimestamps|>"
    if model.generation_config.is_multilingual:
        prompt = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    written = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        heard = model.model.encoder(features)
        while written[0, -1] != model.config.eos_token_id and written.shape[1] < 32:
            token = model(encoder_outputs=heard, decoder_input_ids=written).logits[:, -1:].argmax(-1)
            written = torch.cat([written, token], dim=1)
    assert tokenizer.decode(written[0], skip_special_tokens=True).strip() == SENTENCE


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    name = b"WhisperSpec\0"
    path.write_bytes(b"\7\0\0\0" + len(name).to_bytes(2, "little") + name + b"\3\0\0\0")
    with pytest.raises(ValueError, match="WhisperSpec of revision 3 and version 7 is not known"):
        whisper._read(iter([path]))
