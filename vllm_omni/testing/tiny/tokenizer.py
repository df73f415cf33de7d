# SPDX-License-Identifier: Apache-2.0
"""A small byte-level BPE tokenizer of Qwen's kind, made without any download.

The role names are one token each, as in the real tokenizer (Qwen3-Omni looks for `ids[i + 1] == user`
after `<|im_start|>`), and so are some common words, so that random weights produce a readable answer. Everything else
is encoded byte by byte.
"""

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Tokenizer

ROLES = ("system", "user", "assistant")
"""One token each, without a space before them."""

_WORD_LIST = (
    "a an and are as at be blue bright but by can cat clear day dog for from good green has have he hear her here "
    "high his home I in is it light like long look low man many more my new night no not of old on one or out over "
    "picture quiet red river round sea see she short slow small so some sound that the there they this time to tree "
    "two up very voice was water we what when white wind with yes you"
)
WORDS = tuple(_WORD_LIST.split())
"""One token each, with a space before them: the words that tiny models answer with."""

PUNCTUATION = (".", ",", "?", "!")

_QWEN3_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> "
    "<|video_pad|> <|audio_start|> <|audio_end|> <|audio_pad|> <tts_pad> <tts_text_bos> <tts_text_eod>"
)
_QWEN2_5_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|AUDIO|> <|audio_bos|> <|audio_eos|> <|vision_bos|> <|vision_eos|> "
    "<|vision_pad|> <|IMAGE|> <|VIDEO|> <tts_pad> <tts_text_bos> <tts_text_eod> <tts_bos_ethan> <tts_bos_aiden>"
)


@dataclass(frozen=True)
class Dialect:
    """The special tokens of a family of models.

    Attributes:
        named_tokens: Attributes that the family's processor reads from the tokenizer.
        special_tokens: All of them, in the order of their ids, after those of the words.
    """

    named_tokens: dict[str, str]
    special_tokens: tuple[str, ...]

    @property
    def chat_template(self) -> str:
        """Renders the parts of a message in their order, media as placeholders."""
        names = self.named_tokens
        vision, audio = (names[f"{kind}_bos_token"] + "{}" + names[f"{kind}_eos_token"] for kind in ("vision", "audio"))
        placeholders = {
            "IMAGE": vision.format(names["image_token"]),
            "VIDEO": vision.format(names["video_token"]),
            "AUDIO": audio.format(names["audio_token"]),
        }
        return string.Template(CHAT_TEMPLATE).substitute(placeholders)


QWEN3 = Dialect(
    named_tokens={
        "image_token": "<|image_pad|>",
        "audio_token": "<|audio_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    },
    special_tokens=tuple(_QWEN3_TOKENS.split()),
)

QWEN2_5 = Dialect(
    named_tokens={
        "image_token": "<|IMAGE|>",
        "audio_token": "<|AUDIO|>",
        "video_token": "<|VIDEO|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    },
    special_tokens=tuple(_QWEN2_5_TOKENS.split()),
)
"""The last two start the text of two of the speakers, instead of `<tts_text_bos>`."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ("image", "image_url") or "image" in part or "image_url" in part -%}
$IMAGE
{%- elif part.type in ("video", "video_url") or "video" in part -%}
$VIDEO
{%- elif part.type in ("audio", "audio_url", "input_audio") or "audio" in part -%}
$AUDIO
{%- elif "text" in part -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def make_tokenizer(dialect: Dialect = QWEN3) -> Qwen2Tokenizer:
    """The tokenizer of all tiny checkpoints of a dialect. `<|im_end|>` ends a turn, `<|endoftext|>` pads."""
    vocab, merges = byte_vocabulary()
    no_unknown: Any = None  # every byte is known; the constructor's annotation says str
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=no_unknown,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=32768,
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in dialect.special_tokens])
    tokenizer.chat_template = dialect.chat_template
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, path: Path, dialect: Dialect = QWEN3) -> None:
    """Writes tokenizer.json, tokenizer_config.json (with the named tokens) and chat_template.jinja."""
    tokenizer.save_pretrained(path)
    config_file = path / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    # A dict, not a list: only then does transformers offer them as attributes of the tokenizer.
    config["extra_special_tokens"] = dialect.named_tokens
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def token_id(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    """The id of `text`, which must be exactly one token."""
    (token,) = tokenizer.encode(text, add_special_tokens=False)
    return token


def token_ids(tokenizer: PreTrainedTokenizerFast, names: dict[str, str]) -> dict[str, int]:
    """The fields of a configuration that name special tokens, as ids."""
    return {name: token_id(tokenizer, text) for name, text in names.items()}


def generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    im_end, endoftext = token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")
    return GenerationConfig(eos_token_id=[im_end, endoftext], pad_token_id=endoftext)


def padded_vocab_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Rows of a model's embedding: more than tokens, as in the real checkpoints."""
    return (len(tokenizer) // 64 + 1) * 64


def answer_token_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Tokens that tiny models answer with: words, punctuation and line breaks; no special token."""
    words = [" " + word for word in WORDS]
    return sorted({token_id(tokenizer, text) for text in (*words, *PUNCTUATION, "\n")})


def byte_vocabulary() -> tuple[dict[str, int], Any]:
    """256 bytes, then one merge for each prefix of each word.

    All words begin with a space, so that only the first symbol of a word grows while it is merged: merges of other
    words do not interfere. The roles come last, so that they do not split a word.
    """
    space = "\u0120"  # how byte-level BPE writes a space
    symbols = sorted(ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(symbols)}
    merges: list[tuple[str, str]] = []
    for word in (*(space + word for word in WORDS), *ROLES):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    return vocab, merges
