# SPDX-License-Identifier: Apache-2.0
"""Trains the thinker: it reads, sees and hears questions, and writes the answer.

Teacher forcing on the answer alone. What the audio encoder makes of speech is also pulled towards the embeddings of the
spoken words (CTC), which makes speech and text alike long before the answers are right.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3OmniMoeProcessor, Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

from training.data import Recordings
from training.language import (
    REFUSAL,
    WORDS,
    Turn,
    random_dialogue,
    random_scene,
    random_sentence,
    say_request,
    split_words,
)
from training.loop import Training
from training.pictures import draw
from training.speech import INPUT_RATE, add_noise
from training.tokenizer import encode_answer


@dataclass
class Example:
    """A conversation up to the answer. A `question` that is heard is in `sounds` instead of the text."""

    turns: list[Turn]
    pictures: list[Image.Image] = field(default_factory=list)
    sounds: list[np.ndarray] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    is_spoken: list[bool] = field(default_factory=list)
    picture_first: bool = True

    def messages(self) -> list[dict]:
        messages: list[dict] = []
        for index, turn in enumerate(self.turns):
            content = [{"type": "audio"} if self.is_spoken[index] else {"type": "text", "text": turn.question}]
            if index == 0 and self.pictures:
                content.insert(0 if self.picture_first else 1, {"type": "image"})
            messages.append({"role": "user", "content": content})
            if index + 1 < len(self.turns):
                messages.append({"role": "assistant", "content": turn.answer})
        return messages


class SpeechBank:
    """Recordings by their text."""

    def __init__(self, recordings: Recordings) -> None:
        self._recordings = recordings
        self._by_text: dict[str, list[int]] = {}
        for index, (_, text) in enumerate(recordings.labels):
            self._by_text.setdefault(text, []).append(index)
        self.texts = list(self._by_text)
        self.sentences = [text for text in self.texts if ":" in text]

    def wave(self, rng: random.Random, text: str) -> np.ndarray | None:
        """One of a text, with noise: float32 `[samples]` at 16 kHz; None if there is none."""
        found = self._by_text.get(text)
        return add_noise(rng, self._recordings[rng.choice(found)]) if found else None


_OTHER = (
    "tell me a joke", "who is the president", "what is the weather today", "how old are you", "where do you live",
    "what time is it", "write a letter", "sing a song", "do you like music", "how are you", "what is your name",
    "hello", "can you help me with my homework", "translate this", "what is two and three",
)  # fmt: skip


def random_example(rng: random.Random, bank: SpeechBank | None) -> Example:
    kind = rng.choices(("scene", "say", "no picture", "other"), (10, 6, 0.7, 0.7))[0]
    example = Example([])
    if kind == "scene":
        scene = random_scene(rng)
        example.turns = random_dialogue(rng, scene)
        example.pictures = [draw(rng, scene, noise=rng.choice((0, 0, rng.uniform(0, 30))))]
    elif kind == "no picture":
        example.turns = random_dialogue(rng, None)
    elif kind == "say":
        text = rng.choice(bank.sentences) if bank and rng.random() < 0.7 else None
        if text:
            example.turns = [Turn(text, text.split(": ", 1)[1])]
        else:
            example.turns = [say_request(rng, random_sentence(rng))]
    else:
        text = rng.choice(_OTHER) if rng.random() < 0.5 else random_sentence(rng)[:-1].lower()
        text = text if rng.random() < 0.7 else f"{rng.choice(('what is', 'who is', 'tell me about'))} {text}"
        example.turns = [Turn(text + rng.choice(("?", ".", "")), REFUSAL)]
    example.picture_first = rng.random() < 0.7
    for turn in example.turns:
        wave = bank.wave(rng, turn.question) if bank and rng.random() < 0.75 else None
        example.is_spoken.append(wave is not None)
        if wave is not None:
            example.sounds.append(wave)
            example.heard.append(turn.question)
    return example


@dataclass
class Batch:
    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    heard: list[str]


def collate(examples: Sequence[Example], processor: Qwen3OmniMoeProcessor, tokenizer: PreTrainedTokenizerFast) -> Batch:
    texts = [
        tokenizer.apply_chat_template(example.messages(), tokenize=False, add_generation_prompt=True)
        for example in examples
    ]
    pictures = [picture for example in examples for picture in example.pictures]
    sounds = [sound for example in examples for sound in example.sounds]
    media = {"images": pictures} if pictures else {}
    if sounds:
        media["audio"] = sounds
    inputs = dict(processor(text=texts, return_tensors="pt", padding=True, **media))
    mask = inputs.pop("attention_mask").bool()
    prompts = [row[kept] for row, kept in zip(inputs.pop("input_ids"), mask, strict=True)]
    end = tokenizer.eos_token_id
    answers = [torch.tensor([*encode_answer(tokenizer, example.turns[-1].answer), end]) for example in examples]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(examples), length), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : len(prompt) + len(answer)] = torch.cat([prompt, answer])
        labels[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = answer
    inputs |= {"input_ids": ids, "attention_mask": (ids != tokenizer.pad_token_id).long()}
    return Batch(inputs, labels, [text for example in examples for text in example.heard])


class WordLoss(nn.Module):
    """CTC: rows of speech against the embeddings of all words, and a blank. Not part of the model."""

    def __init__(self, embeddings: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> None:
        """`embeddings`: the thinker's, `[vocabulary, hidden]`."""
        super().__init__()
        vocab = tokenizer.get_vocab()
        words = sorted({word.lower() for word in WORDS})
        self._class_of = {word: index + 1 for index, word in enumerate(words)}
        self.register_buffer("words", embeddings[[vocab["\u0120" + word] for word in words]], persistent=False)
        self.blank = nn.Parameter(torch.zeros(1, embeddings.shape[1]))
        self.scale = nn.Parameter(torch.tensor(0.0))

    def forward(self, rows: torch.Tensor, sizes: list[int], texts: Sequence[str]) -> torch.Tensor:
        """`rows` `[sum of sizes, hidden]`: the texts' one after the other."""
        logits = rows @ torch.cat([self.blank, self.words]).T * self.scale.exp()
        padded = nn.utils.rnn.pad_sequence(logits.split(sizes)).log_softmax(-1)
        targets = [torch.tensor([self._class_of[word] for word in split_words(text)]) for text in texts]
        lengths = torch.tensor([len(target) for target in targets])
        return nn.functional.ctc_loss(padded, torch.cat(targets), torch.tensor(sizes), lengths, zero_infinity=True)


class ThinkerTrainer(nn.Module):
    """The thinker with what its training needs."""

    def __init__(
        self, thinker: Qwen3OmniMoeThinkerForConditionalGeneration, processor: Qwen3OmniMoeProcessor,
        tokenizer: PreTrainedTokenizerFast,
    ) -> None:  # fmt: skip
        super().__init__()
        self.thinker, self.processor, self.tokenizer = thinker, processor, tokenizer
        self.words = WordLoss(thinker.get_input_embeddings().weight.detach(), tokenizer)

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Of answers, of heard words, and the share of answers whose every token is right."""
        inputs = dict(batch.inputs)
        embeds = self.thinker.get_input_embeddings()(inputs["input_ids"])
        heard = torch.zeros(())
        if "input_features" in inputs:
            rows, sizes = self.audio_rows(inputs.pop("input_features"), inputs["feature_attention_mask"])
            is_audio = inputs["input_ids"] == self.thinker.config.audio_token_id
            embeds = embeds.masked_scatter(is_audio[..., None], rows)
            heard = self.words(rows, sizes, batch.heard)
        logits = self.thinker(**inputs, inputs_embeds=embeds).logits
        chosen = batch.labels >= 0
        loss = nn.functional.cross_entropy(logits[chosen], batch.labels[chosen])
        right = ((logits.argmax(-1) == batch.labels) | ~chosen).all(1).float().mean().item()
        return loss, heard, right

    def audio_rows(self, features: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Rows of all recordings, `[rows, hidden]`, and the number of each one's."""
        rows = self.thinker.get_audio_features(features, mask).last_hidden_state
        return rows, _get_feat_extract_output_lengths(mask.sum(1)).tolist()


def train_reading(folder: Path, trainer: ThinkerTrainer, steps: int, batch: int = 32) -> None:
    """All but the audio encoder, with typed questions alone: quick steps, in which it learns to see and to repeat."""

    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        examples = [random_example(rng, None) for _ in range(batch)]
        loss, _, right = trainer.losses(collate(examples, trainer.processor, trainer.tokenizer))
        return loss, {"loss": loss.item(), "right": right}

    Training(folder, "reading", [trainer], steps, 1e-3).run(compute)


def train_hearing(folder: Path, trainer: ThinkerTrainer, bank: SpeechBank, steps: int, batch: int = 24) -> None:
    """The audio encoder alone."""

    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        texts = rng.choices(bank.texts, k=batch)
        waves = [wave for text in texts if (wave := bank.wave(rng, text)) is not None]
        extracted = trainer.processor.feature_extractor(
            waves, sampling_rate=INPUT_RATE, padding=True, return_attention_mask=True, return_tensors="pt"
        )
        rows, sizes = trainer.audio_rows(extracted.input_features, extracted.attention_mask)
        loss = trainer.words(rows, sizes, texts)
        return loss, {"loss": loss.item()}

    Training(folder, "hearing", [trainer.thinker.audio_tower, trainer.words], steps, 1e-3).run(compute)


def train(folder: Path, trainer: ThinkerTrainer, bank: SpeechBank, steps: int, batch: int = 32) -> None:
    """All together, typed and spoken."""

    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        examples = [random_example(rng, bank) for _ in range(batch)]
        loss, heard, right = trainer.losses(collate(examples, trainer.processor, trainer.tokenizer))
        return loss + 0.3 * heard, {"loss": loss.item(), "heard": heard.item(), "right": right}

    Training(folder, "thinker", [trainer], steps, 5e-4).run(compute)
