# SPDX-License-Identifier: Apache-2.0
"""Trains the talker and its code predictor: text to codes, with the voices of flite as teachers.

The rows are those that the stage input processor makes of the thinker's: the user's message, the beginning of the
reply, then one token of text for each frame, ahead of the sound. Beside the codes, the talker learns which token it
reads, has said and says.
"""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerForConditionalGeneration,
    apply_rotary_pos_emb,
)

from coloured_shapes.language import random_dialogue, random_scene, random_sentence
from training.data import Utterance
from training.loop import Training
from training.tokenizer import encode


@dataclass
class Reading:
    """Text that a speaker says.

    Attributes:
        tokens: Ids of the text.
        said: Its sound, and what of the text each frame says.
    """

    speaker: str
    tokens: list[int]
    said: Utterance


def make_talker(config: Qwen3OmniMoeConfig) -> Qwen3OmniMoeTalkerForConditionalGeneration:
    """With random weights; the class itself leaves those of its experts as they are in memory."""
    talker = Qwen3OmniMoeTalkerForConditionalGeneration(config.talker_config)
    embeddings = {id(module.weight) for module in talker.modules() if isinstance(module, nn.Embedding)}
    for parameter in talker.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.1 if id(parameter) in embeddings else 0.5 * parameter.shape[-1] ** -0.5)
    return talker


class AuxiliaryLosses(nn.Module):
    """Of tokens that the talker shall know in a layer, and of guided attention: it so learns to follow the text.

    Not part of the model.
    """

    LAYERS: ClassVar = {"text": 0, "text_before": 0, "said_before": 1, "said": 3}
    """What comes in with a frame's row, and with the row before; which token the frame before says, and this one."""

    GUIDED_LAYER = 2
    """One query head of each of its key-value heads learns to attend to the row of the token that is said."""

    def __init__(self, talker: Qwen3OmniMoeTalkerForConditionalGeneration, num_tokens: int) -> None:
        super().__init__()
        hidden = talker.config.text_config.hidden_size
        self.heads = nn.ModuleDict({name: nn.Linear(hidden, num_tokens) for name in self.LAYERS})
        self._states: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(talker.model.layers):
            layer.register_forward_hook(functools.partial(self._keep, number))
        self._scores = torch.empty(0)
        attention = talker.model.layers[self.GUIDED_LAYER].self_attn
        attention.register_forward_pre_hook(self._keep_scores, with_kwargs=True)

    def _keep(self, number: int, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._states[number] = output

    def _keep_scores(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Of the guided heads: `[batch, heads, length, length]`."""
        states, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        query, key = (
            norm(projection(states).unflatten(-1, (-1, module.head_dim))).transpose(1, 2)
            for norm, projection in ((module.q_norm, module.q_proj), (module.k_norm, module.k_proj))
        )
        query, key = apply_rotary_pos_emb(query[:, :: module.num_key_value_groups], key, cos, sin)
        self._scores = query @ key.transpose(-1, -2) * module.scaling

    def guided_attention_loss(self, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
        """`rows` `[batch, length]` are what to attend to, -100 for nowhere. And the share of heads that do."""
        is_later = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool).triu(1)
        scores = self._scores.masked_fill(is_later, -torch.inf).transpose(1, 2)[rows >= 0].flatten(0, 1)
        labels = rows[rows >= 0].repeat_interleave(self._scores.shape[1])
        return nn.functional.cross_entropy(scores, labels), (scores.argmax(-1) == labels).float().mean().item()

    def losses(self, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """`labels` `[heads, batch, length]`, -100 for none, of the last forward pass. And shares of right ones."""
        total, right = torch.zeros(()), {}
        for label, (name, layer) in zip(labels, self.LAYERS.items(), strict=True):
            states = self._states[layer][label >= 0]
            loss, right[name] = _cross_entropy(self.heads[name], states, label[label >= 0])
            total = total + loss
        return total, right


class TalkerTrainer:
    def __init__(
        self, talker: Qwen3OmniMoeTalkerForConditionalGeneration, config: Qwen3OmniMoeConfig,
        embeddings: torch.Tensor, tokenizer: PreTrainedTokenizerFast,
    ) -> None:  # fmt: skip
        """`embeddings`: the thinker's, `[vocabulary, hidden]`."""
        self.talker, self._config, self._embeddings, self._tokenizer = talker, config, embeddings, tokenizer
        self.auxiliary = AuxiliaryLosses(talker, len(embeddings))

    def losses(self, rng: random.Random, batch: Sequence[Reading]) -> tuple[torch.Tensor, dict[str, float]]:
        """The sum of the losses, and figures of the first codes, the others, and the tokens that are said."""
        with_media = rng.random() < 0.2
        inputs = [self._rows(rng, reading, with_media) for reading in batch]
        length = max(len(rows) for rows, _ in inputs)
        rows = torch.stack([nn.functional.pad(rows, (0, 0, 0, length - len(rows))) for rows, _ in inputs])
        labels = torch.full((len(batch), length), -100)
        tokens = torch.full((len(AuxiliaryLosses.LAYERS), len(batch), length), -100)
        attended = torch.full((len(batch), length), -100)
        codec_eos = torch.tensor([self._config.talker_config.codec_eos_token_id])
        for row, ((_, begin), reading) in enumerate(zip(inputs, batch, strict=True)):
            codes, num = reading.said.codes, len(reading.said.codes)
            labels[row, begin : begin + num + 1] = torch.cat([codes[:, 0], codec_eos])
            text = torch.tensor([*reading.tokens, *[-100] * num])[:num]
            spoken = torch.tensor(reading.said.spoken)
            said = torch.tensor([-100, *reading.tokens, -100])[spoken + 1]
            is_token = (spoken >= 0) & (spoken < len(reading.tokens))
            attended[row, begin : begin + num] = torch.where(is_token, begin + spoken, -100)
            tokens[:, row, begin + 1 : begin + num] = torch.stack([text[1:], text[:-1], said[:-1], said[1:]])
        positions = torch.arange(length).expand(3, len(batch), -1)
        hidden = self.talker.model(inputs_embeds=rows, position_ids=positions, use_cache=False).last_hidden_state
        first, first_right = _cross_entropy(self.talker.codec_head, hidden[labels >= 0], labels[labels >= 0])
        token, auxiliary_right = self.auxiliary.losses(tokens)
        attention, auxiliary_right["attention"] = self.auxiliary.guided_attention_loss(attended)
        frames, codes = [], []
        for row, ((_, begin), reading) in enumerate(zip(inputs, batch, strict=True)):
            num = len(reading.said.codes)
            kept = sorted(rng.sample(range(num), max(1, num // 4)))
            frames.append(hidden[row, begin : begin + num][kept])
            codes.append(reading.said.codes[kept])
        others, others_right = self._residual_loss(torch.cat(frames), torch.cat(codes))
        figures = {"loss": first.item(), "first": first_right, "others": others_right, **auxiliary_right}
        return first + 0.5 * (token + attention) + others, figures

    def _residual_loss(self, hidden: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, float]:
        """`hidden` `[frames, hidden]`, `codes` `[frames, groups]`."""
        predictor = self.talker.code_predictor
        embeddings = [self.talker.get_input_embeddings(), *predictor.get_input_embeddings()]
        rows = [hidden, *(embeddings[group](codes[:, group]) for group in range(codes.shape[1] - 1))]
        states = predictor.model(inputs_embeds=torch.stack(rows, 1), use_cache=False).last_hidden_state
        logits = torch.stack([head(states[:, i + 1]) for i, head in enumerate(predictor.lm_head)], 1)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten())
        return loss, (logits.argmax(-1) == codes[:, 1:]).float().mean().item()

    def _rows(self, rng: random.Random, reading: Reading, with_media: bool) -> tuple[torch.Tensor, int]:
        """Input rows `[length, hidden]`, and the index of the one that predicts the first frame."""
        talker, config = self.talker, self._config.talker_config
        text, codes = reading.tokens, reading.said.codes
        control = self._config
        assistant = [control.im_start_token_id, control.assistant_token_id, *encode(self._tokenizer, "\n")]
        tts = [control.tts_pad_token_id] * 4 + [control.tts_bos_token_id]
        user = self._user_rows(rng, with_media)
        trailing = [*text[1:], control.tts_eos_token_id]
        trailing = (trailing + [control.tts_pad_token_id] * len(codes))[: len(codes)]
        projected = talker.text_projection(self._embeddings[[*assistant, *tts, text[0], *trailing]])
        speaker = config.speaker_id[reading.speaker.lower()]
        special = [
            config.codec_nothink_id, config.codec_think_bos_id, config.codec_think_eos_id, speaker,
            config.codec_pad_id, config.codec_bos_id,
        ]  # fmt: skip
        embed = talker.get_input_embeddings()
        head = projected[:9] + torch.cat([torch.zeros(3, projected.shape[1]), embed(torch.tensor(special))])
        codes = _with_errors(rng, codes)
        frames = embed(codes[:, 0])
        for group, embedding in enumerate(talker.code_predictor.get_input_embeddings()):
            frames = frames + embedding(codes[:, group + 1])
        return torch.cat([user, head, frames + projected[9:]]), len(user) + 8

    def _user_rows(self, rng: random.Random, with_media: bool) -> torch.Tensor:
        """A message with text, and rows in place of a picture or speech: the talker learns to ignore it."""
        text = rng.choice(
            (
                "Read the text aloud, word for word.",
                random_dialogue(rng, random_scene(rng))[0].question,
                random_sentence(rng),
            )
        )
        control = self._config
        message = encode(self._tokenizer, f"\n{text}")
        ids = [control.im_start_token_id, control.user_token_id, *message, control.im_end_token_id]
        rows = self.talker.text_projection(self._embeddings[[*ids, *encode(self._tokenizer, "\n")]])
        if with_media:
            media = torch.randn(rng.choice((9, rng.randint(5, 60))), self._embeddings.shape[1]) * rng.uniform(0.2, 3)
            rows = torch.cat([rows[:3], self.talker.hidden_projection(media), rows[3:]])
        return rows


def _with_errors(rng: random.Random, codes: torch.Tensor) -> torch.Tensor:
    """With other frames in a few places of every other example: the talker learns to go on after its own errors."""
    share = rng.choice((0.0, 0.03))
    return codes[[rng.randrange(len(codes)) if rng.random() < share else i for i in range(len(codes))]]


def _cross_entropy(head: nn.Linear, rows: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
    """And the share that is right."""
    logits = head(rows)
    return nn.functional.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean().item()


def train(
    folder: Path, trainer: TalkerTrainer, read: Callable[[random.Random], Reading], steps: int, batch: int = 20
) -> None:
    """`read` makes an example."""

    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        return trainer.losses(rng, [read(rng) for _ in range(batch)])

    Training(folder, "talker", [trainer.talker, trainer.auxiliary], steps, 1.5e-3).run(compute)
