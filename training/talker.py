# SPDX-License-Identifier: Apache-2.0
"""Trains the talker and its code predictor: text to codes, with the voices of flite as teachers.

The rows are those that the stage input processor makes of the thinker's: the user's message, the beginning of the
reply, then one token of text for each frame, ahead of the audio. Auxiliary losses: which token comes in with a frame,
and which one is spoken in it and in the frame before.
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
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerForConditionalGeneration,
    apply_rotary_pos_emb,
)

from coloured_shapes.language import random_dialogue, random_scene, random_sentence
from training.data import Utterance
from training.loop import Training
from training.tokenizer import encode
from vllm_omni.model_executor.models.qwen3_omni_moe.talker_prompt import (
    TalkerPromptBuilder,
    ThinkerRows,
)


@dataclass
class SpeechExample:
    """A text with its speech.

    Attributes:
        tokens: Ids of the text.
    """

    speaker: str
    tokens: list[int]
    utterance: Utterance


def talker_config(config: Qwen3OmniMoeConfig) -> Qwen3OmniMoeTalkerConfig:
    """The talker's part, with its type."""
    assert isinstance(config.talker_config, Qwen3OmniMoeTalkerConfig)
    return config.talker_config


def make_talker(config: Qwen3OmniMoeConfig) -> Qwen3OmniMoeTalkerForConditionalGeneration:
    """A talker with random weights; the class itself leaves those of its experts as they are in memory."""
    talker = Qwen3OmniMoeTalkerForConditionalGeneration(talker_config(config))
    embeddings = {id(module.weight) for module in talker.modules() if isinstance(module, nn.Embedding)}
    for parameter in talker.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.1 if id(parameter) in embeddings else 0.5 * parameter.shape[-1] ** -0.5)
    return talker


class AuxiliaryLosses(nn.Module):
    """Losses of classifiers of tokens in some layers, and of guided attention: the talker so learns to follow the text.

    Not part of the model.
    """

    LAYERS: ClassVar = {"text": 0, "previous_text": 0, "previous_spoken": 1, "spoken": 3}
    """The tokens that come in with a frame's row, and with the one before; those spoken in the frame before, and in it.
    """

    GUIDED_LAYER = 2
    """One query head of each of its key-value heads learns to attend to the row of the token that is spoken."""

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

    def _keep_scores(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Keeps the scores of the guided heads: `[batch, heads, length, length]`."""
        states, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        query, key = (
            norm(projection(states).unflatten(-1, (-1, module.head_dim))).transpose(1, 2)
            for norm, projection in ((module.q_norm, module.q_proj), (module.k_norm, module.k_proj))
        )
        query, key = apply_rotary_pos_emb(query[:, :: module.num_key_value_groups], key, cos, sin)
        self._scores = query @ key.transpose(-1, -2) * module.scaling

    def guided_attention_loss(self, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The loss, and the accuracy. `rows`: `[batch, length]`, the indices to attend to; -100 for none."""
        is_later = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool).triu(1)
        scores = self._scores.masked_fill(is_later, -torch.inf).transpose(1, 2)[rows >= 0].flatten(0, 1)
        labels = rows[rows >= 0].repeat_interleave(self._scores.shape[1])
        return nn.functional.cross_entropy(scores, labels), (scores.argmax(-1) == labels).float().mean().item()

    def losses(self, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of the last forward pass, and accuracies. `labels`: `[heads, batch, length]`, -100 for none."""
        total, accuracy = torch.zeros(()), {}
        for label, (name, layer) in zip(labels, self.LAYERS.items(), strict=True):
            states = self._states[layer][label >= 0]
            loss, accuracy[name] = _cross_entropy(self.heads[name], states, label[label >= 0])
            total = total + loss
        return total, accuracy


class TalkerTrainer:
    """The talker with what its training needs; its prompt is made as the stage makes it."""

    def __init__(
        self, talker: Qwen3OmniMoeTalkerForConditionalGeneration, config: Qwen3OmniMoeConfig,
        embeddings: torch.Tensor, tokenizer: PreTrainedTokenizerFast,
    ) -> None:  # fmt: skip
        """`embeddings`: the thinker's, `[vocabulary, hidden]`."""
        self.talker, self._config, self._embeddings, self._tokenizer = talker, config, embeddings, tokenizer
        self.auxiliary = AuxiliaryLosses(talker, len(embeddings))
        self._control_embeds = embeddings[[config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id]]
        self._prompt = TalkerPromptBuilder(talker_config(config))
        self._prompt.text_projection, self._prompt.hidden_projection = talker.text_projection, talker.hidden_projection

    def losses(self, rng: random.Random, batch: Sequence[SpeechExample]) -> tuple[torch.Tensor, dict[str, float]]:
        """The sum of the losses, and accuracies of the first codes, the residual ones, and the tokens."""
        self._prompt.control = self.talker.text_projection(self._control_embeds)  # as its weights are in this step
        with_media = rng.random() < 0.2
        inputs = [self._rows(rng, example, with_media) for example in batch]
        length = max(len(rows) for rows, _ in inputs)
        rows = torch.stack([nn.functional.pad(rows, (0, 0, 0, length - len(rows))) for rows, _ in inputs])
        labels = torch.full((len(batch), length), -100)
        tokens = torch.full((len(AuxiliaryLosses.LAYERS), len(batch), length), -100)
        attended = torch.full((len(batch), length), -100)
        codec_eos = torch.tensor([talker_config(self._config).codec_eos_token_id])
        for row, ((_, begin), example) in enumerate(zip(inputs, batch, strict=True)):
            codes, num = example.utterance.codes, len(example.utterance.codes)
            labels[row, begin : begin + num + 1] = torch.cat([codes[:, 0], codec_eos])
            text = torch.tensor([*example.tokens, *[-100] * num])[:num]
            alignment = torch.tensor(example.utterance.alignment)
            spoken = torch.tensor([-100, *example.tokens, -100])[alignment + 1]
            is_token = (alignment >= 0) & (alignment < len(example.tokens))
            attended[row, begin : begin + num] = torch.where(is_token, begin + alignment, -100)
            tokens[:, row, begin + 1 : begin + num] = torch.stack([text[1:], text[:-1], spoken[:-1], spoken[1:]])
        positions = torch.arange(length).expand(3, len(batch), -1)
        hidden = self.talker.model(inputs_embeds=rows, position_ids=positions, use_cache=False).last_hidden_state
        first, first_accuracy = _cross_entropy(self.talker.codec_head, hidden[labels >= 0], labels[labels >= 0])
        token, auxiliary_accuracy = self.auxiliary.losses(tokens)
        attention, auxiliary_accuracy["attention"] = self.auxiliary.guided_attention_loss(attended)
        frames, frame_codes = [], []
        for row, ((_, begin), example) in enumerate(zip(inputs, batch, strict=True)):
            num = len(example.utterance.codes)
            kept = sorted(rng.sample(range(num), max(1, num // 4)))
            frames.append(hidden[row, begin : begin + num][kept])
            frame_codes.append(example.utterance.codes[kept])
        residual, residual_accuracy = self._residual_loss(torch.cat(frames), torch.cat(frame_codes))
        figures = {"loss": first.item(), "first": first_accuracy, "residual": residual_accuracy, **auxiliary_accuracy}
        return first + 0.5 * (token + attention) + residual, figures

    def _residual_loss(self, hidden: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The loss, and the accuracy. `hidden`: `[frames, hidden]`; `codes`: `[frames, groups]`."""
        predictor = self.talker.code_predictor
        embeddings = [self.talker.get_input_embeddings(), *predictor.get_input_embeddings()]
        rows = [hidden, *(embeddings[group](codes[:, group]) for group in range(codes.shape[1] - 1))]
        states = predictor.model(inputs_embeds=torch.stack(rows, 1), use_cache=False).last_hidden_state
        logits = torch.stack([head(states[:, i + 1]) for i, head in enumerate(predictor.lm_head)], 1)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten())
        return loss, (logits.argmax(-1) == codes[:, 1:]).float().mean().item()

    def _rows(self, rng: random.Random, example: SpeechExample, with_media: bool) -> tuple[torch.Tensor, int]:
        """Input rows `[length, hidden]`, and the index of the one that predicts the first frame."""
        config, codes = self._config, _with_errors(rng, example.utterance.codes)
        header = [config.im_start_token_id, config.assistant_token_id, *encode(self._tokenizer, "\n")]
        user_rows, is_media = self._user_rows(rng, with_media)
        speakers = talker_config(config).speaker_id
        assert speakers is not None
        rows = ThinkerRows(
            user_rows=user_rows,
            user_is_placeholder=is_media,
            reply_rows=self._embeddings[[*header, *example.tokens]],
            speaker_id=speakers[example.speaker.lower()],
        )
        codec_embedding = self.talker.get_input_embeddings()
        prompt, text = self._prompt(rows, codec_embedding)
        padding = self._prompt.tts_pad.expand(len(codes), -1)
        text = torch.cat([text, self._prompt.tts_eos[None], padding])[: len(codes)]
        frames = codec_embedding(codes[:, 0])
        for group, embedding in enumerate(self.talker.code_predictor.get_input_embeddings()):
            frames = frames + embedding(codes[:, group + 1])
        return torch.cat([prompt, frames + text]), len(prompt) - 1

    def _user_rows(self, rng: random.Random, with_media: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a message `[rows, thinker_hidden]`, and which of them are a picture's or speech's, `[rows]` bool.

        The talker learns to ignore both.
        """
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
        rows = self._embeddings[[*ids, *encode(self._tokenizer, "\n")]]
        is_media = torch.zeros(len(rows), dtype=torch.bool)
        if with_media:
            media = torch.randn(rng.choice((9, rng.randint(5, 60))), self._embeddings.shape[1]) * rng.uniform(0.2, 3)
            rows = torch.cat([rows[:3], media, rows[3:]])
            is_media = torch.cat([is_media[:3], torch.ones(len(media), dtype=torch.bool), is_media[3:]])
        return rows, is_media


def _with_errors(rng: random.Random, codes: torch.Tensor) -> torch.Tensor:
    """Replaces a few frames of every other example by others: the talker learns to continue after its own errors."""
    share = rng.choice((0.0, 0.03))
    return codes[[rng.randrange(len(codes)) if rng.random() < share else i for i in range(len(codes))]]


def _cross_entropy(head: nn.Module, rows: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The loss, and the accuracy."""
    logits = head(rows)
    return nn.functional.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean().item()


def train(
    folder: Path, trainer: TalkerTrainer, sample: Callable[[random.Random], SpeechExample], steps: int, batch: int = 20
) -> None:
    """Trains the talker with its code predictor. `sample` makes an example."""

    def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
        return trainer.losses(rng, [sample(rng) for _ in range(batch)])

    Training(folder, "talker", [trainer.talker, trainer.auxiliary], steps, 1.5e-3).run(compute)
