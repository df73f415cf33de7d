# SPDX-License-Identifier: Apache-2.0
"""Answers a file of questions, one a line, in one batch.

python examples/offline/batch.py questions.txt --output answers.jsonl
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from vllm_omni import OmniLLM


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    questions = args.questions.read_text(encoding="utf-8").splitlines()
    conversations = [[{"role": "user", "content": question}] for question in questions]
    # One entry for each stage, in the order of the stage configuration; None: its defaults.
    sampling = [{"temperature": 0.0, "max_tokens": args.max_tokens}, None, None]
    with OmniLLM(args.model) as llm:
        outputs = llm.chat(conversations, sampling, modalities=["text"])  # runs the text stage only
    with args.output.open("w", encoding="utf-8") as file:
        for question, output in zip(questions, outputs, strict=True):  # in the order of the questions
            file.write(json.dumps({"question": question, "answer": output.outputs[0].text}, ensure_ascii=False) + "\n")
    print(f"{len(outputs)} answers: {args.output}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--output", type=Path, default=Path("answers.jsonl"))
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--model", default="Qwen/Qwen3-Omni-30B-A3B-Instruct")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
