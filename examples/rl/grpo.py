# SPDX-License-Identifier: Apache-2.0
"""GRPO with rollouts of a pipeline: transformers trains, vllm_omni samples, and each step's weights go back to it.

    python examples/rl/grpo.py                       # a tiny random model, two minutes on two cores
    python examples/rl/grpo.py --model MODEL         # any text model of transformers
    python examples/rl/grpo.py --compare             # and tokens per second of both, of the same tokens

The reward is what share of a reply is the letter `a`. One line for each step: the mean reward, and how far the sampled
tokens' log-probabilities are from the trainer's. See https://arxiv.org/abs/2402.03300 for the method.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM

from vllm_omni import OmniLLM, OmniRequestOutput
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

T = TypeVar("T")

PROMPTS = ["a hen", "two hens and a fox", "the fox", "what is this"]
GROUP_SIZE = 8
"""Replies to a prompt; each is compared with the others."""
NUM_TOKENS = 16
CLIP = 0.2
LEARNING_RATE = 2e-4


def reward_of(text: str) -> float:
    return text.count("a") / max(len(text), 1)


def logprobs_of(model: torch.nn.Module, output: OmniRequestOutput, tokens: list[int]) -> torch.Tensor:
    """`[num_tokens]`, with gradients, of the sampled tokens."""
    logits = model(torch.tensor([[*(output.prompt_token_ids or ()), *tokens]])).logits[0]
    rows = logits[-len(tokens) - 1 : -1].log_softmax(-1)
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, outputs: list[OmniRequestOutput]
) -> tuple[float, float]:
    """Returns the mean reward, and the largest difference of log-probabilities."""
    optimizer.zero_grad()
    rewards, difference = [], 0.0
    for output in outputs:
        group = torch.tensor([reward_of(reply.text) for reply in output.outputs])
        advantages = (group - group.mean()) / (group.std() + 1e-4)
        rewards.append(group.mean().item())
        for reply, advantage in zip(output.outputs, advantages, strict=True):
            tokens = list(reply.token_ids)
            assert reply.logprobs is not None
            sampled = torch.tensor([each[i].logprob for each, i in zip(reply.logprobs, tokens, strict=True)])
            new = logprobs_of(model, output, tokens)
            difference = max(difference, (new.detach() - sampled).abs().max().item())
            ratio = (new - sampled).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
            (-gain / (len(outputs) * GROUP_SIZE)).backward()
    optimizer.step()
    return sum(rewards) / len(rewards), difference


def compare(model: Any, llm: OmniLLM) -> None:
    """Prints how fast rollouts are, and transformers with a batch for each prompt, of greedy tokens."""
    sampling = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0}
    model.generation_config.eos_token_id = None
    prompts = [prompt for prompt in PROMPTS for _ in range(GROUP_SIZE)]
    for _ in range(2):  # The first round warms up.
        outputs, ours = timed(llm.generate, prompts, [sampling], False)
        groups = outputs[::GROUP_SIZE]
        rows = [torch.tensor([output.prompt_token_ids] * GROUP_SIZE) for output in groups]
        made, theirs = timed(generate, model, rows)
    expected = [reply for batch, each in zip(made, rows, strict=True) for reply in batch[:, each.shape[1] :].tolist()]
    equal = [list(output.outputs[0].token_ids) == reply for output, reply in zip(outputs, expected, strict=True)]
    count = len(prompts) * NUM_TOKENS
    print(
        f"tokens per second: {count / ours:.0f}, transformers {count / theirs:.0f}; equal replies: {sum(equal)} of "
        f"{len(equal)}",
        flush=True,
    )


def generate(model: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Prompts `[rows, tokens]`, with the replies after them."""
    settings = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "pad_token_id": 0}
    return [model.generate(rows, attention_mask=torch.ones_like(rows), **settings) for rows in batches]


def timed(function: Callable[..., T], *args: Any) -> tuple[T, float]:
    started = time.perf_counter()
    return function(*args), time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a folder with a text model (default: a tiny random one)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--compare", action="store_true", help="first compare rollouts with transformers' generate")
    args = parser.parse_args()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # Stages then read the weights as memory.
    with tempfile.TemporaryDirectory(dir=memory, prefix="grpo-") as made:
        checkpoint = args.model or str(write_tiny_checkpoint("qwen3", Path(made, "tiny")))
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0)
        sampling = {"n": GROUP_SIZE, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": 0}
        sampling |= {"max_tokens": NUM_TOKENS, "ignore_eos": True}
        engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
        with OmniLLM(checkpoint, **engine) as llm:
            if args.compare:
                compare(model, llm)
            for step in range(args.steps):
                outputs = llm.generate(PROMPTS, [{**sampling, "seed": step}], use_tqdm=False)
                version = outputs[0].stage_metrics[0].weight_version
                reward, difference = train_step(model, optimizer, outputs)
                print(f"step {step}: reward {reward:.3f}, weights {version}, difference {difference:.1e}", flush=True)
                folder = Path(made, f"step-{step}")
                model.save_pretrained(folder)
                llm.start_weight_update()
                llm.update_weights({"update_info": {"weights_path": str(folder)}})
                llm.finish_weight_update(f"step-{step}")
                shutil.rmtree(Path(made, f"step-{step - 1}"), ignore_errors=True)  # The last one is for a restart.


if __name__ == "__main__":
    main()
