# SPDX-License-Identifier: Apache-2.0
"""GRPO of an omni model: its thinker learns from right and wrong answers about pictures.

    python examples/rl/grpo_shapes.py    # the omni model of coloured-shapes, a minute on two cores

The model answers questions in the words that it was trained with; here it learns to answer in others. The reward is 1
for the right answer, and 0 for any other. One line for each step: the mean reward, the weights, and how far the sampled
tokens' log-probabilities are from the trainer's. `grpo.py` is the same for a text model, and says more of the method.
"""

import argparse
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoProcessor, Qwen3OmniMoeThinkerForConditionalGeneration

from coloured_shapes import MODELS
from coloured_shapes.language import COLOURS, random_scene
from coloured_shapes.pictures import draw
from vllm_omni import OmniLLM, OmniRequestOutput

PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"
NUM_QUESTIONS = 8
"""Of a step."""
GROUP_SIZE = 8
"""Answers to a question; each is compared with the others."""
SAMPLING: dict[str, Any] = {"n": GROUP_SIZE, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": 0}
CLIP = 0.2
LEARNING_RATE = 5e-5


@dataclass
class Question:
    prompt: str
    picture: Image.Image
    answer: str


def random_question(rng: random.Random) -> Question:
    while True:
        scene = random_scene(rng)
        shape = rng.choice(scene.shapes)
        if len(scene.find(kind=shape.kind)) == 1:
            break
    colours = [shape.colour, rng.choice([colour for colour in COLOURS if colour != shape.colour])]
    rng.shuffle(colours)
    prompt = PROMPT.format(f"Is the {shape.kind} {' or '.join(colours)}?")
    return Question(prompt, draw(rng, scene), f"The {shape.kind} is {shape.colour}.")


def rollout(llm: OmniLLM, questions: Sequence[Question], seed: int) -> list[OmniRequestOutput]:
    prompts: list[Any] = [
        {"prompt": each.prompt, "multi_modal_data": {"image": each.picture}, "modalities": ["text"]}
        for each in questions
    ]
    return llm.generate(prompts, [{**SAMPLING, "max_tokens": 16, "seed": seed}, None, None], use_tqdm=False)


def log_probs_of(
    thinker: torch.nn.Module, processor: Any, question: Question, replies: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Of each reply to a question, `[tokens]`, with gradients."""
    inputs = dict(
        processor(text=[question.prompt] * len(replies), images=[question.picture] * len(replies), return_tensors="pt")
    )
    tokens = [torch.tensor(reply) for reply in replies]
    rows = pad_sequence(tokens, batch_first=True)
    mask = pad_sequence([torch.ones_like(reply) for reply in tokens], batch_first=True)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], rows], 1)
    inputs["attention_mask"] = torch.cat([inputs["attention_mask"], mask], 1)
    logits = thinker(**inputs).logits[:, -rows.shape[1] - 1 : -1]
    log_probs = logits.log_softmax(-1).gather(2, rows[..., None])[..., 0]
    return [row[: len(reply)] for row, reply in zip(log_probs, replies, strict=True)]


def train_step(
    thinker: torch.nn.Module, processor: Any, optimizer: torch.optim.Optimizer, questions: Sequence[Question],
    outputs: Sequence[OmniRequestOutput],
) -> tuple[float, float]:  # fmt: skip
    """Returns the mean reward, and the largest difference of log-probabilities."""
    optimizer.zero_grad()
    rewards, difference = [], 0.0
    for question, output in zip(questions, outputs, strict=True):
        group = torch.tensor([float(reply.text.strip() == question.answer) for reply in output.outputs])
        advantages = (group - group.mean()) / (group.std() + 1e-4)
        rewards.append(group.mean().item())
        log_probs = log_probs_of(thinker, processor, question, [reply.token_ids for reply in output.outputs])
        gain = torch.zeros(())
        for reply, new, advantage in zip(output.outputs, log_probs, advantages, strict=True):
            assert reply.logprobs is not None
            sampled = torch.tensor([at[i].logprob for at, i in zip(reply.logprobs, reply.token_ids, strict=True)])
            difference = max(difference, (new.detach() - sampled).abs().max().item())
            ratio = (new - sampled).exp()
            gain = gain + torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        (-gain / (NUM_QUESTIONS * GROUP_SIZE)).backward()
    optimizer.step()
    return sum(rewards) / len(rewards), difference


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    checkpoint = str(Path(MODELS.checkpoints, "shapes"))
    processor = AutoProcessor.from_pretrained(checkpoint)
    thinker: Any = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    thinker.requires_grad_(False)
    thinker.model.requires_grad_(True)  # not what hears and sees
    optimizer = torch.optim.AdamW(thinker.model.parameters(), LEARNING_RATE, weight_decay=0)
    rng = random.Random(0)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # Stages then read the weights as memory.
    with tempfile.TemporaryDirectory(dir=memory, prefix="grpo-") as made, OmniLLM(checkpoint) as llm:
        for step in range(args.steps):
            questions = [random_question(rng) for _ in range(NUM_QUESTIONS)]
            outputs = rollout(llm, questions, step)
            version = outputs[0].stage_metrics[0].weight_version
            reward, difference = train_step(thinker, processor, optimizer, questions, outputs)
            print(f"step {step}: reward {reward:.3f}, weights {version}, difference {difference:.1e}", flush=True)
            folder = Path(made, f"step-{step}")
            folder.mkdir()
            weights = {f"thinker.{name}": weight for name, weight in thinker.state_dict().items()}
            save_file(weights, folder / "model.safetensors")
            llm.start_weight_update()
            llm.update_weights({"update_info": {"weights_path": str(folder)}}, stage="thinker")
            llm.finish_weight_update(f"step-{step}")
            shutil.rmtree(Path(made, f"step-{step - 1}"), ignore_errors=True)  # The last one is for a restart.


if __name__ == "__main__":
    main()
