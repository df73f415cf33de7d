# SPDX-License-Identifier: Apache-2.0
"""`OmniLLM.chat`: the same results as for a prompt in the format of the model's chat template."""

import asyncio
import base64
import inspect
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.entrypoints.fake_pipelines import running
from vllm_omni import AsyncOmniLLM, OmniLLM
from vllm_omni.entrypoints.openai.audio_formats import encode_audio
from vllm_omni.errors import InvalidRequestError
from vllm_omni.events import CompletedEvent
from vllm_omni.testing.media import SAMPLE_RATE, make_audio, make_image

GROUP = "llm"
GREEDY = [{"temperature": 0.0, "max_tokens": 12}, {"temperature": 0.0, "max_tokens": 16}, None]
QUESTION = [{"role": "user", "content": "Why is the sea blue?"}]
RENDERED = "<|im_start|>user\nWhy is the sea blue?<|im_end|>\n<|im_start|>assistant\n"


def same(ours: list[Any], expected: list[Any]) -> bool:
    """Whether two results have the same prompt and text, and the same speech but for the last bits of windows that were
    cut elsewhere."""
    (text, speech), (expected_text, expected_speech) = ours, expected
    audio, expected_audio = speech.multimodal_output["audio"], expected_speech.multimodal_output["audio"]
    return (
        text.prompt_token_ids == expected_text.prompt_token_ids
        and text.outputs[0].token_ids == expected_text.outputs[0].token_ids
        and audio.shape == expected_audio.shape
        and torch.allclose(audio, expected_audio, rtol=0, atol=1e-4)
    )


def test_a_conversation_equals_its_rendered_prompt(talking_llm: OmniLLM) -> None:
    answer = talking_llm.chat(QUESTION, GREEDY, use_tqdm=False)
    assert same(answer, talking_llm.generate(RENDERED, GREEDY, use_tqdm=False))
    assert answer[0].prompt == RENDERED


def test_media_in_messages_equal_multi_modal_data(talking_llm: OmniLLM) -> None:
    image, sound = make_image(seed=7), make_audio(seed=7, seconds=0.5)
    wav = base64.b64encode(encode_audio(sound, "wav", SAMPLE_RATE)).decode()
    content = [
        {"type": "image_pil", "image_pil": image},
        {"type": "input_audio", "input_audio": {"data": wav, "format": "wav"}},
        {"type": "text", "text": "What is this?"},
    ]
    answer = talking_llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    media = "<|vision_start|><|image_pad|><|vision_end|><|audio_start|><|audio_pad|><|audio_end|>"
    prompt = {
        "prompt": RENDERED.replace("Why is the sea blue?", f"{media}What is this?"),
        "multi_modal_data": {"image": image, "audio": (sound, SAMPLE_RATE)},
    }
    expected = talking_llm.generate(prompt, GREEDY, use_tqdm=False)
    assert answer[0].prompt_token_ids == expected[0].prompt_token_ids
    assert answer[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_several_conversations_with_options(talking_llm: OmniLLM) -> None:
    earlier = [*QUESTION, {"role": "assistant", "content": "It is not."}, {"role": "user", "content": "No?"}]
    system = {"role": "system", "content": "Be brief."}
    conversations = [QUESTION, earlier, [system, *QUESTION]]
    answers = talking_llm.chat(conversations, GREEDY, use_tqdm=False, modalities=["text"])
    assert [answer.final_output_type for answer in answers] == ["text"] * 3
    alone = [talking_llm.chat(one, GREEDY, use_tqdm=False, modalities=["text"])[0] for one in conversations]
    assert [answer.prompt for answer in answers] == [answer.prompt for answer in alone]
    assert len({answer.prompt for answer in answers}) == 3
    voices = [
        talking_llm.chat(QUESTION, GREEDY, use_tqdm=False, additional_information={"speaker": voice})
        for voice in talking_llm.voices[:2]
    ]
    assert not same(*voices)


def test_template_and_its_variables(talking_llm: OmniLLM) -> None:
    prefilled = [*QUESTION, {"role": "assistant", "content": "Because"}]
    continued = talking_llm.chat(
        prefilled, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True, modalities=["text"]
    )
    assert continued[0].prompt == RENDERED + "Because"
    own = talking_llm.chat(QUESTION, GREEDY, use_tqdm=False, chat_template="{{ tone }}: {{ messages[0].content }}",
                           chat_template_kwargs={"tone": "calm"}, modalities=["text"])  # fmt: skip
    assert own[0].prompt == "calm: Why is the sea blue?"


def test_stream_and_async_equal_chat(talking_llm: OmniLLM, talking_async_llm: AsyncOmniLLM) -> None:
    whole = talking_llm.chat(QUESTION, GREEDY, use_tqdm=False)
    *events, end = talking_llm.chat(QUESTION, GREEDY, stream=True)
    assert isinstance(end, CompletedEvent) and same(end.outputs, whole)
    assert "".join(event.text for event in events) == whole[0].outputs[0].text
    *events, end = talking_llm.chat(QUESTION, GREEDY, stream=True, keep_outputs=False)
    last = [event for event in events if event.stage_id == 0][-1]
    assert end.outputs[0].outputs[0].text == last.text != whole[0].outputs[0].text

    async def main() -> Any:
        async with aclosing(talking_async_llm.generate({"messages": QUESTION}, GREEDY, stream=False)) as events:
            return [event async for event in events]

    (end,) = asyncio.run(main())
    assert same(end.outputs, whole)


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([], {}, "message"),
        ("hello", {}, r'messages must be a list of messages.*not str; write \[{"role": "user"'),
        (None, {}, "messages must be a list of messages.*not NoneType"),
        (QUESTION[0], {}, "messages must be a list of messages.*not dict"),
        (["hello"], {}, r"messages\[0\] must be a dict .* not str"),
        ([QUESTION, "hello"], {}, "messages must be a list of messages, not str"),
        ([{"content": "hello"}], {}, r"messages\[0\]\.role must be a string"),
        ([{"role": "user", "content": 5}], {}, r"messages\[0\]\.content must be a string or a list of parts, not int"),
        ([{"role": "assistant", "tool_calls": 5}], {}, r"messages\[0\]\.tool_calls must be a list, not int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "^image_url: Field required$"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": "x"}]}], {}, "messages: a part .* form"),
        ([{"role": "user", "content": [5]}], {}, r"messages\[0\]\.content: a part is a string or a dict"),
        ([{"role": "user", "content": [{"type": "smell"}]}], {}, "smell"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
            {},
            "nly base64 data UR[IL]s",
        ),
        (QUESTION, {"modalities": ["smell"]}, "cannot output 'smell'"),
        (QUESTION, {"chat_template": "{{ raise_exception('no such role') }}"}, "no such role"),
    ],
)
def test_wrong_messages_are_refused(talking_llm: OmniLLM, messages: Any, options: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        talking_llm.chat(messages, GREEDY, use_tqdm=False, **options)


def test_chat_takes_the_options_of_generate() -> None:
    options = set(inspect.signature(OmniLLM.generate).parameters) - {"prompts"}
    assert options < set(inspect.signature(OmniLLM.chat).parameters)


def test_contradicting_arguments_are_refused(talking_llm: OmniLLM, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="messages or prompt, not both"):
        talking_llm.generate({"messages": QUESTION, "prompt": "x"}, use_tqdm=False)
    with pytest.raises(ValueError, match="add_generation_prompt=False"):
        talking_llm.chat(QUESTION, continue_final_message=True)
    with (
        running(OmniLLM, tmp_path) as fake,
        pytest.raises(InvalidRequestError, match=r"no stage .* has a chat template"),
    ):
        fake.chat(QUESTION, use_tqdm=False)
