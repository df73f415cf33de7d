# SPDX-License-Identifier: Apache-2.0
"""Writes what the authors' `qwen-tts` makes of the tiny checkpoints, greedily, in float32.

It needs transformers 4.57, so an environment of its own; the checkpoints are written by ours:

    for kind in qwen3_tts qwen3_tts_design qwen3_tts_base; do for size in default large; do
        python -m vllm_omni.testing.tiny_checkpoints $kind CHECKPOINTS/$kind-$size --size $size; done; done
    python -m venv QWEN_TTS
    QWEN_TTS/bin/pip install torch==2.13.0 transformers==4.57.3 accelerate einops librosa soundfile
    QWEN_TTS/bin/pip install --no-deps qwen-tts==0.1.1
    QWEN_TTS/bin/python tests/model_executor/models/qwen3_tts/make_fixtures.py CHECKPOINTS OUTPUT

The package imports sox, onnxruntime and torchaudio for another codec: they are replaced by empty modules here.
"""

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from prompts import MAX_FRAMES, PROMPTS, RATE, sound
from safetensors.torch import save_file

AUDIO_STEP = 61
"""Every 61st sample is kept: a prime, so that all positions of a frame occur."""
LONG_FRAMES = 330
"""More than the reference decodes at once."""


def import_reference() -> Any:
    for name in ("sox", "onnxruntime", "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi"):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module
    import qwen_tts

    return qwen_tts.Qwen3TTSModel


def main(checkpoints: str, output: str, sizes: str = "default,large") -> None:
    torch.set_num_threads(1)
    reference = import_reference()
    Path(output).mkdir(parents=True, exist_ok=True)
    for size in sizes.split(","):
        tensors: dict[str, torch.Tensor] = {}
        for kind in PROMPTS:
            model = reference.from_pretrained(f"{checkpoints}/{kind}-{size}", dtype=torch.float32, device_map="cpu")
            for name, prompt in PROMPTS[kind].items():
                speech = speak(model, prompt)
                print(size, kind, name, tuple(speech["codes"].shape), flush=True)
                tensors |= {f"{kind}/{name}/{part}": tensor for part, tensor in speech.items()}
        tensors |= run_parts(model)  # of the last kind, base, which alone has an encoder of speakers
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{output}/{size}.safetensors")


@torch.inference_mode()
def speak(model: Any, prompt: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`codes` int16 `[frames, groups]`, `ref_codes` of a sound, and each `AUDIO_STEP`th sample of `audio`."""
    fields = dict(prompt["additional_information"])
    if "ref_audio" in fields:
        samples, rate = fields["ref_audio"]
        fields["ref_audio"] = (samples.numpy(), rate)
    kind = model.model.tts_model_type
    generate = {"custom_voice": "custom_voice", "voice_design": "voice_design", "base": "voice_clone"}[kind]
    if kind == "voice_design":
        fields.setdefault("instruct", "")
    made: dict[str, torch.Tensor] = {}
    talker, decode = model.model.generate, model.model.speech_tokenizer.decode

    def keep_codes(**kwargs: Any) -> Any:
        codes, states = talker(**kwargs)
        made["codes"] = codes[0].to(torch.int16)
        return codes, states

    def keep_all_codes(frames: Any) -> Any:
        before = len(frames[0]["audio_codes"]) - len(made["codes"])
        if before:
            made["ref_codes"] = frames[0]["audio_codes"][:before].to(torch.int16)
        return decode(frames)

    model.model.generate, model.model.speech_tokenizer.decode = keep_codes, keep_all_codes
    try:
        waves, rate = getattr(model, f"generate_{generate}")(
            text=prompt["prompt"],
            **fields,
            do_sample=False,
            subtalker_dosample=False,
            max_new_tokens=MAX_FRAMES + 1,
        )
    finally:
        model.model.generate, model.model.speech_tokenizer.decode = talker, decode
    assert rate == RATE and len(waves[0]) == 1920 * len(made["codes"])
    made["audio"] = torch.from_numpy(waves[0][::AUDIO_STEP].copy())
    return made


@torch.inference_mode()
def run_parts(model: Any) -> dict[str, torch.Tensor]:
    """The codec and the encoders alone: long speech in one decode, and sounds of any length."""
    codec = model.model.speech_tokenizer.model
    config = codec.config.decoder_config
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(config.codebook_size, (LONG_FRAMES, config.num_quantizers), generator=generator)
    wave = codec.decoder(codes.T[None])[0, 0]
    tensors = {"parts/codes": codes.to(torch.int16), "parts/audio": wave[::AUDIO_STEP].clone()}
    for seconds in (0.054, 0.5, 2.34, 5.0):
        samples, rate = sound(seconds, 7)
        encoded = codec.encode(
            samples[None], torch.ones(1, len(samples), dtype=torch.int64), return_dict=True
        ).audio_codes[0]
        tensors[f"parts/codes of {seconds}"] = encoded.to(torch.int16)
        tensors[f"parts/vector of {seconds}"] = model.model.extract_speaker_embedding(samples.numpy(), rate)
    return tensors


if __name__ == "__main__":
    main(*sys.argv[1:])
