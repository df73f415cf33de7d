# SPDX-License-Identifier: Apache-2.0
"""Trains the talker and its code predictor: text to codes, with the voices of flite as teachers.

The rows are those that the stage input processor makes of the thinker's: the user's message, the beginning of the
reply, then one token of text for each frame, ahead of the sound.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerForConditionalGeneration

from training.language import random_dialogue, random_scene, random_sentence
from training.loop import Training
from training.tokenizer import encode_answer


@dataclass
class Utterance:
    """
    Attributes:
        speaker: A name in the configuration.
        codes: int64 `[frames, groups]`.
    """

    text: str
    speaker: str
    codes: torch.Tensor


def make_talker(config: Qwen3OmniMoeConfig) -> Qwen3OmniMoeTalkerForConditionalGeneration:
    """With random weights; the class itself leaves those of its experts as they are in memory."""
    talker = Qwen3OmniMoeTalkerForConditionalGeneration(config.talker_config)
    embeddings = {id(module.weight) for module in talker.modules() if isinstance(module, nn.Embedding)}
    for parameter in talker.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.1 if id(parameter) in embeddings else 0.5 * parameter.shape[-1] ** -0.5)
    return talker


class TalkerTrainer:
    def __init__(
        self, talker: Qwen3OmniMoeTalkerForConditionalGeneration, config: Qwen3OmniMoeConfig,
        embeddings: torch.Tensor, tokenizer: PreTrainedTokenizerFast,
    ) -> None:  # fmt: skip
        """`embeddings`: the thinker's, `[vocabulary, hidden]`."""
        self.talker, self._config, self._embeddings, self._tokenizer = talker, config, embeddings, tokenizer

    def losses(self, rng: random.Random, batch: Sequence[Utterance]) -> tuple[torch.Tensor, torch.Tensor, float, float]:
        """Of the first codes, of the others, and the shares of both that are right."""
        inputs = [self._rows(rng, utterance) for utterance in batch]
        length = max(len(rows) for rows, _ in inputs)
        rows = torch.stack([nn.functional.pad(rows, (0, 0, 0, length - len(rows))) for rows, _ in inputs])
        labels = torch.full((len(batch), length), -100)
        codec_eos = torch.tensor([self._config.talker_config.codec_eos_token_id])
        for row, ((_, begin), utterance) in enumerate(zip(inputs, batch, strict=True)):
            labels[row, begin : begin + len(utterance.codes) + 1] = torch.cat([utterance.codes[:, 0], codec_eos])
        positions = torch.arange(length).expand(3, len(batch), -1)
        hidden = self.talker.model(inputs_embeds=rows, position_ids=positions, use_cache=False).last_hidden_state
        chosen = labels >= 0
        logits = self.talker.codec_head(hidden[chosen])
        loss = nn.functional.cross_entropy(logits, labels[chosen])
        right = (logits.argmax(-1) == labels[chosen]).float().mean().item()
        frames, codes = [], []
        for row, ((_, begin), utterance) in enumerate(zip(inputs, batch, strict=True)):
            kept = sorted(rng.sample(range(len(utterance.codes)), max(1, len(utterance.codes) // 3)))
            frames.append(hidden[row, begin : begin + len(utterance.codes)][kept])
            codes.append(utterance.codes[kept])
        residual, residual_right = self._residual_loss(torch.cat(frames), torch.cat(codes))
        return loss, residual, right, residual_right

    def _residual_loss(self, hidden: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, float]:
        """`hidden` `[frames, hidden]`, `codes` `[frames, groups]`."""
        predictor = self.talker.code_predictor
        embeddings = [self.talker.get_input_embeddings(), *predictor.get_input_embeddings()]
        rows = [hidden, *(embeddings[group](codes[:, group]) for group in range(codes.shape[1] - 1))]
        states = predictor.model(inputs_embeds=torch.stack(rows, 1), use_cache=False).last_hidden_state
        logits = torch.stack([head(states[:, i + 1]) for i, head in enumerate(predictor.lm_head)], 1)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten())
        return loss, (logits.argmax(-1) == codes[:, 1:]).float().mean().item()

    def _rows(self, rng: random.Random, utterance: Utterance) -> tuple[torch.Tensor, int]:
        """Input rows `[length, hidden]`, and the index of the one that predicts the first frame."""
        talker, config = self.talker, self._config.talker_config
        text = self._text_ids(rng, utterance.text)
        control = self._config
        assistant = [control.im_start_token_id, control.assistant_token_id, *self._encode("\n")]
        tts = [control.tts_pad_token_id] * 4 + [control.tts_bos_token_id]
        user = self._user_rows(rng)
        trailing = [*text[1:], control.tts_eos_token_id]
        trailing = (trailing + [control.tts_pad_token_id] * len(utterance.codes))[: len(utterance.codes)]
        projected = talker.text_projection(self._embeddings[[*assistant, *tts, text[0], *trailing]])
        speaker = config.speaker_id[utterance.speaker.lower()]
        special = [
            config.codec_nothink_id, config.codec_think_bos_id, config.codec_think_eos_id, speaker,
            config.codec_pad_id, config.codec_bos_id,
        ]  # fmt: skip
        embed = talker.get_input_embeddings()
        head = projected[:9] + torch.cat([torch.zeros(3, projected.shape[1]), embed(torch.tensor(special))])
        frames = embed(utterance.codes[:, 0])
        for group, embedding in enumerate(talker.code_predictor.get_input_embeddings()):
            frames = frames + embedding(utterance.codes[:, group + 1])
        return torch.cat([user, head, frames + projected[9:]]), len(user) + 8

    def _text_ids(self, rng: random.Random, text: str) -> list[int]:
        """As the model writes it, or as it is forced to; the full stop is sometimes missing."""
        if rng.random() < 0.5:
            return encode_answer(self._tokenizer, text)
        return self._encode(text)

    def _user_rows(self, rng: random.Random) -> torch.Tensor:
        """A message with text, and some with rows in place of a picture or speech: the talker learns to ignore it."""
        text = rng.choice(
            (
                "Read the text aloud, word for word.",
                random_dialogue(rng, random_scene(rng))[0].question,
                random_sentence(rng),
            )
        )
        control = self._config
        ids = [control.im_start_token_id, control.user_token_id, *self._encode(f"\n{text}"), control.im_end_token_id]
        rows = self.talker.text_projection(self._embeddings[[*ids, *self._encode("\n")]])
        if rng.random() < 0.5:
            media = torch.randn(rng.choice((9, rng.randint(5, 60))), self._embeddings.shape[1]) * rng.uniform(0.2, 3)
            rows = torch.cat([rows[:3], self.talker.hidden_projection(media), rows[3:]])
        return rows

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def train(folder: Path, trainer: TalkerTrainer, utterances: Sequence[Utterance], steps: int, batch: int = 32) -> None:
    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        loss, residual, right, residual_right = trainer.losses(rng, rng.choices(utterances, k=batch))
        figures = {"loss": loss.item(), "residual": residual.item(), "right": right, "residual_right": residual_right}
        return loss + residual, figures

    Training(folder, "talker", [trainer.talker], steps, 1.5e-3).run(compute)
