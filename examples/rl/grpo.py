# SPDX-License-Identifier: Apache-2.0
"""GRPO with rollouts of a pipeline: transformers trains, vllm_omni samples, and each step's weights go back to it.

    python examples/rl/grpo.py               # the omni model of coloured-shapes, minutes on two cores
    python examples/rl/grpo.py --compare     # and tokens per second of both, of the same answers

The model sees pictures, and learns to answer questions of a form that it was not trained with. The reward is 1 for the
right answer. One line for each step: the mean reward, the weights, and how far the sampled tokens' log-probabilities
are from the trainer's. See https://arxiv.org/abs/2402.03300 for the method.
"""

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoProcessor, Qwen3OmniMoeForConditionalGeneration

from coloured_shapes import MODELS
from coloured_shapes.language import COLOURS, random_scene
from coloured_shapes.pictures import draw
from vllm_omni import OmniLLM, OmniRequestOutput

T = TypeVar("T")

PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"
NUM_QUESTIONS = 8
"""Of a step."""
GROUP_SIZE = 8
"""Answers to a question; each is compared with the others."""
NUM_TOKENS = 16
CLIP = 0.2
LEARNING_RATE = 1e-4


@dataclass
class Question:
    """Attributes: `inputs`: the prompt as transformers takes it."""

    picture: Image.Image
    text: str
    answer: str
    inputs: dict[str, torch.Tensor]

    @classmethod
    def make(cls, rng: random.Random, processor: Any) -> "Question":
        while True:
            scene = random_scene(rng)
            shape = rng.choice(scene.shapes)
            if len(scene.find(kind=shape.kind)) == 1:
                break
        colours = [shape.colour, rng.choice([colour for colour in COLOURS if colour != shape.colour])]
        rng.shuffle(colours)
        text = PROMPT.format(f"Is the {shape.kind} {colours[0]} or {colours[1]}?")
        picture = draw(rng, scene)
        inputs = dict(processor(text=text, images=[picture], return_tensors="pt"))
        return cls(picture, text, f"The {shape.kind} is {shape.colour}.", inputs)

    def rows(self, num_rows: int) -> dict[str, torch.Tensor]:
        """A batch of the same prompt."""
        return {name: tensor.repeat(num_rows, *[1] * (tensor.ndim - 1)) for name, tensor in self.inputs.items()}


def rollout(llm: OmniLLM, questions: list[Question], **sampling: Any) -> list[OmniRequestOutput]:
    prompts: list[Any] = [
        {"prompt": each.text, "multi_modal_data": {"image": each.picture}, "modalities": ["text"]} for each in questions
    ]
    params = {"max_tokens": NUM_TOKENS, "logprobs": 0, **sampling}
    return llm.generate(prompts, [params, None, None], use_tqdm=False)


def logprobs_of(model: torch.nn.Module, question: Question, replies: list[list[int]]) -> list[torch.Tensor]:
    """For each reply `[num_tokens]`, with gradients."""
    size = max(map(len, replies))
    tokens = torch.tensor([reply + [0] * (size - len(reply)) for reply in replies])
    mask = torch.tensor([[1] * len(reply) + [0] * (size - len(reply)) for reply in replies])
    rows = question.rows(len(replies))
    rows["input_ids"] = torch.cat([rows["input_ids"], tokens], 1)
    rows["attention_mask"] = torch.cat([rows["attention_mask"], mask], 1)
    logprobs = model(**rows).logits[:, -size - 1 : -1].log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    return [row[: len(reply)] for row, reply in zip(logprobs, replies, strict=True)]


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    questions: list[Question],
    outputs: list[OmniRequestOutput],
) -> tuple[float, float]:
    """Returns the mean reward, and the largest difference of log-probabilities."""
    optimizer.zero_grad()
    rewards, difference = [], 0.0
    for question, output in zip(questions, outputs, strict=True):
        assert output.prompt_token_ids == question.inputs["input_ids"][0].tolist()
        group = torch.tensor([float(reply.text.strip() == question.answer) for reply in output.outputs])
        advantages = (group - group.mean()) / (group.std() + 1e-4)
        rewards.append(group.mean().item())
        replies = [list(reply.token_ids) for reply in output.outputs]
        gain = torch.zeros(())
        for reply, new, advantage in zip(
            output.outputs, logprobs_of(model, question, replies), advantages, strict=True
        ):
            assert reply.logprobs is not None
            pairs = zip(reply.logprobs, reply.token_ids, strict=True)
            sampled = torch.tensor([each[token].logprob for each, token in pairs])
            difference = max(difference, (new.detach() - sampled).abs().max().item())
            ratio = (new - sampled).exp()
            gain = gain + torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        (-gain / (len(outputs) * GROUP_SIZE)).backward()
    optimizer.step()
    return sum(rewards) / len(rewards), difference


def compare(model: Any, end_id: int, llm: OmniLLM, questions: list[Question]) -> None:
    """Prints how fast rollouts are, and transformers with a batch for each question, of greedy answers."""
    for _ in range(2):  # The first round warms up.
        outputs, ours = timed(rollout, llm, [each for each in questions for _ in range(GROUP_SIZE)], temperature=0.0)
        made, theirs = timed(generate, model, end_id, questions)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    expected = [
        reply[: reply.index(end_id) + 1 if end_id in reply else None]
        for batch, question in zip(made, questions, strict=True)
        for reply in batch[:, question.inputs["input_ids"].shape[1] :].tolist()
    ]
    num_equal = sum(answer == reply for answer, reply in zip(answers, expected, strict=True))
    count = sum(map(len, answers))
    print(
        f"tokens per second: {count / ours:.0f}, transformers {count / theirs:.0f}; equal replies: {num_equal} of "
        f"{len(answers)}",
        flush=True,
    )


def generate(model: Any, end_id: int, questions: list[Question]) -> list[torch.Tensor]:
    """Prompts `[rows, tokens]`, with the replies after them."""
    settings = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": end_id, "pad_token_id": end_id}
    return [model.generate(**question.rows(GROUP_SIZE), **settings) for question in questions]


def timed(function: Callable[..., T], *args: Any, **kwargs: Any) -> tuple[T, float]:
    started = time.perf_counter()
    return function(*args, **kwargs), time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--compare", action="store_true", help="first compare rollouts with transformers' generate")
    args = parser.parse_args()
    checkpoint = Path(MODELS.checkpoints, "shapes")
    processor = AutoProcessor.from_pretrained(checkpoint)
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    thinker: Any = model.thinker
    optimizer = torch.optim.AdamW(thinker.model.parameters(), LEARNING_RATE, weight_decay=0)
    rng = random.Random(0)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # Stages then read the weights as memory.
    with tempfile.TemporaryDirectory(dir=memory, prefix="grpo-") as made, OmniLLM(str(checkpoint)) as llm:
        if args.compare:
            few = [Question.make(rng, processor) for _ in range(4)]
            compare(thinker, model.config.im_end_token_id, llm, few)
        for step in range(args.steps):
            questions = [Question.make(rng, processor) for _ in range(NUM_QUESTIONS)]
            sampling = {"n": GROUP_SIZE, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": step}
            outputs = rollout(llm, questions, **sampling)
            version = outputs[0].stage_metrics[0].weight_version
            reward, difference = train_step(thinker, optimizer, questions, outputs)
            print(f"step {step}: reward {reward:.3f}, weights {version}, difference {difference:.1e}", flush=True)
            folder = Path(made, f"step-{step}")
            folder.mkdir()
            weights = {f"thinker.{name}": weight for name, weight in thinker.state_dict().items()}
            save_file(weights, folder / "model.safetensors")  # The other stages' stay as they were.
            llm.start_weight_update()
            llm.update_weights({"update_info": {"weights_path": str(folder)}})
            llm.finish_weight_update(f"step-{step}")
            shutil.rmtree(Path(made, f"step-{step - 1}"), ignore_errors=True)  # The last one is for a restart.


if __name__ == "__main__":
    main()
