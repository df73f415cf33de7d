# SPDX-License-Identifier: Apache-2.0
"""A small byte-level BPE tokenizer of Qwen's kind, made without any download.

The role names are one token each, as in the real tokenizer (Qwen3-Omni looks for `ids[i + 1] == user`
after `<|im_start|>`), and so are some common words, because random weights that pick among words give
an answer one can read. Everything else is spelled byte by byte. Knows nothing of any model's weights.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

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

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)

NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
"""Attributes that Qwen's omni processors read from the tokenizer."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ("image", "image_url") or "image" in part or "image_url" in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type in ("video", "video_url") or "video" in part -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type in ("audio", "audio_url", "input_audio") or "audio" in part -%}
<|audio_start|><|audio_pad|><|audio_end|>
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


def make_tokenizer() -> Qwen2Tokenizer:
    """The tokenizer all tiny checkpoints share. `<|im_end|>` ends a turn, `<|endoftext|>` pads."""
    vocab, merges = _vocabulary()
    no_unknown: Any = None  # every byte is known; the constructor's annotation says str
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=no_unknown,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=32768,
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(tokenizer: Qwen2Tokenizer, path: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json (with the named tokens) and chat_template.jinja."""
    tokenizer.save_pretrained(path)
    config_file = path / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    # A dict, not a list: only then does transformers offer them as attributes of the tokenizer.
    config["extra_special_tokens"] = NAMED_TOKENS
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def token_id(tokenizer: Qwen2Tokenizer, text: str) -> int:
    """The id of `text`, which must be exactly one token."""
    (token,) = tokenizer.encode(text, add_special_tokens=False)
    return token


def padded_vocab_size(tokenizer: Qwen2Tokenizer) -> int:
    """Rows of a model's embedding: as in the real checkpoints, somewhat more than there are tokens."""
    return (len(tokenizer) // 64 + 1) * 64


def answer_token_ids(tokenizer: Qwen2Tokenizer) -> list[int]:
    """Tokens that tiny models answer with: words, punctuation and line breaks; no special token."""
    words = [" " + word for word in WORDS]
    return sorted({token_id(tokenizer, text) for text in (*words, *PUNCTUATION, "\n")})


def _vocabulary() -> tuple[dict[str, int], Any]:
    """256 bytes, then one merge for each prefix of each word.

    All words begin with a space, so while a word is merged only its first symbol can grow: no merge of
    another word can get in the way. The roles come last, and so cannot break a word apart either.
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
