# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of transformers' classes that transcribe, with few random weights, and their texts by transformers
alone."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models

RATE = 16_000
LETTERS = [*"abcdefghijklmnopqrstuvwxyz'"]


def make_sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Noise whose loudness and colour change, with quiet parts."""
    generator = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    tone = np.sin(2 * np.pi * time * (200 + 150 * np.sin(3 * time + seed)))
    loudness = np.clip(np.sin(2 * np.pi * 1.3 * time), 0, 1)
    return (loudness * (0.5 * tone + 0.2 * generator.standard_normal(len(time)))).astype(np.float32)


SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "conv_dim": [8, 8, 8], "conv_kernel": [10, 8, 4], "conv_stride": [5, 8, 8], "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "initializer_range": 0.5,
}  # fmt: skip


def spread(layer: torch.nn.Module) -> None:
    """Different tokens win: random weights write one token again and again."""
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=3.0)


def write_ctc(path: Path, kind: str = "Wav2Vec2", *, word_end: str = "p", masks: bool = True, **config: Any) -> None:
    """One of the family of Wav2Vec2.

    Args:
        word_end: The letter in whose place is the sign between words.
        masks: Sounds of a batch have a mask, as those with `feat_extract_norm` layer have.
    """
    torch.manual_seed(1)
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", "-", *LETTERS])}
    vocabulary["|"] = vocabulary.pop(word_end)
    norm = {"feat_extract_norm": "layer", "conv_bias": True} if masks else {}
    own = getattr(hf, f"{kind}Config")(**(SIZES | norm | config), vocab_size=len(vocabulary), pad_token_id=0)
    model = getattr(hf, f"{kind}ForCTC")(own)
    spread(model.lm_head)
    model.lm_head.bias.data[1:4] -= 30  # Marks that are not spoken.
    model.save_pretrained(path)
    (path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    extractor = hf.Wav2Vec2FeatureExtractor(return_attention_mask=masks, do_normalize=True)
    tokenizer = hf.Wav2Vec2CTCTokenizer(str(path / "vocab.json"))
    hf.Wav2Vec2Processor(extractor, tokenizer).save_pretrained(path)


def ctc_text(path: Path, sound: np.ndarray) -> str:
    model, processor = hf.AutoModelForCTC.from_pretrained(path).eval(), hf.AutoProcessor.from_pretrained(path)
    with torch.inference_mode():
        logits = model(**processor(sound, sampling_rate=RATE, return_tensors="pt")).logits
    return processor.batch_decode(logits.argmax(-1))[0]


def metaspace_tokenizer(path: Path, kind: type, *, last: tuple[str, ...] = (), **special: str) -> Any:
    """One with parts of words; those that begin one start with a sign."""
    pieces = [f"\u2581{letter}" for letter in LETTERS] + LETTERS
    tokens = ["<unk>", "<pad>", "<s>", "</s>", *pieces, *last]
    own = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    own.decoder = decoders.Metaspace()
    tokenizer = kind(tokenizer_object=own, unk_token="<unk>", pad_token="<pad>", **special)
    tokenizer.add_special_tokens({"additional_special_tokens": list(last)})
    tokenizer.save_pretrained(path)
    return tokenizer


def write_parakeet(path: Path, kind: str) -> None:
    torch.manual_seed(2)
    last = () if kind == "CTC" else ("<blank>",)
    tokenizer = metaspace_tokenizer(path, hf.ParakeetTokenizer, last=last)
    encoder = hf.ParakeetEncoderConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_mel_bins=16,
        subsampling_conv_channels=8, initializer_range=1.0,
    )  # fmt: skip
    own = {"vocab_size": len(tokenizer), "pad_token_id": 1, "encoder_config": encoder.to_dict()}
    if kind != "CTC":
        own |= {"decoder_hidden_size": 16, "num_decoder_layers": 1, "blank_token_id": len(tokenizer) - 1}
        own |= {"max_symbols_per_step": 2, "initializer_range": 0.5}
    model = getattr(hf, f"ParakeetFor{kind}")(getattr(hf, f"Parakeet{kind}Config")(**own))
    if kind == "CTC":
        spread(model.ctc_head)
    else:
        spread(model.joint)
        model.generation_config = hf.GenerationConfig(decoder_start_token_id=len(tokenizer) - 1, pad_token_id=1)
        if kind == "TDT":  # What follows the vocabulary are durations.
            model.generation_config.suppress_tokens = list(range(len(tokenizer), len(tokenizer) + 5))
    model.save_pretrained(path)
    extractor = hf.ParakeetFeatureExtractor(feature_size=16)
    hf.ParakeetProcessor(extractor, tokenizer, decoder_type=kind.lower()).save_pretrained(path)


def parakeet_text(path: Path, sound: np.ndarray, kind: str) -> str:
    model = getattr(hf, f"ParakeetFor{kind}").from_pretrained(path).eval()
    processor = hf.AutoProcessor.from_pretrained(path)
    with torch.inference_mode():
        output = model.generate(**processor(sound, sampling_rate=RATE))
    tokens = output if kind == "CTC" else output.sequences
    return processor.batch_decode(tokens, skip_special_tokens=kind != "CTC")[0]


def write_moonshine(path: Path) -> None:
    torch.manual_seed(3)
    tokenizer = metaspace_tokenizer(path, hf.PreTrainedTokenizerFast, bos_token="<s>", eos_token="</s>")
    heads = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("num_hidden_layers",)}
    heads |= {f"{side}_num_attention_heads": 2 for side in ("encoder", "decoder")}
    config = hf.MoonshineConfig(
        **heads, vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, initializer_range=0.5,
        decoder_start_token_id=2, bos_token_id=2, eos_token_id=3, pad_token_id=1,
    )  # fmt: skip
    model = hf.MoonshineForConditionalGeneration(config)
    model.generation_config = hf.GenerationConfig(
        max_length=24, decoder_start_token_id=2, bos_token_id=2, eos_token_id=3, pad_token_id=1
    )
    model.save_pretrained(path)
    hf.Wav2Vec2Processor(hf.Wav2Vec2FeatureExtractor(return_attention_mask=True), tokenizer).save_pretrained(path)


def write_speech_to_text(path: Path) -> None:
    torch.manual_seed(4)
    tokenizer = metaspace_tokenizer(path, hf.PreTrainedTokenizerFast, bos_token="<s>", eos_token="</s>")
    config = hf.Speech2TextConfig(
        vocab_size=len(tokenizer), encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2, d_model=16, conv_channels=16, init_std=1.0,
        input_feat_per_channel=16, max_target_positions=30, decoder_start_token_id=3, scale_embedding=False,
    )  # fmt: skip
    model = hf.Speech2TextForConditionalGeneration(config)
    model.generation_config = hf.GenerationConfig(decoder_start_token_id=3, eos_token_id=3, pad_token_id=1)
    model.save_pretrained(path)
    extractor = hf.Speech2TextFeatureExtractor(feature_size=16, num_mel_bins=16)
    hf.Speech2TextProcessor(extractor, tokenizer).save_pretrained(path)


def generated_text(path: Path, sound: np.ndarray, kind: str, **options: Any) -> str:
    model = getattr(hf, f"{kind}ForConditionalGeneration").from_pretrained(path).eval()
    processor = hf.AutoProcessor.from_pretrained(path)
    rate = processor.feature_extractor.sampling_rate
    with torch.inference_mode():
        inputs = processor(audio=sound, sampling_rate=rate, return_tensors="pt")
        return processor.batch_decode(model.generate(**inputs, **options), skip_special_tokens=True)[0]


def write_kyutai(path: Path) -> None:
    torch.manual_seed(5)
    tokenizer = metaspace_tokenizer(path, hf.PreTrainedTokenizerFast, bos_token="<s>", eos_token="</s>")
    codec = hf.MimiConfig(
        hidden_size=16, num_filters=4, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        intermediate_size=16, codebook_size=32, codebook_dim=8, vector_quantization_hidden_dimension=8,
        num_quantizers=4, num_semantic_quantizers=1, upsample_groups=16,
    )  # fmt: skip
    config = hf.KyutaiSpeechToTextConfig(
        codebook_vocab_size=33, vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        ffn_dim=32, num_codebooks=4, audio_bos_token_id=32, audio_pad_token_id=len(tokenizer), pad_token_id=1,
        bos_token_id=2, codec_config=codec.to_dict(), initializer_range=0.5,
    )  # fmt: skip
    model = hf.KyutaiSpeechToTextForConditionalGeneration(config)
    model.save_pretrained(path)
    extractor = hf.KyutaiSpeechToTextFeatureExtractor(audio_delay_seconds=0.5, audio_silence_prefix_seconds=0.2)
    hf.KyutaiSpeechToTextProcessor(extractor, tokenizer).save_pretrained(path)


WRITERS: dict[str, Callable[[Path], None]] = {
    "wav2vec2": write_ctc,
    "wav2vec2_group_norm": partial(write_ctc, masks=False, word_end="n"),
    "hubert": partial(write_ctc, kind="Hubert", word_end="m"),
    "sew": partial(write_ctc, kind="SEW", word_end="e", squeeze_factor=2, masks=False),
    "wavlm": partial(write_ctc, kind="WavLM", word_end="t"),
    "parakeet_ctc": partial(write_parakeet, kind="CTC"),
    "parakeet_rnnt": partial(write_parakeet, kind="RNNT"),
    "parakeet_tdt": partial(write_parakeet, kind="TDT"),
    "moonshine": write_moonshine,
    "speech_to_text": write_speech_to_text,
    "kyutai_stt": write_kyutai,
}
TEXTS: dict[str, Callable[[Path, np.ndarray], str]] = {
    **dict.fromkeys(("wav2vec2", "wav2vec2_group_norm", "hubert", "sew", "wavlm"), ctc_text),
    "parakeet_ctc": partial(parakeet_text, kind="CTC"),
    "parakeet_rnnt": partial(parakeet_text, kind="RNNT"),
    "parakeet_tdt": partial(parakeet_text, kind="TDT"),
    "moonshine": partial(generated_text, kind="Moonshine"),
    "speech_to_text": partial(generated_text, kind="Speech2Text", max_new_tokens=30),
    "kyutai_stt": partial(generated_text, kind="KyutaiSpeechToText"),
}


def seamless_text(path: Path, sound: np.ndarray, version: str, language: str = "eng") -> str:
    """Of a checkpoint of `tiny_speech.write_seamless`."""
    model = getattr(hf, f"SeamlessM4T{version}Model").from_pretrained(path).eval()
    processor = hf.AutoProcessor.from_pretrained(path)
    with torch.inference_mode():
        inputs = processor(audio=sound, sampling_rate=RATE, return_tensors="pt")
        tokens = model.generate(**inputs, tgt_lang=language, generate_speech=False)
    return processor.batch_decode(getattr(tokens, "sequences", tokens), skip_special_tokens=True)[0]
