# SPDX-License-Identifier: Apache-2.0
"""A tiny `WhisperForConditionalGeneration`: speech in, its text out, with times."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from vllm_omni.testing.tiny.tokenizer import PUNCTUATION, WORDS, byte_vocabulary
from vllm_omni.testing.tiny.weights import fill_random

CLIP_S = 4
"""Length of the sound that is read at once, in seconds: 30 in the real models, whose steps take longer."""

SIZES: dict[str, dict[str, Any]] = {
    "default": {"d_model": 64, "heads": 2, "layers": 2},
    "large": {"d_model": 256, "heads": 4, "layers": 4},
}
LAYER_GAIN = 8.0
NUM_MEL_BINS = 80
_FRAMES_S, _TIME_STEP_S = 100, 0.02
_LIVE_SCALE, _DEAD_SCALE = 1.5, 0.1


def write(path: Path, seed: int, size: str) -> None:
    """Writes the whole checkpoint into the empty folder `path`."""
    tokenizer = make_tokenizer()
    vocab = tokenizer.get_vocab()
    end, start = vocab["<|endoftext|>"], vocab["<|startoftranscript|>"]
    own = SIZES[size]
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", own["layers"]),
            ("attention_heads", own["heads"]),
            ("ffn_dim", 2 * own["d_model"]),
        )
    }
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=NUM_MEL_BINS,
        d_model=own["d_model"],
        max_source_positions=CLIP_S * _FRAMES_S // 2,
        max_target_positions=128,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=start,
        dtype="float32",
        **sides,
    )
    model = WhisperForConditionalGeneration(config)
    positions = model.model.encoder.embed_positions.weight.detach().clone()
    fill_random(model, seed, LAYER_GAIN)
    _limit_answers(model, tokenizer)
    with torch.no_grad():
        model.model.encoder.embed_positions.weight.copy_(positions)  # They are computed, not trained.
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, decoder_start_token_id=start)
    model.save_pretrained(path)
    extractor = WhisperFeatureExtractor(feature_size=NUM_MEL_BINS, chunk_length=CLIP_S)
    WhisperProcessor(extractor, tokenizer).save_pretrained(path)


def make_tokenizer() -> WhisperTokenizer:
    """Bytes and words, then Whisper's special tokens in the order of the real one; times are its last."""
    vocab, merges = byte_vocabulary()
    tokenizer = WhisperTokenizer(vocab=vocab, merges=merges, pad_token="<|endoftext|>")
    names = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)]
    names += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    times = [f"<|{step * _TIME_STEP_S:.2f}|>" for step in range(round(CLIP_S / _TIME_STEP_S) + 1)]
    tokenizer.add_tokens([AddedToken(time, special=False, normalized=False) for time in times])
    return tokenizer


@torch.no_grad()
def _limit_answers(model: WhisperForConditionalGeneration, tokenizer: WhisperTokenizer) -> None:
    """Makes words, punctuation, a few times and the end likely, all else unlikely. The head is the embedding."""
    vocab = tokenizer.get_vocab()
    texts = [*(f" {word}" for word in WORDS), *PUNCTUATION, "<|0.40|>", "<|1.20|>", "<|endoftext|>"]
    live = [vocab[tokenizer.tokenize(text)[0]] for text in texts]
    weight: torch.Tensor = model.model.decoder.embed_tokens.weight
    scale = torch.full((len(weight), 1), _DEAD_SCALE)
    scale[live] = _LIVE_SCALE
    weight *= scale
