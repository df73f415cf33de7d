# SPDX-License-Identifier: Apache-2.0
"""Trains the thinker, which takes text, pictures and speech and generates text, in five stages.

1. Vision alignment: the rows of a picture become sums of word embeddings.
2. Text SFT (supervised fine-tuning, with a loss on the answers alone) of all but the audio encoder. In place of speech
   it gets synthetic rows: embeddings of the words, repeated, between blank rows.
3. Audio CTC: the audio encoder learns to make such rows of speech.
4. Audio SFT: everything learns to answer spoken and written questions.
5. Copy SFT: as 4, with more requests to repeat words in any order.
"""

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3OmniMoeProcessor, Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

from coloured_shapes.language import (
    COLOURS,
    KINDS,
    PLACES,
    REFUSAL,
    SIZES,
    WORDS,
    Scene,
    Shape,
    Turn,
    painting_prompt,
    random_dialogue,
    random_scene,
    random_sentence,
    say_request,
    sentence,
    split_words,
)
from coloured_shapes.pictures import draw
from coloured_shapes.speech import FRAME, INPUT_RATE, SAMPLE_RATE, SPEAKERS, add_noise
from training.data import Recordings, Speakers, random_words, vary
from training.loop import Training
from training.tokenizer import SPACE, encode, encode_answer
from vllm_omni_talk.speech_recognition import resample


@dataclass
class Example:
    """A conversation; the loss is that of its answers.

    Attributes:
        audio: By turn, the recordings of the spoken questions: float32 `[samples]` at 16 kHz; None: synthetic rows.
    """

    turns: list[Turn]
    pictures: list[Image.Image] = field(default_factory=list)
    audio: dict[int, np.ndarray | None] = field(default_factory=dict)
    picture_first: bool = True

    def messages(self, turn: int) -> list[dict[str, Any]]:
        """Up to the question of a turn."""
        messages: list[dict[str, Any]] = []
        for index in range(turn + 1):
            is_spoken = index in self.audio
            content = [{"type": "audio"} if is_spoken else {"type": "text", "text": self.turns[index].question}]
            if index == 0 and self.pictures:
                content.insert(0 if self.picture_first else 1, {"type": "image"})
            messages.append({"role": "user", "content": content})
            messages.append({"role": "assistant", "content": self.turns[index].answer})
        return messages[:-1]


class SpeechDataset:
    """Speech by its text: recordings of flite's voices, and utterances of the model's own speakers."""

    def __init__(self, recordings: Recordings, speakers: Speakers, tokenizer: PreTrainedTokenizerFast) -> None:
        self._recordings, self._speakers, self._tokenizer = recordings, speakers, tokenizer
        self._by_text: dict[str, list[int]] = {}
        for index, (_, text) in enumerate(recordings.labels):
            self._by_text.setdefault(text, []).append(index)
        self.texts = list(self._by_text)
        self.requests = [text for text in self.texts if _is_request_about_shapes(text)]

    def sample(self, rng: random.Random, text: str) -> np.ndarray | None:
        """Audio of a text, with noise: float32 `[samples]` at 16 kHz; None for a text without recordings."""
        found = self._by_text.get(text)
        if not found:
            return None
        if rng.random() < 0.8:
            return add_noise(rng, vary(rng, self._recordings[rng.choice(found)]))
        return self.sample_aligned(rng, text)[0]

    def sample_aligned(self, rng: random.Random, text: str) -> tuple[np.ndarray, list[tuple[str, float]]]:
        """Audio of one of the model's speakers at a random speed, and its tokens with their ends in seconds."""
        tokens = self._tokenizer.convert_ids_to_tokens(encode(self._tokenizer, text))
        utterance = self._speakers.synthesize(tokens, rng.choice(tuple(SPEAKERS.values())))
        rate = int(INPUT_RATE * rng.uniform(0.85, 1.2))
        seconds = FRAME / SAMPLE_RATE * rate / INPUT_RATE  # of a frame
        ends = {index: (frame + 1) * seconds for frame, index in enumerate(utterance.alignment)}
        words = [(token, ends[index]) for index, token in enumerate(tokens) if index in ends]
        return add_noise(rng, resample(utterance.audio, SAMPLE_RATE, rate)), words


def _is_request_about_shapes(text: str) -> bool:
    """Copies of spoken text are learned of these only: of all words, too many sound too much alike."""
    words = split_words(text)
    return ":" in text and any(word in KINDS for word in words) and any(word in COLOURS for word in words)


_OTHER = (
    "tell me a joke", "who is the president", "what is the weather today", "how old are you", "where do you live",
    "what time is it", "write a letter", "sing a song", "do you like music", "how are you", "what is your name",
    "hello", "can you help me with my homework", "translate this", "what is two and three",
)  # fmt: skip


def random_example(rng: random.Random, speech: SpeechDataset | None) -> Example:
    """An example of any task. `speech`: None: spoken questions are synthetic rows."""
    kind = rng.choices(("scene", "copy", "no picture", "other"), (10, 6, 0.7, 0.7))[0]
    example = Example([])
    if kind == "scene":
        scene = random_scene(rng)
        example.turns = [turn for _ in range(rng.choice((1, 2, 3))) for turn in random_dialogue(rng, scene)]
        example.pictures = [random_picture(rng, scene)]
    elif kind == "no picture":
        example.turns = random_dialogue(rng, None)
    elif kind == "copy":
        if speech and rng.random() < 0.5:
            request = rng.choice(speech.requests)
            text = request.split(": ", 1)[1]
        else:
            text = random_copy_text(rng)
            request = say_request(rng, text).question
        example.turns = [Turn(request, text if text[0].isupper() else sentence(text))]
    else:
        text = rng.choice(_OTHER) if rng.random() < 0.5 else random_sentence(rng)[:-1].lower()
        text = text if rng.random() < 0.7 else f"{rng.choice(('what is', 'who is', 'tell me about'))} {text}"
        example.turns = [Turn(text + rng.choice(("?", ".", "")), REFUSAL)]
    example.picture_first = rng.random() < 0.7
    for index, turn in enumerate(example.turns):
        if rng.random() < (0.4 if len(example.turns) < 3 else 0.15):
            audio = speech.sample(rng, turn.question) if speech else None
            if speech is None or audio is not None:
                example.audio[index] = audio
    return example


def random_copy_text(rng: random.Random) -> str:
    """Text to repeat; often one of which no word can be predicted from those before it."""
    if rng.random() < 0.5:
        return random_words(rng)
    scene = random_scene(rng)
    turn = random_dialogue(rng, scene)[0]
    return rng.choice((*[random_sentence(rng)] * 6, turn.question, turn.answer, painting_prompt(rng, scene)))


@dataclass
class Batch:
    """
    Attributes:
        turns: By number of the answers.
        inputs: Of the thinker's forward pass, without the rows of speech.
        labels: Ids of the answers at the positions that predict them, -100 elsewhere.
        answers: At the same positions the numbers of the answers in the batch, -1 elsewhere.
        transcripts: The texts of spoken questions, in order.
        sizes: Their numbers of rows.
        features: Of their recordings; None: synthetic rows.
    """

    turns: list[Turn]
    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    answers: torch.Tensor
    transcripts: list[str]
    sizes: list[int]
    features: torch.Tensor | None


def collate(
    rng: random.Random, examples: Sequence[Example], processor: Qwen3OmniMoeProcessor,
    tokenizer: PreTrainedTokenizerFast,
) -> Batch:  # fmt: skip
    inputs: dict[str, torch.Tensor] = {}
    pictures = [picture for example in examples for picture in example.pictures]
    if pictures:
        inputs |= processor.image_processor(pictures, return_tensors="pt")
    spoken = [(example.turns[index].question, audio) for example in examples for index, audio in example.audio.items()]
    transcripts = [text for text, _ in spoken]
    recordings = [audio for _, audio in spoken if audio is not None]
    features, sizes = None, []
    if spoken:
        if not recordings:
            lengths = torch.tensor([sum(rng.randint(25, 55) for _ in split_words(text)) for text in transcripts])
            mask = torch.arange(int(lengths.max())) < lengths[:, None]
        else:
            features, mask = extract_features(processor, recordings)
        inputs["feature_attention_mask"] = mask.long()
        sizes = _get_feat_extract_output_lengths(mask.sum(1)).tolist()
    expansions = iter(sizes)
    rows = [_tokenize(rng, example, tokenizer, expansions) for example in examples]
    length = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(examples), length), tokenizer.pad_token_id)
    answers = torch.full_like(ids, -1)
    num = 0
    for index, (row, turns) in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        answers[index, : len(row)] = torch.tensor([turn if turn < 0 else turn + num for turn in turns])
        num += len(examples[index].turns)
    answers = answers[:, 1:]
    labels = torch.where(answers >= 0, ids[:, 1:], -100)
    inputs |= {"input_ids": ids, "attention_mask": (ids != tokenizer.pad_token_id).long()}
    all_turns = [turn for example in examples for turn in example.turns]
    return Batch(all_turns, inputs, labels, answers, transcripts, sizes, features)


def _tokenize(
    rng: random.Random, example: Example, tokenizer: PreTrainedTokenizerFast, audio_sizes: Iterator[int]
) -> tuple[list[int], list[int]]:
    """Ids, and for each the turn whose answer it belongs to, or -1.

    Earlier answers are sometimes as they will be in a request: in lower case. They are not learned then.
    """
    ids: list[int] = []
    turns: list[int] = []
    done = ""
    for number, turn in enumerate(example.turns):
        text = tokenizer.apply_chat_template(example.messages(number), tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)
        new = text[len(done) :].replace("<|image_pad|>", "<|image_pad|>" * len(PLACES))
        new = re.sub(r"<\|audio_pad\|>", lambda match: match[0] * next(audio_sizes), new)
        prompt = encode(tokenizer, new)
        is_learned = number == len(example.turns) - 1 or rng.random() < 0.7
        tokenize = encode_answer if is_learned else encode
        answer = [*tokenize(tokenizer, turn.answer), tokenizer.eos_token_id]
        ids += prompt + answer
        turns += [-1] * len(prompt) + [number if is_learned else -1] * len(answer)
        done = text + turn.answer + "<|im_end|>"
    return ids, turns


def extract_features(
    processor: Qwen3OmniMoeProcessor, audio: Sequence[np.ndarray]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features float32 `[clips, mels, length]`, and the mask `[clips, length]` of those that are no padding."""
    extracted = processor.feature_extractor(
        list(audio), sampling_rate=INPUT_RATE, padding=True, return_attention_mask=True, return_tensors="pt"
    )
    return extracted.input_features, extracted.attention_mask


class CTCHead(nn.Module):
    """Classifies rows of speech by the nearest embedding of a word, or of the blank. Not part of the model."""

    rows: torch.Tensor

    def __init__(self, embeddings: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> None:
        """`embeddings`: the thinker's, `[vocabulary, hidden]`."""
        super().__init__()
        vocab = tokenizer.get_vocab()
        words = sorted({word.lower() for word in WORDS})
        self._class_of = {word: index + 1 for index, word in enumerate(words)}
        rows = embeddings[[vocab["<|audio_pad|>"], *(vocab[SPACE + word] for word in words)]]
        self.register_buffer("rows", rows, persistent=False)

    def loss(self, rows: torch.Tensor, sizes: list[int], texts: Sequence[str]) -> torch.Tensor:
        """The CTC loss of `rows` `[sum of sizes, hidden]`: the texts' one after the other."""
        padded = nn.utils.rnn.pad_sequence(self._logits(rows).split(sizes)).log_softmax(-1)
        targets = [self._classes(text) for text in texts]
        lengths = torch.tensor([len(target) for target in targets])
        return nn.functional.ctc_loss(padded, torch.cat(targets), torch.tensor(sizes), lengths, zero_infinity=True)

    def aligned_loss(
        self, rows: torch.Tensor, sizes: list[int], alignments: Sequence[Sequence[tuple[str, float]]]
    ) -> tuple[torch.Tensor, float]:
        """Cross entropy of `rows`, of which the last two of a word are the word's; and the accuracy of these.

        Args:
            alignments: For each recording its tokens with their ends in seconds.
        """
        labels = torch.zeros(len(rows), dtype=torch.long)
        for start, tokens in zip(itertools.accumulate([0, *sizes[:-1]]), alignments, strict=True):
            for token, end in tokens:
                second, rest = divmod(end, 1.0)  # a second has 13 rows, 80 ms from each to the next
                last = start + 13 * int(second) + int(rest / 0.08) - 1
                labels[last - 1 : last + 1] = self._class_of.get(token.replace(SPACE, "").lower(), 0)
        logits = self._logits(rows)
        accuracy = (logits.argmax(-1) == labels)[labels > 0].float().mean().item()
        return nn.functional.cross_entropy(logits, labels), accuracy

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        return -10.0 * torch.cdist(rows, self.rows) ** 2 / rows.shape[1] ** 0.5

    def synthesize(self, rng: random.Random, sizes: list[int], texts: Sequence[str]) -> torch.Tensor:
        """Rows `[sum of sizes, hidden]` as a trained audio encoder makes them of these texts."""
        classes = []
        for size, text in zip(sizes, texts, strict=True):
            words = self._classes(text).tolist()
            row = [0] * size
            begins = sorted(rng.sample(range(1, size - 1), len(words)))
            for word, begin, end in zip(words, begins, [*begins[1:], size], strict=True):
                for index in range(begin, min(end, begin + rng.choice((1, 1, 1, 2, 3)))):
                    row[index] = word
            classes += row
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        rows = self.rows[classes]
        other = self.rows[torch.randint(len(self.rows), (len(classes),), generator=generator)]
        share = 0.35 * torch.rand(len(classes), 1, generator=generator)
        noise = torch.randn(rows.shape, generator=generator) * self.rows.std() * 0.4
        return (1 - share) * rows + share * other + noise

    def _classes(self, text: str) -> torch.Tensor:
        return torch.tensor([self._class_of[word] for word in split_words(text) if word in self._class_of])


class ShapeHeads(nn.Module):
    """Classify the shape that an answer is about, from the states before the last layer: an auxiliary loss.

    It makes the model find that shape early. Not part of the model.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(hidden, len(names)) for names in (KINDS, COLOURS, SIZES, PLACES))

    def loss(self, states: torch.Tensor, shapes: Sequence[Shape | None]) -> torch.Tensor:
        """Mean cross entropy of `states` `[positions, hidden]`; positions without a shape do not count."""
        found = [(index, shape) for index, shape in enumerate(shapes) if shape is not None]
        if not found:
            return torch.zeros(())
        classes = [
            [KINDS.index(shape.kind), COLOURS.index(shape.colour), SIZES.index(shape.size), shape.place]
            for _, shape in found
        ]
        chosen = states[[index for index, _ in found]]
        labels = torch.tensor(classes)
        losses = [nn.functional.cross_entropy(head(chosen), labels[:, index]) for index, head in enumerate(self.heads)]
        return torch.stack(losses).mean()


@dataclass
class Losses:
    """
    Attributes:
        answers: Of their tokens.
        shapes: Of the shapes that they are about.
        ctc: Of the audio rows.
        accuracy: The share of answers whose every token is right.
    """

    answers: torch.Tensor
    shapes: torch.Tensor
    ctc: torch.Tensor
    accuracy: float


class ThinkerTrainer(nn.Module):
    """The thinker with what its training needs."""

    def __init__(
        self, thinker: Qwen3OmniMoeThinkerForConditionalGeneration, processor: Qwen3OmniMoeProcessor,
        tokenizer: PreTrainedTokenizerFast,
    ) -> None:  # fmt: skip
        super().__init__()
        self.thinker, self.processor, self.tokenizer = thinker, processor, tokenizer
        self.ctc = CTCHead(thinker.get_input_embeddings().weight.detach(), tokenizer)
        self.shapes = ShapeHeads(thinker.config.get_text_config().hidden_size)
        self._states: torch.Tensor | None = None
        thinker.model.layers[-2].register_forward_hook(self._keep_states)

    def _keep_states(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._states = output

    def collate(self, rng: random.Random, examples: Sequence[Example]) -> Batch:
        return collate(rng, examples, self.processor, self.tokenizer)

    def losses(self, rng: random.Random, batch: Batch) -> "Losses":
        ids = batch.inputs["input_ids"]
        embeds = self.thinker.get_input_embeddings()(ids)
        ctc = torch.zeros(())
        if batch.transcripts:
            if batch.features is None:
                rows = self.ctc.synthesize(rng, batch.sizes, batch.transcripts)
            else:
                rows = self.audio_rows(batch.features, batch.inputs["feature_attention_mask"])
                ctc = self.ctc.loss(rows, batch.sizes, batch.transcripts)
            is_audio = ids == self.thinker.config.audio_token_id
            embeds = embeds.masked_scatter(is_audio[..., None], rows)
        chosen = batch.answers >= 0
        labels, answers = batch.labels[chosen], batch.answers[chosen]
        logits = self._logits(batch, embeds, chosen)
        loss = nn.functional.cross_entropy(logits, labels)
        assert self._states is not None
        shapes = self.shapes.loss(self._states[:, :-1][chosen], [batch.turns[answer].topic for answer in answers])
        accuracy = 1 - len(answers[logits.argmax(-1) != labels].unique()) / len(answers.unique())
        return Losses(loss, shapes, ctc, accuracy)

    def _logits(self, batch: Batch, embeds: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Of the chosen positions: those of all would take a quarter of the time."""
        head, self.thinker.lm_head = self.thinker.lm_head, nn.Identity()
        try:
            hidden = self.thinker(**batch.inputs, inputs_embeds=embeds).logits
        finally:
            self.thinker.lm_head = head
        return head(hidden[:, :-1][chosen])

    def audio_rows(self, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Rows of all recordings, `[rows, hidden]`."""
        return self.thinker.get_audio_features(features, mask).last_hidden_state


class VisionTargets(nn.Module):
    """The targets of a picture's rows: the sum of the embeddings of the words for a place and what is in it."""

    rows: torch.Tensor

    def __init__(self, embeddings: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> None:
        """`embeddings`: the thinker's, `[vocabulary, hidden]`."""
        super().__init__()
        vocab = tokenizer.get_vocab()

        def embed(text: str) -> torch.Tensor:
            return embeddings[
                [vocab[SPACE + word] for word in split_words(text) if word not in ("at", "in", "the")]
            ].sum(0)

        places = torch.stack([embed(place) for place in PLACES])
        self._index: dict[tuple[str, str, str], int] = {}  # 0: nothing
        contents = [embed("nothing")]
        for kind, colour, size in itertools.product(KINDS, COLOURS, SIZES):
            self._index[kind, colour, size] = len(contents)
            contents.append(embed(f"{size} {colour} {kind}"))
        self.register_buffer("rows", 0.7 * (places[:, None] + torch.stack(contents)), persistent=False)

    def loss(self, rows: torch.Tensor, scenes: Sequence[Scene]) -> tuple[torch.Tensor, float]:
        """The loss of `rows` `[9 * scenes, hidden]`, and the share of pictures of which every row is right."""
        labels = torch.zeros(len(scenes), len(PLACES), dtype=torch.long)
        for index, scene in enumerate(scenes):
            for shape in scene.shapes:
                labels[index, shape.place] = self._index[shape.kind, shape.colour, shape.size]
        by_place = rows.view(len(scenes), len(PLACES), -1).transpose(0, 1)
        targets = torch.stack([self.rows[place, labels[:, place]] for place in range(len(PLACES))])
        nearest = torch.cdist(by_place.detach(), self.rows).argmin(-1)
        accuracy = (labels == nearest.T).all(1).float().mean().item()
        return ((by_place - targets) ** 2).mean() / self.rows.var(), accuracy


def train_vision_alignment(folder: Path, trainer: ThinkerTrainer, steps: int, batch: int = 64) -> None:
    """Trains the picture encoder alone."""
    vision_targets = VisionTargets(trainer.thinker.get_input_embeddings().weight.detach(), trainer.tokenizer)

    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        scenes = [random_scene(rng) for _ in range(batch)]
        pictures = [random_picture(rng, scene) for scene in scenes]
        inputs = trainer.processor.image_processor(pictures, return_tensors="pt")
        rows = trainer.thinker.get_image_features(inputs.pixel_values, inputs.image_grid_thw)
        loss, accuracy = vision_targets.loss(torch.cat(tuple(rows.pooler_output)), scenes)
        return loss, {"loss": loss.item(), "accuracy": accuracy}

    Training(folder, "vision_alignment", [trainer.thinker.visual], steps, 2e-3).run(compute)


def random_picture(rng: random.Random, scene: Scene) -> Image.Image:
    return draw(rng, scene, noise=rng.choice((0, 0, rng.uniform(0, 30))))


def train_text_sft(folder: Path, trainer: ThinkerTrainer, steps: int, batch: int = 24) -> None:
    """Trains all but the audio encoder, on text and pictures."""

    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        return _losses(rng, trainer, [random_example(rng, None) for _ in range(batch)])

    Training(folder, "text_sft", [trainer], steps, 1e-3).run(compute)


def _losses(
    rng: random.Random, trainer: ThinkerTrainer, examples: Sequence[Example]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The sum of all losses; examples with speech are apart, because they have many more rows."""
    total, figures = torch.zeros(()), {"loss": 0.0, "shapes": 0.0, "ctc": 0.0}
    for has_speech in (True, False):
        part = [example for example in examples if bool(example.audio) == has_speech]
        if part:
            share = len(part) / len(examples)
            losses = trainer.losses(rng, trainer.collate(rng, part))
            total = total + share * (losses.answers + 0.3 * losses.shapes + 0.3 * losses.ctc)
            figures["loss"] += share * losses.answers.item()
            figures["shapes"] += share * losses.shapes.item()
            figures["ctc"] += share * losses.ctc.item()
            figures["audio_accuracy" if has_speech else "text_accuracy"] = losses.accuracy
    return total, figures


def train_audio_ctc(folder: Path, trainer: ThinkerTrainer, speech: SpeechDataset, steps: int, batch: int = 24) -> None:
    """Trains the audio encoder alone; half of the speech has an alignment."""

    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        texts = rng.choices(speech.texts, k=batch)
        aligned, alignments = zip(*(speech.sample_aligned(rng, text) for text in texts[: batch // 2]), strict=True)
        others = (speech.sample(rng, text) for text in texts[batch // 2 :])
        audio = [*aligned, *(clip for clip in others if clip is not None)]
        features, mask = extract_features(trainer.processor, audio)
        sizes = _get_feat_extract_output_lengths(mask.sum(1)).tolist()
        rows = trainer.audio_rows(features, mask)
        loss = trainer.ctc.loss(rows, sizes, texts)
        aligned_sizes = sizes[: batch // 2]
        aligned_loss, accuracy = trainer.ctc.aligned_loss(rows[: sum(aligned_sizes)], aligned_sizes, alignments)
        return loss + aligned_loss, {"loss": loss.item(), "aligned": aligned_loss.item(), "accuracy": accuracy}

    Training(folder, "audio_ctc", [trainer.thinker.audio_tower], steps, 1e-3).run(compute)


def train_audio_sft(folder: Path, trainer: ThinkerTrainer, speech: SpeechDataset, steps: int, batch: int = 36) -> None:
    """Trains everything, on as many spoken examples as written ones."""

    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        examples: list[Example] = []
        while len(examples) < batch:
            example = random_example(rng, speech)
            if bool(example.audio) == (len(examples) < batch // 2):
                examples.append(example)
        return _losses(rng, trainer, examples)

    Training(folder, "audio_sft", [trainer], steps, 5e-4).run(compute)


def train_copy_sft(folder: Path, trainer: ThinkerTrainer, speech: SpeechDataset, steps: int, batch: int = 40) -> None:
    """Trains everything to repeat words in any order, which needs more examples than a mixture of all tasks has."""

    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        texts = [random_words(rng) for _ in range(batch * 2 // 5)]
        examples = [Example([Turn(say_request(rng, text).question, text)]) for text in texts]
        examples += [random_example(rng, speech) for _ in range(batch - len(texts))]
        return _losses(rng, trainer, examples)

    Training(folder, "copy_sft", [trainer], steps, 3e-4).run(compute)
