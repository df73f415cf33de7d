# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS's prompt: a text, its language, and a voice that is named, described, or heard in a sound.

Each row of the prompt is the sum of a row of text and, mostly, of a code: both are laid out here, as ids.
Reference: `Qwen3TTSModel` of the authors' `qwen-tts`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import PretrainedConfig
from vllm.tokenizers import TokenizerLike

from vllm_omni.inputs import StageInput
from vllm_omni.model_executor.prompt_processor import (
    PieceTokenizer,
    PromptProcessor,
    PromptStream,
    read_choice,
    read_language,
    read_sound,
    read_text,
)

NO_CODE, SPEAKER, REFERENCE = -1, -2, -3
"""In place of a code: nothing is added; the embedding of the reference's speaker; the reference's next frame."""

MAX_SECONDS = 120.0
"""Of a reference."""

MIN_SAMPLES = 1280
"""Of a reference: the speaker encoder reads five frames of a spectrum at least."""

_SAMPLE_RATE, _FRAME_SIZE = 24000, 1920
_FIELDS = {
    "base": ("language", "ref_audio", "ref_text"),
    "custom_voice": ("language", "speaker", "instructions"),
    "voice_design": ("language", "instructions"),
}


class Qwen3TTSPromptProcessor(PromptProcessor):
    """What a checkpoint reads depends on its `tts_model_type`: `custom_voice` has speakers, whose manner `instructions`
    change (not in the size 0.6B); `voice_design` makes the voice that `instructions` describe; `base` clones that of
    `ref_audio`: with `ref_text` it continues the reference, without it only takes the speaker's embedding.

    `language` is `auto` or one of the checkpoint's, by its name or its code (`en`). `non_streaming_mode` puts the whole
    text into the prompt; otherwise it is read along with the frames. Default: as in the reference, False only for
    clones. Special tokens in a text are read as plain text.

    Its information: `rows`, int64 `[rows, 2]`, the ids of each row's text and code; `text_ids`, int64 `[n]`, the text
    after the prompt; `ref_audio`, float32 `[samples]`, empty without a reference.
    """

    fields: ClassVar[tuple[str, ...]] = (
        "prompt", "language", "speaker", "instructions", "ref_audio", "ref_text", "non_streaming_mode",
    )  # fmt: skip

    def __init__(self, hf_config: PretrainedConfig, tokenizer: TokenizerLike) -> None:
        """
        Raises:
            ValueError: The checkpoint is of another kind.
        """
        super().__init__(hf_config, tokenizer)
        self._kind: str = hf_config.tts_model_type
        if self._kind not in _FIELDS:
            raise ValueError(f"tts_model_type {self._kind!r} is none of {', '.join(_FIELDS)}")
        names = [*_FIELDS[self._kind], "non_streaming_mode"]
        if self._kind == "custom_voice" and hf_config.tts_model_size == "0b6":
            names.remove("instructions")
        self._names = names
        self._speakers = {name.lower(): name for name in hf_config.talker_config.spk_id}
        languages = hf_config.talker_config.codec_language_id
        self._languages = ["auto", *(name.lower() for name in languages if "dialect" not in name)]
        encode = tokenizer.encode
        self._role = encode("<|im_start|>assistant\n", add_special_tokens=False)
        self._user = encode("<|im_start|>user\n", add_special_tokens=False)
        self._turn_end = encode("<|im_end|>\n", add_special_tokens=False)

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple(self._speakers)

    def process(self, given: Mapping[str, Any]) -> StageInput:
        self._check(given)
        text_ids = self.encode(read_text(given["prompt"], "prompt"))
        return self.make_prompt(given, self.read_reference(given), [*text_ids, self.hf_config.tts_eos_token_id])

    def process_pieces(self, given: Mapping[str, Any]) -> PromptStream:
        self._check(given)
        if given.get("non_streaming_mode"):
            raise ValueError("non_streaming_mode puts the whole text into the prompt; leave it out")
        return Qwen3TTSPromptStream(self, {**given, "non_streaming_mode": False})

    def make_prompt(
        self, given: Mapping[str, Any], reference: tuple[torch.Tensor, list[int], int], text_ids: list[int]
    ) -> StageInput:
        """
        Args:
            reference: See `read_reference`.
            text_ids: The text so far; if it is complete, with its end.
        """
        config, talker = self.hf_config, self.hf_config.talker_config
        sound, ref_text, num_frames = reference
        spoken = [*ref_text, *text_ids]
        rows = [(text_id, NO_CODE) for text_id in (*self._read_instructions(given), *self._role)]
        rows += [(config.tts_pad_token_id, code) for code in self._read_voice(given)]
        rows.append((config.tts_bos_token_id, talker.codec_pad_id))
        codes = [talker.codec_bos_id, *[REFERENCE] * num_frames]
        if self._is_non_streaming(given):
            rows += [(text_id, talker.codec_pad_id) for text_id in spoken]
            spoken = []
        prefix, later = spoken[: len(codes)], spoken[len(codes) :]
        prefix += [config.tts_pad_token_id] * (len(codes) - len(prefix))
        rows += zip(prefix, codes, strict=True)
        return StageInput(
            # An id that is never sampled, so that penalties count generated codes only.
            prompt_token_ids=[talker.codec_pad_id] * len(rows),
            additional_information={
                "rows": torch.tensor(rows),
                "text_ids": torch.tensor(later, dtype=torch.int64),
                "ref_audio": sound,
            },
            stop_token_ids=[talker.codec_eos_token_id],
        )

    def _check(self, given: Mapping[str, Any]) -> None:
        for name in given:
            if name != "prompt" and name not in self._names:
                size = self.hf_config.tts_model_size
                raise ValueError(
                    f"a checkpoint of the type {self._kind}, {size}, reads no {name!r}; it reads "
                    f"{', '.join(self._names)}"
                )
        if self._kind == "base" and "ref_audio" not in given:
            raise ValueError("the prompt has no 'ref_audio': a checkpoint of the type base clones the voice of a sound")

    def encode(self, text: str) -> list[int]:
        """Encodes a text alone, so that no line break merges with what surrounds it, and without control tokens."""
        tokenizer: Any = self.tokenizer
        ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        return ids

    def read_reference(self, given: Mapping[str, Any]) -> tuple[torch.Tensor, list[int], int]:
        """The sound, the ids of what is said in it, and its frames; no ids and frames if the speech does not continue
        it."""
        if "ref_audio" not in given:
            return torch.zeros(0), [], 0
        sound = read_sound(given["ref_audio"], "ref_audio", _SAMPLE_RATE, MAX_SECONDS)
        if len(sound) < MIN_SAMPLES:
            raise ValueError(f"ref_audio must be a sound of at least {MIN_SAMPLES / _SAMPLE_RATE:.3f} s")
        if "ref_text" not in given:
            return sound, [], 0
        return sound, self.encode(read_text(given["ref_text"], "ref_text")), -(-len(sound) // _FRAME_SIZE)

    def _read_instructions(self, given: Mapping[str, Any]) -> list[int]:
        if not given.get("instructions"):
            return []
        return [*self._user, *self.encode(read_text(given["instructions"], "instructions")), *self._turn_end]

    def _read_voice(self, given: Mapping[str, Any]) -> list[int]:
        """The codes of language and speaker."""
        talker = self.hf_config.talker_config
        language = read_language(given.get("language", "auto"), self._languages)
        speaker = [SPEAKER] if self._kind == "base" else []
        if self._kind == "custom_voice":
            name = self._speakers[read_choice(given.get("speaker", self.voices[0]), "speaker", self.voices)]
            speaker = [talker.spk_id[name]]
            dialect = talker.spk_is_dialect.get(name)
            if dialect and language in ("auto", "chinese"):
                language = dialect
        if language == "auto":
            marks = [talker.codec_nothink_id, talker.codec_think_bos_id]
        else:
            by_name = {name.lower(): code for name, code in talker.codec_language_id.items()}
            marks = [talker.codec_think_id, talker.codec_think_bos_id, by_name[language.lower()]]
        return [*marks, talker.codec_think_eos_id, *speaker]

    def _is_non_streaming(self, given: Mapping[str, Any]) -> bool:
        value = given.get("non_streaming_mode", self._kind != "base")
        if not isinstance(value, bool):
            raise TypeError(f"non_streaming_mode must be True or False, not {value!r}")
        return value


class Qwen3TTSPromptStream(PromptStream):
    """The prompt is made of as much text as it has codes, or of all. Each frame reads one more id."""

    def __init__(self, processor: Qwen3TTSPromptProcessor, given: Mapping[str, Any]) -> None:
        self._processor = processor
        self._given = given
        self._reference = processor.read_reference(given)
        self._pieces = PieceTokenizer(processor.encode)
        self._text_ids: list[int] = []  # until the prompt is made
        self._num_ready = 0

    def add(self, text: str, is_last: bool) -> StageInput | None:
        ids = self._pieces.add(text, is_last)
        if is_last:
            ids.append(self._processor.hf_config.tts_eos_token_id)
        made = self._extend(ids) if self._num_ready else self._begin(ids, is_last)
        if made is not None:
            made.num_ready_tokens = self._num_ready
        return made

    def _begin(self, ids: list[int], is_last: bool) -> StageInput | None:
        self._text_ids += ids
        _, ref_text, num_frames = self._reference
        if not is_last and len(ref_text) + len(self._text_ids) <= num_frames:
            return None
        made = self._processor.make_prompt(self._given, self._reference, self._text_ids)
        self._num_ready = len(made.prompt_token_ids) + len(made.additional_information["text_ids"])
        return made

    def _extend(self, ids: list[int]) -> StageInput | None:
        self._num_ready += len(ids)
        return StageInput(additional_information={"text_ids": torch.tensor(ids)}) if ids else None
