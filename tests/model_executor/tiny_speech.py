# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of transformers' speech classes with few random weights, and their sounds by transformers alone."""

import json
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers.models.bark import generation_configuration_bark as bark

from vllm_omni.testing.tiny.csm import SIZES, codec_config, fill_codec

Config = dict[str, Any]

TEXTS = ("a quiet sea.", "the wind is in the trees, and it is late.", "yes.")


@cache
def load(name: str, path: Path) -> Any:
    """A model, or what encodes its inputs, of transformers."""
    loaded = getattr(hf, name).from_pretrained(path)
    return loaded.eval() if isinstance(loaded, torch.nn.Module) else loaded


def write_vits(path: Path, **config: Any) -> None:
    vocabulary = {letter: index for index, letter in enumerate(["_", "<unk>", *" abcdefghijklmnopqrstuvwxyz.,'"])}
    sizes: Config = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32, "flow_size": 16,
        "spectrogram_bins": 9, "upsample_initial_channel": 16, "upsample_rates": [4, 4],
        "upsample_kernel_sizes": [8, 8], "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]],
        "duration_predictor_filter_channels": 16, "prior_encoder_num_flows": 2, "duration_predictor_num_flows": 2,
        "posterior_encoder_num_wavenet_layers": 2, "prior_encoder_num_wavenet_layers": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    model = hf.VitsModel(hf.VitsConfig(**(sizes | config), vocab_size=len(vocabulary)))
    model.save_pretrained(path)
    (path / "vocab.json").write_text(json.dumps(vocabulary))
    tokenizer = hf.VitsTokenizer(str(path / "vocab.json"), pad_token="_", phonemize=False, is_uroman=False)
    tokenizer.save_pretrained(path)


def vits_sound(path: Path, text: str, seed: int = 0, **options: Any) -> torch.Tensor:
    model, tokenizer = load("VitsModel", path), load("AutoTokenizer", path)
    torch.manual_seed(seed)
    with torch.inference_mode():
        return model(**tokenizer(text, return_tensors="pt"), **options).waveform[0]


def write_tokenizer(path: Path, *, eos: bool = False, **config: Any) -> Any:
    """One that reads letters."""
    vocabulary = {
        token: index for index, token in enumerate(["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz.,"])
    }
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.normalizer = normalizers.Lowercase()
    letters.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    )
    if eos:
        letters.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", **config
    )
    tokenizer.save_pretrained(path)
    return tokenizer


HIFIGAN: Config = {
    "model_in_dim": 8, "upsample_initial_channel": 8, "upsample_rates": [4, 4], "upsample_kernel_sizes": [8, 8],
    "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]], "initializer_range": 0.3,
}  # fmt: skip


def write_fastspeech2(path: Path) -> None:
    torch.manual_seed(0)
    own = hf.FastSpeech2ConformerConfig(
        hidden_size=16, vocab_size=32, num_mel_bins=8, encoder_layers=1, decoder_layers=1, encoder_linear_units=16,
        decoder_linear_units=16, speech_decoder_postnet_layers=2, speech_decoder_postnet_units=8,
        duration_predictor_channels=8, energy_predictor_channels=8, pitch_predictor_channels=8,
    )  # fmt: skip
    config = hf.FastSpeech2ConformerWithHifiGanConfig(
        model_config=own.to_dict(), vocoder_config=hf.FastSpeech2ConformerHifiGanConfig(**HIFIGAN).to_dict()
    )
    model = hf.FastSpeech2ConformerWithHifiGan(config)
    model.model.duration_predictor.linear.bias.data.fill_(1.0)  # Else all durations are 0.
    model.save_pretrained(path)
    write_tokenizer(path)


def fastspeech2_sound(path: Path, text: str, seed: int = 0) -> torch.Tensor:
    model, tokenizer = load("FastSpeech2ConformerWithHifiGan", path), load("AutoTokenizer", path)
    with torch.inference_mode():
        return model(tokenizer(text, return_tensors="pt")["input_ids"]).waveform[0]


def write_speecht5(path: Path) -> None:
    torch.manual_seed(0)
    config = hf.SpeechT5Config(
        vocab_size=32, hidden_size=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=8, speaker_embedding_dim=4,
        speech_decoder_prenet_units=8, speech_decoder_postnet_layers=2, speech_decoder_postnet_units=8,
    )  # fmt: skip
    model = hf.SpeechT5ForTextToSpeech(config)
    model.speech_decoder_postnet.prob_out.bias.data.fill_(-2.0)  # Else it ends at once.
    model.save_pretrained(path)
    hf.SpeechT5HifiGan(hf.SpeechT5HifiGanConfig(**HIFIGAN)).save_pretrained(path / "vocoder")
    write_tokenizer(path, eos=True)
    (path / "voices").mkdir()
    for index, name in enumerate(("ann", "bob")):
        np.save(path / "voices" / f"{name}.npy", np.full(4, 0.5 - index, np.float32))


def speecht5_sound(path: Path, text: str, seed: int = 0) -> torch.Tensor:
    model, vocoder = load("SpeechT5ForTextToSpeech", path), load("SpeechT5HifiGan", path / "vocoder")
    ids = load("AutoTokenizer", path)(text, return_tensors="pt")["input_ids"]
    torch.manual_seed(seed)
    with torch.inference_mode():
        return model.generate_speech(ids, torch.full((1, 4), 0.5), vocoder=vocoder)


def fill_codebooks(model: torch.nn.Module) -> None:
    """A new codec's are all zeros, and so is its sound."""
    for name, buffer in model.named_buffers():
        if name.endswith(".embed"):
            buffer.normal_()


ENCODEC: Config = {"hidden_size": 8, "num_filters": 4, "codebook_size": 1024, "num_lstm_layers": 1}


def write_bark(path: Path) -> None:
    torch.manual_seed(0)
    sizes: Config = {"num_layers": 1, "num_heads": 2, "hidden_size": 16, "initializer_range": 0.3}
    semantic = hf.BarkSemanticConfig(**sizes, input_vocab_size=129_600, output_vocab_size=10_048)
    coarse = hf.BarkCoarseConfig(**sizes, input_vocab_size=12_096, output_vocab_size=12_096)
    fine = hf.BarkFineConfig(**sizes, input_vocab_size=1056, output_vocab_size=1056)
    config = hf.BarkConfig(
        semantic_config=semantic.to_dict(),
        coarse_acoustics_config=coarse.to_dict(),
        fine_acoustics_config=fine.to_dict(),
        codec_config=hf.EncodecConfig(**ENCODEC).to_dict(),
    )
    model = hf.BarkModel(config)
    fill_codebooks(model)
    model.save_pretrained(path)
    generation = bark.BarkGenerationConfig.from_sub_model_configs(
        bark.BarkSemanticGenerationConfig(max_new_tokens=6),
        bark.BarkCoarseGenerationConfig(),
        bark.BarkFineGenerationConfig(),
    )
    (path / "generation_config.json").write_text(json.dumps(generation.to_dict()))
    tokenizer = write_tokenizer(path)
    hf.BarkProcessor(tokenizer).save_pretrained(path)


def bark_sound(path: Path, text: str, seed: int = 0) -> torch.Tensor:
    model, processor = load("BarkModel", path), load("AutoProcessor", path)
    inputs = processor(text)
    torch.manual_seed(seed)
    with torch.inference_mode():
        return model.generate(**inputs)[0]


def write_music(path: Path, kind: str, length: int = 20, **config: Any) -> None:
    torch.manual_seed(0)
    text = hf.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    sizes = {"vocab_size": 64, "num_hidden_layers": 1, "ffn_dim": 16, "num_attention_heads": 2, "hidden_size": 16}
    codes = {"num_codebooks": 2, "pad_token_id": 64, "bos_token_id": 64, "initializer_factor": 0.3}
    codec = hf.EncodecConfig(**{**ENCODEC, "codebook_size": 64}, target_bandwidths=[0.9])
    decoder = getattr(hf, f"{kind}DecoderConfig")(**(sizes | config), **codes)
    config = getattr(hf, f"{kind}Config")(
        text_encoder=text.to_dict(), audio_encoder=codec.to_dict(), decoder=decoder.to_dict()
    )
    model = getattr(hf, f"{kind}ForConditionalGeneration")(config)
    fill_codebooks(model)
    tokens = {"decoder_start_token_id": 64, "bos_token_id": 64, "pad_token_id": 64}
    model.generation_config = hf.GenerationConfig(do_sample=True, guidance_scale=3.0, max_length=length, **tokens)
    model.save_pretrained(path)
    write_tokenizer(path, eos=True)


def music_sound(path: Path, text: str, seed: int = 0, kind: str = "Musicgen", **heard: Any) -> torch.Tensor:
    """`heard`: What the model reads of a recording."""
    model = load(f"{kind}ForConditionalGeneration", path)
    inputs = load("AutoTokenizer", path)(text, return_tensors="pt")
    ids = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    torch.manual_seed(seed)
    with torch.inference_mode():
        return model.generate(**ids, **heard)[0, 0]


def write_dia(path: Path) -> None:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 16}
    cross = {"cross_num_attention_heads": 2, "cross_head_dim": 8, "cross_num_key_value_heads": 2}
    common = {"num_hidden_layers": 1, "hidden_size": 16, "initializer_range": 0.3}
    config = hf.DiaConfig(
        encoder_config={**common, **heads}, decoder_config={**common, **heads, **cross, "cross_hidden_size": 16}
    )
    model = hf.DiaForConditionalGeneration(config)
    model.generation_config = hf.GenerationConfig(
        do_sample=True, guidance_scale=3.0, max_length=40, bos_token_id=1026, eos_token_id=1024, pad_token_id=1025
    )
    model.save_pretrained(path)
    codec = hf.DacModel(hf.DacConfig(encoder_hidden_size=4, decoder_hidden_size=32, sampling_rate=44100))
    for parameter in codec.decoder.parameters():
        parameter.data.mul_(3)  # Else it is nearly silent.
    codec.save_pretrained(path / "codec")
    codec = hf.DacModel.from_pretrained(path / "codec")
    hf.DiaProcessor(
        hf.DiaFeatureExtractor(sampling_rate=44100), hf.DiaTokenizer(), audio_tokenizer=codec
    ).save_pretrained(path)


def dia_sound(path: Path, text: str, seed: int = 0, **heard: Any) -> torch.Tensor:
    """`heard`: `audio` and its `sampling_rate`, a recording of the voice."""
    model, processor = load("DiaForConditionalGeneration", path), load("AutoProcessor", path)
    torch.manual_seed(seed)
    with torch.inference_mode():
        inputs = processor(text=[f"[S1] {text}"], return_tensors="pt", **heard)
        before = processor.get_audio_prompt_len(inputs["decoder_attention_mask"]) if heard else None
        return processor.batch_decode(model.generate(**inputs), audio_prompt_len=before)[0]


def write_seamless(path: Path, version: str = "", seed: int = 0) -> None:
    torch.manual_seed(seed)
    letters = ["<pad>", "<unk>", "<s>", "</s>", "\u2581", *"abcdefghijklmnopqrstuvwxyz.,", "__eng__", "__deu__"]
    vocabulary = {token: index for index, token in enumerate(letters)}
    own = {"t2u_variance_predictor_embed_dim": 16, "t2u_variance_predictor_hidden_dim": 16} if version else {}
    config = getattr(hf, f"SeamlessM4T{version}Config")(
        **own, vocab_size=len(vocabulary), t2u_vocab_size=40, hidden_size=16, encoder_layers=1, decoder_layers=1,
        encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2,
        speech_encoder_layers=1, speech_encoder_attention_heads=2, speech_encoder_intermediate_size=16,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, conv_depthwise_kernel_size=3,
        t2u_encoder_layers=1, t2u_decoder_layers=1, t2u_encoder_ffn_dim=16, t2u_decoder_ffn_dim=16,
        t2u_encoder_attention_heads=2, t2u_decoder_attention_heads=2, upsample_initial_channel=8,
        upsample_rates=[4, 4], upsample_kernel_sizes=[8, 8], resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]], unit_hifi_gan_vocab_size=40, unit_embed_dim=8, lang_embed_dim=8,
        spkr_embed_dim=8, vocoder_num_langs=2, vocoder_num_spkrs=3, initializer_range=0.3, t2u_max_new_tokens=12,
    )  # fmt: skip
    model = getattr(hf, f"SeamlessM4T{version}Model")(config)
    text, units, sounds = ({"deu": a, "eng": b} for a, b in ((34, 33), (38, 37), (1, 0)))
    tables = {"text_decoder_lang_to_code_id": text, "t2u_lang_code_to_id": units, "vocoder_lang_code_to_id": sounds}
    tokens = {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 3}
    if version:
        tables["char_to_id"] = vocabulary
        tables["id_to_text"] = {str(index): token for token, index in vocabulary.items()}
    model.generation_config = hf.GenerationConfig(max_new_tokens=8, **tokens, **tables)
    model.save_pretrained(path)
    tokenizer = hf.SeamlessM4TTokenizer(
        vocab=vocabulary, additional_special_tokens=["__eng__", "__deu__"], src_lang="eng", tgt_lang="deu"
    )
    hf.SeamlessM4TProcessor(hf.SeamlessM4TFeatureExtractor(), tokenizer).save_pretrained(path)


def seamless_sound(path: Path, text: str, seed: int = 0, version: str = "") -> torch.Tensor:
    model = load(f"SeamlessM4T{version}Model", path)
    inputs = load("AutoProcessor", path)(text=[text], src_lang="eng", return_tensors="pt")
    torch.manual_seed(seed)
    with torch.inference_mode():
        waveform, lengths = model.generate(**inputs, tgt_lang="eng")
    return waveform[0, : int(lengths)]


CHROMA = {"feature_extractor_type": "MusicgenMelodyFeatureExtractor", "sampling_rate": 32_000, "chunk_length": 30}
"""What a MusicGen Melody that reads recordings has in its `preprocessor_config.json`."""


def write_moshi(path: Path) -> None:
    torch.manual_seed(0)
    layers: Config = {"num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32, "initializer_range": 0.3}
    codec = codec_config(SIZES["default"])
    codes: Config = {"num_codebooks": 2, "vocab_size": 40}
    depth = {**layers, "hidden_size": 16, "max_position_embeddings": 3, "sliding_window": 2}
    config = hf.MoshiConfig(**layers, **codes, hidden_size=32, audio_encoder_config=codec, depth_decoder_config=depth)
    model = hf.MoshiForConditionalGeneration(config)
    fill_codec(model.audio_encoder, 0)
    model.generation_config = hf.GenerationConfig(do_sample=True)
    model.save_pretrained(path)
    write_tokenizer(path)
    hf.EncodecFeatureExtractor(feature_size=1, sampling_rate=24_000).save_pretrained(path)


def moshi_sound(path: Path, heard: np.ndarray, num_frames: int, seed: int = 0) -> torch.Tensor:
    """As its page in transformers has it: it was silent while somebody spoke, at 24,000 samples per second."""
    model = load("MoshiForConditionalGeneration", path)
    sound = load("AutoFeatureExtractor", path)(heard, sampling_rate=24_000, return_tensors="pt")["input_values"]
    before = math.ceil(sound.shape[-1] * 12.5 / 24_000)
    silent = torch.ones((1, before), dtype=torch.int64) * load("AutoTokenizer", path).encode("<pad>")[0]
    inputs = {"input_ids": silent, "user_input_values": sound, "moshi_input_values": torch.zeros_like(sound)}
    torch.manual_seed(seed)
    with torch.inference_mode():
        return model.generate(**inputs, max_new_tokens=num_frames).audio_sequences[0, 0, before * 1920 :]


WRITERS: dict[str, Callable[[Path], None]] = {
    "vits": write_vits,
    "fastspeech2": write_fastspeech2,
    "speecht5": write_speecht5,
    "bark": write_bark,
    "dia": write_dia,
    "seamless_m4t": write_seamless,
    "seamless_m4t_v2": partial(write_seamless, version="v2"),
    "musicgen": partial(write_music, kind="Musicgen"),
    "musicgen_melody": partial(write_music, kind="MusicgenMelody"),
}
SOUNDS: dict[str, Callable[[Path, str, int], torch.Tensor]] = {
    "vits": vits_sound,
    "fastspeech2": fastspeech2_sound,
    "speecht5": speecht5_sound,
    "bark": bark_sound,
    "dia": dia_sound,
    "seamless_m4t": seamless_sound,
    "seamless_m4t_v2": partial(seamless_sound, version="v2"),
    "musicgen": music_sound,
    "musicgen_melody": partial(music_sound, kind="MusicgenMelody"),
}
