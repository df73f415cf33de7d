# SPDX-License-Identifier: Apache-2.0
"""Synthetic images, audio and video, and prompts with them.

All media are computed from a seed, so that tests, benchmarks and the demo need no download and no file. Prompts are
rendered with the checkpoint's chat template.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from transformers import AutoConfig, AutoTokenizer

Prompt = Any
"""A `vllm_omni.inputs.OmniPrompt`; to name that here would import vLLM."""

SAMPLE_RATE = 16_000
"""Of input audio, in Hz."""

PROMPT_KINDS = ("text", "image", "audio", "video")
"""One question, with one image, clip or video, or without media."""

HARD_KINDS = ("chat", "images", "audios", "mixed", "turns", "audio_in_video", "long_audio_in_video")
"""Two turns of text, several images, several clips, all media at once, media in two turns, and videos with their
sound, shorter and longer than the two seconds in which video and sound tokens alternate."""

_USER_MEDIA: dict[str, list[list[str]]] = {
    "text": [[]],
    "image": [["image"]],
    "audio": [["audio"]],
    "video": [["video"]],
    "chat": [[], []],
    "images": [["image", "image"]],
    "audios": [["audio", "audio"]],
    "mixed": [["image", "audio", "video"]],
    "turns": [["image"], ["image", "audio"]],
    "audio_in_video": [["video"]],
    "long_audio_in_video": [["video"]],
}
"""Kind -> media of each of the user's turns."""

_QUESTIONS = {
    "text": "Why is the sea blue?",
    "image": "What is in this picture?",
    "audio": "What does the voice say?",
    "video": "What moves, and where to?",
}
_SOUND_SECONDS = {"audio_in_video": 1.5, "long_audio_in_video": 2.6}

# Formants of five vowels in Hz, for a male voice, from phonetics textbooks.
_VOWELS = {
    "a": (730.0, 1090.0, 2440.0),
    "e": (530.0, 1840.0, 2480.0),
    "i": (270.0, 2290.0, 3010.0),
    "o": (570.0, 840.0, 2410.0),
    "u": (300.0, 870.0, 2240.0),
}


def make_image(seed: int = 0, width: int = 160, height: int = 128) -> Image.Image:
    """A landscape: sky, ground, sun and three hills; colours and positions depend on the seed. RGB."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (width, height), _colour(rng, 120, 255))
    draw = ImageDraw.Draw(image)
    x, y, radius = int(rng.integers(0, width)), int(rng.integers(0, height // 2)), height // 8
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(255, 220, 80))
    for _ in range(3):
        left, top = int(rng.integers(-width // 4, width)), int(rng.integers(height // 3, height - 8))
        draw.polygon(
            [(left, height), (left + width // 4, top), (left + width // 2, height)], fill=_colour(rng, 20, 160)
        )
    draw.rectangle((0, height - height // 6, width, height), fill=_colour(rng, 20, 120))
    return image


def make_audio(seed: int = 0, seconds: float = 1.5) -> np.ndarray:
    """A spoken-like clip: vowels of a pulse train through formant resonances, with short pauses.

    Returns:
        float32 `[samples]` at 16 kHz, peak 0.7.
    """
    rng = np.random.default_rng(seed)
    total = int(seconds * SAMPLE_RATE)
    vowels = rng.choice(list(_VOWELS), size=max(1, round(4 * seconds)))
    pitches = rng.uniform(90.0, 180.0, size=len(vowels))
    length = total // len(vowels)
    syllables = [_vowel(_VOWELS[vowel], pitch, length) for vowel, pitch in zip(vowels, pitches, strict=True)]
    clip = np.concatenate([*syllables, np.zeros(total - length * len(vowels))])
    clip += 0.003 * rng.standard_normal(total)  # noise, so that no part is exactly silent
    return (0.7 * clip / np.abs(clip).max()).astype(np.float32)


def make_video(seed: int = 0, frames: int = 8, width: int = 96, height: int = 64) -> np.ndarray:
    """A ball that moves through an image.

    Returns:
        uint8 `[frames, height, width, 3]`.
    """
    background = make_image(seed, width, height)
    rng = np.random.default_rng(seed + 1)
    start, stop = rng.uniform(0.1, 0.9, size=(2, 2)) * (width, height)
    colour = _colour(rng, 0, 255)
    return np.stack([_with_ball(background, start + (stop - start) * i / frames, colour) for i in range(frames)])


def make_prompt(checkpoint: str | Path, kind: str, seed: int = 0, question: str | None = None) -> Prompt:
    """One conversation of `kind`, rendered with the checkpoint's chat template, in vLLM's format.

    Args:
        checkpoint: Folder or name of the model.
        kind: One of `PROMPT_KINDS` or `HARD_KINDS`.
        seed: Of the media; part of the text of a conversation without media, so that each seed differs.
        question: The user's last question. Default: one for the kind.

    Returns:
        `{"prompt": str}`, with `multi_modal_data` and `mm_processor_kwargs` if there are media.
    """
    return make_prompts(checkpoint, [kind], seed, question)[kind]


def make_prompts(
    checkpoint: str | Path, kinds: Iterable[str], seed: int = 0, question: str | None = None
) -> dict[str, Prompt]:
    """One prompt of each of `kinds`, by kind; see `make_prompt`."""
    chat = _Chat(checkpoint)
    return {kind: chat.prompt(kind, seed, question) for kind in kinds}


def example_prompts(checkpoint: str | Path, seed: int = 0) -> dict[str, Prompt]:
    """One prompt of each simple kind: `{"text": ..., "image": ..., "audio": ..., "video": ...}`."""
    return make_prompts(checkpoint, PROMPT_KINDS, seed)


def mixed_prompts(checkpoint: str | Path, count: int, seed: int = 0) -> list[Prompt]:
    """`count` different prompts, the simple kinds in turn."""
    chat = _Chat(checkpoint)
    return [chat.prompt(PROMPT_KINDS[i % len(PROMPT_KINDS)], seed + i) for i in range(count)]


class _Chat:
    """Renders conversations for one checkpoint."""

    def __init__(self, checkpoint: str | Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._config: Any = AutoConfig.from_pretrained(checkpoint)

    def prompt(self, kind: str, seed: int, question: str | None = None) -> Prompt:
        if kind not in _USER_MEDIA:
            raise ValueError(f"unknown kind of prompt: {kind!r}. Known: {', '.join(_USER_MEDIA)}")
        shown = [media for turn in _USER_MEDIA[kind] for media in turn]
        prompt: Prompt = {"prompt": self._render(kind, seed, question)}
        if shown:
            prompt["multi_modal_data"] = _media(kind, shown, seed)
            prompt["mm_processor_kwargs"] = self._options(kind) if "video" in shown else {}
        return prompt

    def _render(self, kind: str, seed: int, question: str | None) -> str:
        *earlier, last = _USER_MEDIA[kind]
        conversation: list[dict[str, Any]] = [{"role": "system", "content": "You are a helpful voice."}]
        for shown in earlier:
            conversation += [_user(shown, _question(shown, seed)), {"role": "assistant", "content": "A sea."}]
        conversation.append(_user(last, question or ("And this?" if len(last) > 1 else _question(last, seed))))
        text = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        return str(text)

    def _options(self, kind: str) -> dict[str, Any]:
        vision = self._config.thinker_config.vision_config
        token_pixels = (vision.patch_size * vision.spatial_merge_size) ** 2
        # Qwen's omni processors replace the size in the video processor's file by their own, 128 tokens and more for
        # each pair of frames: so it is an argument here.
        size = {"shortest_edge": 4 * token_pixels, "longest_edge": 64 * token_pixels}
        options: dict[str, Any] = {"size": size, "fps": 2.0, "do_sample_frames": False}
        return options | ({"use_audio_in_video": True} if kind in _SOUND_SECONDS else {})


def _user(shown: list[str], text: str) -> dict[str, Any]:
    return {"role": "user", "content": [*({"type": media} for media in shown), {"type": "text", "text": text}]}


def _question(shown: list[str], seed: int) -> str:
    return _QUESTIONS[shown[0]] if shown else f"{_QUESTIONS['text']} ({seed})"


def _media(kind: str, shown: list[str], seed: int) -> dict[str, Any]:
    """`multi_modal_data`. Images and clips of one prompt differ in size, too."""
    data: dict[str, Any] = {}
    for media in shown:
        same = data.setdefault(media, [])
        if media == "image":
            same.append(make_image(seed) if not same else make_image(seed + 100 * len(same), 96, 64))
        elif media == "audio":
            same.append((make_audio(seed + 100 * len(same), 1.5 / (1 + len(same))), SAMPLE_RATE))
        else:
            same.append(make_video(seed))
    if kind in _SOUND_SECONDS:
        data["audio"] = [(make_audio(seed, _SOUND_SECONDS[kind]), SAMPLE_RATE)]
    return data


def _colour(rng: np.random.Generator, low: int, high: int) -> tuple[int, int, int]:
    red, green, blue = rng.integers(low, high, size=3).tolist()
    return red, green, blue


def _vowel(formants: tuple[float, ...], pitch: float, samples: int) -> np.ndarray:
    """One syllable, float64 `[samples]`: harmonics of `pitch`, louder near the formants."""
    time = np.arange(samples) / SAMPLE_RATE
    harmonics = np.arange(1, int(4000 / pitch)) * pitch
    distance = (harmonics[:, None] - np.array(formants)) / 90.0  # in formant bandwidths
    loudness = (1.0 / (1.0 + distance**2)).sum(axis=1) / np.sqrt(harmonics)
    wave = (loudness[:, None] * np.sin(2 * np.pi * harmonics[:, None] * time)).sum(axis=0)
    envelope = np.sin(np.pi * np.arange(samples) / samples) ** 0.5
    return wave * envelope


def _with_ball(background: Image.Image, centre: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    frame = background.copy()
    x, y = centre.tolist()
    radius = background.height / 8
    ImageDraw.Draw(frame).ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    return np.asarray(frame)
