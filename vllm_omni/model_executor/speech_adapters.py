# SPDX-License-Identifier: Apache-2.0
"""What the declarations of transformers' speech classes do not tell, for each class: a few lines each."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoFeatureExtractor, AutoTokenizer
from transformers.utils import is_torchaudio_available, is_uroman_available

from vllm_omni.errors import InvalidRequestError, StageConfigError
from vllm_omni.model_executor.language_codes import ISO_639_3
from vllm_omni.model_executor.row_noise import RowNoise
from vllm_omni.model_executor.speech_model import SpeechModel

_MOSHI_FRAMES = 250
"""20 s: how long Moshi, which never ends by itself, speaks where a request does not say it."""


class Vits(SpeechModel):
    """Rows together: the noise of a row does not have its padding, and neither has the vocoder's input."""

    def load(self, device: torch.device) -> None:
        super().load(device)
        if getattr(self.processor, "is_uroman", False) and not is_uroman_available():
            raise StageConfigError(f"{self.model}: its texts are romanized by uroman; install it: pip install uroman")

    def call_rows(self, inputs: Mapping[str, Any], options: Mapping[str, Any], noise: RowNoise) -> Any:
        model = self.module
        noise.lengths = inputs["attention_mask"].sum(1).tolist()
        decode, factor = model.decoder.forward, 1.0 / options["speaking_rate"]

        def read_lengths(module: Any, args: Any, log_durations: torch.Tensor) -> None:
            durations = torch.ceil(torch.exp(log_durations) * args[1] * factor)
            noise.lengths = torch.clamp_min(durations.sum([1, 2]), 1).long().tolist()

        def decode_rows(frames: torch.Tensor, *args: Any) -> torch.Tensor:
            rows = zip(frames.split(1), noise.lengths or (), strict=True)
            sounds = [decode(row[..., :length], *args).squeeze(0).T for row, length in rows]
            return torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True).transpose(1, 2)

        handle = model.duration_predictor.register_forward_hook(read_lengths)
        model.decoder.forward = decode_rows
        try:
            return self.call(inputs, options)
        finally:
            handle.remove()
            del model.decoder.forward


class FastSpeech2Conformer(SpeechModel):
    """No file has the rate of the published vocoder."""

    sample_rate = 22_050


class SpeechT5(SpeechModel):
    """Voices are x-vectors in files; the vocoder is an argument."""

    @cached_property
    def voices(self) -> Sequence[str]:
        folder = Path(self.settings.voices or Path(self.model, "voices"))
        names = sorted(path.stem for path in folder.glob("*.npy"))
        if not names:
            size = self.config.speaker_embedding_dim
            raise StageConfigError(
                f"{self.model}: there is no voice in {folder}; put an x-vector of {size} numbers there, NAME.npy, or "
                "set engine_args.voices to the folder that has it"
            )
        return names

    def load_processor(self, **args: Any) -> Any:
        return AutoTokenizer.from_pretrained(self.model, **args)

    def voice_options(self, voice: str, num_rows: int) -> dict[str, Any]:
        path = Path(self.settings.voices or Path(self.model, "voices"), f"{voice}.npy")
        vector = torch.from_numpy(np.load(path, allow_pickle=False)).reshape(1, -1)
        return {"speaker_embeddings": vector.to(self.module.device, self.module.dtype).expand(num_rows, -1)}

    def call(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        return self.module.generate(**inputs, **options, vocoder=self.vocoder)

    def call_rows(self, inputs: Mapping[str, Any], options: Mapping[str, Any], noise: RowNoise) -> Any:
        return self.call(inputs, {**options, "return_output_lengths": True})


class Bark(SpeechModel):
    """Voices are presets of the processor; texts are filled up to a fixed length."""

    generation_parameters = ("do_sample", "temperature")
    limits_tokens = False

    @cached_property
    def voices(self) -> Sequence[str]:
        return [name for name in self.read_json("speaker_embeddings_path.json") if name != "repo_or_path"]

    @cached_property
    def max_text_tokens(self) -> int:
        return self.module.generation_config.semantic_config["max_input_semantic_length"]

    def encode(self, texts: Sequence[str], parameters: Any) -> Mapping[str, Any]:
        voice = getattr(parameters, "voice", None)
        return self.processor(text=list(texts), voice_preset=voice, max_length=self.max_text_tokens)

    def voice_options(self, voice: str, num_rows: int) -> dict[str, Any]:
        return {}

    def call_rows(self, inputs: Mapping[str, Any], options: Mapping[str, Any], noise: RowNoise) -> Any:
        return self.call(inputs, {**options, "return_output_lengths": True})


class Dia(SpeechModel):
    """A text names its speaker; the processor has the codec. A recording is of a voice, and begins the text, too."""

    joins = True

    @property
    def sound_rate(self) -> int:
        return self.sample_rate

    def load_processor(self, **args: Any) -> Any:
        processor = super().load_processor(**args)
        processor.audio_tokenizer.to(self.module.device).eval()
        return processor

    def prepare_text(self, text: str) -> str:
        return text if text.startswith("[S") else f"[S1] {text}"

    def encode_sound(self, sound: np.ndarray) -> Mapping[str, Any]:
        read = self.processor(text=["[S1]"], audio=[sound], sampling_rate=self.sound_rate, return_tensors="pt")
        return {name: read[name] for name in ("decoder_input_ids", "decoder_attention_mask")}

    def call(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        before = self.processor.get_audio_prompt_len(inputs["decoder_attention_mask"])
        return self.processor.batch_decode(super().call(inputs, options), audio_prompt_len=before)

    def decode(self, output: Any, num_rows: int) -> list[torch.Tensor]:
        return output


class SeamlessM4T(SpeechModel):
    """The text has a language of its own, and its speech may have another. That of a sound it finds itself."""

    hearing_classes = ("SeamlessM4TModel", "SeamlessM4Tv2Model")
    only_hearing_classes = ("SeamlessM4TForSpeechToSpeech", "SeamlessM4Tv2ForSpeechToSpeech")
    generation_parameters = ("do_sample", "temperature", "top_k", "top_p")
    limits_tokens = False

    @cached_property
    def languages(self) -> Sequence[str]:
        known = super().languages
        return [*known, *(short for short, code in ISO_639_3.items() if code in known)]

    @cached_property
    def parameters(self) -> type[msgspec.Struct]:
        own = [("source_language", str, self.languages[0])] if self.languages and not self.hears else []
        return msgspec.defstruct("SpeechParameters", own, bases=(super().parameters,), frozen=True)

    def encode(self, texts: Sequence[Any], parameters: Any) -> Mapping[str, Any]:
        if self.hears:
            return self.processor(audio=list(texts), sampling_rate=self.input_rate, return_tensors="pt")
        language: Any = getattr(parameters, "source_language", None)
        language = ISO_639_3.get(language, language)
        return self.processor(text=list(texts), src_lang=language, return_tensors="pt", padding=True)

    def options(self, parameters: Any, num_rows: int) -> dict[str, Any]:
        found = super().options(parameters, num_rows)
        if self.languages:
            found["tgt_lang"] = ISO_639_3.get(parameters.language, parameters.language)
        return found


class Musicgen(SpeechModel):
    """The text is a prompt, and a recording is what the music continues; without one the tokenizer is enough."""

    joins = True
    speaks = False

    @property
    def sound_rate(self) -> int | None:
        parts = [part for file in self.files[1:] for part in (file, file.get("feature_extractor") or {})]
        return next((part["sampling_rate"] for part in parts if "sampling_rate" in part), None)

    def load_processor(self, **args: Any) -> Any:
        return AutoTokenizer.from_pretrained(self.model, **args)

    @cached_property
    def _feature_extractor(self) -> Any:
        return AutoFeatureExtractor.from_pretrained(self.model, **self.load_arguments)

    def encode_sound(self, sound: np.ndarray) -> Mapping[str, Any]:
        return self._feature_extractor(sound, sampling_rate=self.sound_rate, return_tensors="pt")


class MusicgenMelody(Musicgen):
    """A prompt is a prefix of the codes, whose positions its padding would move. A recording is the melody."""

    joins = False

    def encode_sound(self, sound: np.ndarray) -> Mapping[str, Any]:
        if not is_torchaudio_available():
            raise InvalidRequestError("a recording is read by torchaudio; install it: pip install torchaudio", "")
        return super().encode_sound(sound)


class Moshi(SpeechModel):
    """Is silent while it hears a sound, and then speaks as long as it is told to. Its text is not given."""

    only_hearing_classes = ("MoshiForConditionalGeneration",)
    generation_parameters = ("do_sample", "temperature", "top_k", "top_p")

    def load_processor(self, **args: Any) -> Any:
        read: dict[str, Any] = {"feature_extractor": AutoFeatureExtractor, "tokenizer": AutoTokenizer}
        return SimpleNamespace(**{name: each.from_pretrained(self.model, **args) for name, each in read.items()})

    def encode(self, texts: Sequence[Any], parameters: Any) -> Mapping[str, Any]:
        read = self.processor.feature_extractor(texts[0], sampling_rate=self.input_rate, return_tensors="pt")
        heard = read["input_values"]
        num_frames = -(-heard.shape[-1] // self.config.audio_encoder_config.frame_size)
        silence = torch.full((1, num_frames), self.tokenizer.convert_tokens_to_ids("<pad>"))
        return {"input_ids": silence, "user_input_values": heard, "moshi_input_values": torch.zeros_like(heard)}

    def options(self, parameters: Any, num_rows: int) -> dict[str, Any]:
        length = parameters.max_new_tokens or _MOSHI_FRAMES
        return {**super().options(parameters, num_rows), "max_new_tokens": length}

    def call(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        sound = super().call(inputs, options).audio_sequences
        return sound[..., inputs["input_ids"].shape[1] * self.config.audio_encoder_config.frame_size :]
