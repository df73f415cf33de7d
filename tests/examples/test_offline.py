# SPDX-License-Identifier: Apache-2.0
"""Each example without a server is run on a pipeline of a tiny model, and the files that it wrote are decoded."""

import ast
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from tests.examples.running import decode_video, read_wav, run_example
from vllm_omni import OmniLLM
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.entrypoints import omni_base
from vllm_omni.entrypoints.pipeline import Pipeline
from vllm_omni.testing.media import make_image

pytestmark = pytest.mark.slow

# Greedy, and short.
OVERRIDES = {
    "thinker": {"default_sampling_params": {"temperature": 0.0, "max_tokens": 12}},
    "talker": {"default_sampling_params": {"temperature": 0.0, "max_tokens": 24}},
}


@contextmanager
def lent(model: Path, **arguments: object) -> Iterator[OmniLLM]:
    """A pipeline. Examples that open one for this model in this block get this one, and it stays open."""
    llm = OmniLLM(str(model), dtype="float32", **arguments)
    pipeline, launch = llm._pipeline, omni_base.launch_pipeline

    def lend(args: OmniArgs, *rest: object) -> Pipeline:
        return pipeline if args.model == str(model) else launch(args, *rest)  # type: ignore[arg-type]

    with (
        llm,
        mock.patch.object(omni_base, "launch_pipeline", lend),
        mock.patch.object(pipeline.orchestrator, "close"),
    ):
        yield llm


@pytest.fixture(scope="module")
def speaking(tiny_qwen3_omni_moe: Path) -> Iterator[OmniLLM]:
    sizes = {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}
    with lent(tiny_qwen3_omni_moe, stage_overrides=OVERRIDES, **sizes) as llm:
        yield llm


@pytest.fixture(scope="module")
def diffusion_llm(tiny_diffusion: Callable[[str], Path]) -> Iterator[OmniLLM]:
    with lent(tiny_diffusion("z_image")) as llm:
        yield llm


def chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_is_saved_spoken(speaking, tiny_qwen3_omni_moe, tmp_path, capsys):
    def answer_of(name: str, *arguments: object) -> tuple[str, np.ndarray]:
        path = tmp_path / name
        run_example("offline/chat_speech.py", "Why?", f"--model={tiny_qwen3_omni_moe}", f"--output={path}", *arguments)
        return capsys.readouterr().out.split("\nspeech:")[0], read_wav(path)

    make_image(1).save(tmp_path / "picture.png")
    text, speech = answer_of("answer.wav")
    written, spoken = speaking.generate(chat("Why?"), use_tqdm=False)
    assert text == f"text:   {written.outputs[0].text}"
    assert np.abs(speech / 32767 - spoken.multimodal_output["audio"].numpy()).max() < 2 / 32767
    assert answer_of("seen.wav", f"--image={tmp_path / 'picture.png'}")[0] != text


def test_several_answers_come_as_they_are_made(speaking, tiny_qwen3_omni_moe, capsys):
    run_example("offline/streaming.py", "Why?", "Who?", f"--model={tiny_qwen3_omni_moe}")
    lines = capsys.readouterr().out.splitlines()
    for number, question in enumerate(("Why?", "Who?")):
        written, spoken = speaking.generate(chat(question), use_tqdm=False)
        own = [line.removeprefix(f"[{number}] ") for line in lines if line.startswith(f"[{number}] ")]
        (started,) = [line for line in own if line.startswith("speech after")]
        own.remove(started)
        assert own.pop() == f"done, {spoken.multimodal_output['audio'].numel()} samples of speech"
        assert "".join(map(ast.literal_eval, own)) == written.outputs[0].text


def test_a_file_of_questions(speaking, tiny_qwen3_omni_moe, tmp_path):
    questions, answers = tmp_path / "questions.txt", tmp_path / "answers.jsonl"
    questions.write_text("Why?\nWho?\nWhere?\n")
    model = f"--model={tiny_qwen3_omni_moe}"
    run_example("offline/batch.py", questions, f"--output={answers}", "--max-tokens=12", model)
    found = {line["line"]: line for line in map(json.loads, answers.read_text().splitlines())}
    assert [found[number]["question"] for number in (1, 2, 3)] == ["Why?", "Who?", "Where?"]
    for line in found.values():
        (alone,) = speaking.generate({"prompt": chat(line["question"]), "modalities": ["text"]}, use_tqdm=False)
        assert line["answer"] == alone.outputs[0].text


def test_a_batch_continues_and_keeps_what_failed(speaking, tiny_qwen3_omni_moe, tmp_path):
    questions, answers = tmp_path / "questions.txt", tmp_path / "answers.jsonl"
    long = "why " * 2000
    questions.write_text(f"Why?\n{long}\nWhere?\nHow?\n")
    first = json.dumps({"line": 1, "question": "Why?", "answer": "So\u2028or so."}, ensure_ascii=False)
    changed = json.dumps({"line": 4, "question": "Who?", "answer": "I."})
    answers.write_text(f'{first}\n{changed}\n{{"line": 3, "quest', encoding="utf-8")
    for expected in ([1, 4, 3, 4, 2], [1, 4, 3, 4, 2, 2]):
        run_example(
            "offline/batch.py", questions, f"--output={answers}", "--max-tokens=2", f"--model={tiny_qwen3_omni_moe}"
        )
        lines = [json.loads(line) for line in answers.read_bytes().splitlines()]
        assert sorted(line["line"] for line in lines) == sorted(expected)
        assert {line["line"] for line in lines if "error" in line} == {2}
    assert lines[0] == json.loads(first) and "prompt 0: " not in lines[1]["answer"]


def test_images(diffusion_llm, tiny_diffusion, tmp_path, capsys):
    made, edited = tmp_path / "made.png", tmp_path / "edited.png"
    arguments = (f"--model={tiny_diffusion('z_image')}", "--steps=2", "--seed=7")
    run_example("offline/image.py", "A hen.", "--size=64x32", "--n=2", f"--output={made}", *arguments)
    assert "image 1: step 2 of 2" in capsys.readouterr().out
    settings = {"width": 64, "height": 32, "num_outputs_per_prompt": 2, "num_inference_steps": 2, "seed": 7}
    (output,) = diffusion_llm.generate("A hen.", settings, use_tqdm=False)
    for path, image in zip((made, tmp_path / "made-1.png"), output.images, strict=True):
        assert np.array_equal(np.asarray(Image.open(path)), np.asarray(image))

    run_example("offline/image_edit.py", made, "At night.", "--strength=0.5", f"--output={edited}", *arguments)
    assert Image.open(edited).size == (64, 32)
    assert not np.array_equal(np.asarray(Image.open(edited)), np.asarray(Image.open(made)))


def test_a_video(tiny_diffusion, tmp_path):
    film, model = tmp_path / "film.mp4", tiny_diffusion("wan")
    with lent(model):
        size = ("--size=64x32", "--frames=5", "--steps=2")
        run_example("offline/video.py", "A boat.", *size, f"--model={model}", f"--output={film}")
    assert decode_video(film).shape == (5, 32, 64, 3)
