# SPDX-License-Identifier: Apache-2.0
"""What a prompt for Qwen3-TTS may hold. Its rows are tested by the speech that is made of them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_executor.models.speech import load_prompts
from vllm_omni.model_executor.prompt_processor import PromptProcessor

from .prompts import sound

DESIGN, BASE, CUSTOM = "qwen3_tts_design", "qwen3_tts_base", "qwen3_tts"


@pytest.fixture
def load(checkpoint: Callable[[str, str], Path]) -> Callable[..., PromptProcessor]:
    return lambda kind, size="default": load_prompts("qwen3_tts", checkpoint(kind, size))


@pytest.mark.parametrize(
    ("kind", "information", "message"),
    [
        (CUSTOM, {"ref_audio": sound(1, 0)}, "custom_voice, 1b7, reads no 'ref_audio'; it reads language, speaker"),
        (CUSTOM, {"speaker": "ethan"}, "unknown speaker 'ethan'; this checkpoint has .*vivian"),
        (CUSTOM, {"language": "sichuan_dialect"}, "unknown language 'sichuan_dialect'.*; this checkpoint has auto"),
        (CUSTOM, {"language": "tlh"}, "unknown language 'tlh'.*; this checkpoint has auto"),
        (CUSTOM, {"language": "cy-GB"}, "unknown language 'cy-GB'.*; this checkpoint has auto"),
        (CUSTOM, {"language": 3}, "unknown language 3; this checkpoint has auto"),
        (CUSTOM, {"non_streaming_mode": 1}, "non_streaming_mode must be True or False, not 1"),
        (CUSTOM, {"context": []}, "reads no 'context'"),
        (DESIGN, {"speaker": "ryan"}, "voice_design, 1b7, reads no 'speaker'"),
        (DESIGN, {"instructions": 3}, "instructions must be a string, not int"),
        (BASE, {"ref_audio": sound(1, 0), "instructions": "slow"}, "base, 1b7, reads no 'instructions'"),
        (BASE, {}, "the prompt has no 'ref_audio'"),
        (BASE, {"ref_text": "yes"}, "the prompt has no 'ref_audio'"),
        (BASE, {"ref_audio": sound(1, 0), "ref_text": " "}, "ref_text is empty"),
        (BASE, {"ref_audio": sound(0.05, 0)}, "ref_audio must be a sound of at least 0.053 s"),
        (BASE, {"ref_audio": sound(121, 0)}, "ref_audio must be a sound of at most 120 s"),
    ],
)
def test_wrong_fields_are_refused_by_name(
    kind: str, information: dict[str, Any], message: str, load: Callable[..., PromptProcessor]
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        load(kind)({"prompt": "hello", "additional_information": information})


def test_small_custom_voices_read_no_instructions(load: Callable[..., PromptProcessor]) -> None:
    with pytest.raises(ValueError, match="custom_voice, 0b6, reads no 'instructions'"):
        load(CUSTOM, "large")({"prompt": "hello", "additional_information": {"instructions": "slow"}})


def test_voices_are_those_of_the_checkpoint(load: Callable[..., PromptProcessor]) -> None:
    assert [load(kind).voices for kind in (CUSTOM, DESIGN, BASE)] == [("eric", "ryan", "vivian"), (), ()]
    by_name = [load(CUSTOM)({"prompt": "a", "additional_information": {"speaker": name}}) for name in ("Eric", "eric")]
    default = load(CUSTOM)({"prompt": "a"})
    for made in by_name:
        assert torch.equal(made.additional_information["rows"], default.additional_information["rows"])


@pytest.mark.parametrize(("name", "codes"), [("english", ["en", "EN", "en-US", "en_gb"]), ("chinese", ["zh", "zh-CN"])])
def test_languages_have_names_and_codes(name: str, codes: list[str], load: Callable[..., PromptProcessor]) -> None:
    rows = [
        load(CUSTOM)(
            {"prompt": "a", "additional_information": {"language": each, "speaker": "vivian"}}
        ).additional_information["rows"]
        for each in (name, name.title(), *codes, "auto")
    ]
    assert all(torch.equal(rows[0], each) for each in rows[1:-1]) and not torch.equal(rows[0], rows[-1])


def test_special_tokens_in_a_text_are_plain_text(load: Callable[..., PromptProcessor]) -> None:
    """Neither they nor a line break at the start act on the rows around the text."""
    processor = load(CUSTOM)
    plain = processor({"prompt": "a"}).additional_information["rows"]
    text = processor({"prompt": "\n<|im_end|><tts_pad>"}).additional_information["rows"]
    assert torch.equal(text[:9], plain[:9]) and torch.equal(text[-2:], plain[-2:])
    specials = [processor.tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<tts_pad>")]
    assert not torch.isin(text[9:-2, 0], torch.tensor(specials)).any()
    assert processor.tokenizer.decode(text[9:-2, 0]) == "\n<|im_end|><tts_pad>"


WORDS = (
    " the", " a", "a", " ", "\n", "!", ". ", " 12", "é", "e\u0301", "'s", "\t", "_", "你好", "\uff0c", "\u200d",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_a_text_in_pieces_has_the_ids_of_the_whole(seed: int, load: Callable[..., PromptProcessor]) -> None:
    """However it is cut: also next to spaces, line breaks and marks."""
    rng = random.Random(seed)
    text = "".join(rng.choices(WORDS, k=40)) + "."
    cuts = sorted(rng.choices(range(len(text)), k=12))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    prompt = {"additional_information": {"non_streaming_mode": False}}
    stream = load(CUSTOM).stream({"prompt": "", **prompt})  # type: ignore[typeddict-item]
    made = [stream.add(piece, is_last=False) for piece in pieces] + [stream.add("", is_last=True)]
    first, *later = [given for given in made if given is not None]
    text_ids = torch.cat([given.additional_information["text_ids"] for given in (first, *later)])
    whole = load(CUSTOM)({"prompt": text, **prompt})  # type: ignore[typeddict-item]
    assert torch.equal(first.additional_information["rows"], whole.additional_information["rows"])
    assert torch.equal(text_ids, whole.additional_information["text_ids"])
    counts = [len(given.additional_information["text_ids"]) for given in (first, *later)]
    ready = [len(first.prompt_token_ids) + sum(counts[: index + 1]) for index in range(len(counts))]
    assert [given.num_ready_tokens for given in (first, *later)] == ready
    assert len(later) > 2
