# SPDX-License-Identifier: Apache-2.0
"""A tokenizer with one token for each word of the language; all else is bytes.

Text is converted to lower case. Words with a capital letter are tokens that only the model writes: at the beginning of
its answers.
"""

import re

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from coloured_shapes.language import WORDS
from vllm_omni.testing.tiny.tokenizer import QWEN3, ROLES

SPACE = "\u0120"
"""How byte-level BPE writes a space."""
_PART = re.compile(r" ?[A-Za-z]+| ?[^ A-Za-z]")


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = [word.lower() for word in WORDS]
    tokens = [*sorted(ByteLevel.alphabet()), *words, *(SPACE + word for word in words), *ROLES]
    tokens += [*(word.capitalize() for word in words), SPACE + "I"]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=32768
    )
    fast.add_tokens([AddedToken(token, special=True, normalized=False) for token in QWEN3.special_tokens])
    fast.chat_template = QWEN3.chat_template
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The tokens of text as it is read: in lower case."""
    return tokenizer.encode(text, add_special_tokens=False)


def encode_answer(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The tokens that the model shall write: words as they are, with their capital letters."""
    vocab = tokenizer.get_vocab()
    ids = []
    for part in _PART.findall(text):
        exact = part.replace(" ", SPACE)
        ids += [vocab[exact]] if exact in vocab else encode(tokenizer, part)
    return ids


def make_embeddings(tokenizer: PreTrainedTokenizerFast, num_rows: int, hidden: int) -> torch.Tensor:
    """Fixed embeddings of the thinker, `[num_rows, hidden]`: thinker and talker can so be trained at the same time.

    Random, and alike for the forms of one word: after a space, without, and with a capital letter.
    """
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(num_rows, hidden, generator=generator)
    vocab = tokenizer.get_vocab()
    for word in (word.lower() for word in WORDS):
        base = rows[vocab[SPACE + word]]
        for form in {word, word.capitalize()} - {SPACE + word}:
            rows[vocab[form]] = 0.9 * base + 0.44 * rows[vocab[form]]
    return 0.25 * rows
