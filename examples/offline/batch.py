# SPDX-License-Identifier: Apache-2.0
"""Answers a file of questions, one a line, in one batch.

python examples/offline/batch.py questions.txt --output answers.jsonl

Each answer is written when it is complete. Run it again, and it continues: it asks those questions that the file has no
answer to, as well as those that failed.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_omni import CompletedEvent, ErrorEvent, OmniLLM


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    questions = args.questions.read_text(encoding="utf-8").splitlines()
    answered = read_answered(args.output)
    lines = [number for number, question in enumerate(questions, 1) if answered.get(number) != question]
    conversations = [[{"role": "user", "content": questions[number - 1]}] for number in lines]
    # One entry for each stage, in the order of the stage configuration; None: its defaults.
    sampling = [{"temperature": 0.0, "max_tokens": args.max_tokens}, None, None]
    num_failed = 0
    with OmniLLM(args.model) as llm, args.output.open("a", encoding="utf-8") as file:
        # The text stage only.
        for event in llm.chat(conversations, sampling, modalities=["text"], stream=True):
            if not event.is_terminal:
                continue
            number = lines[event.prompt_index]
            line: dict[str, Any] = {"line": number, "question": questions[number - 1]}
            if isinstance(event, CompletedEvent):
                line["answer"] = event.outputs[0].outputs[0].text
            elif isinstance(event, ErrorEvent):
                line["error"] = str(event.error)
                num_failed += 1
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
    print(f"{len(lines) - num_failed} answers, {num_failed} failed: {args.output}")


def read_answered(output: Path) -> dict[int, str]:
    """The questions that the file has answers to, by their lines. Removes a line that was not written to its end."""
    if not output.exists():
        return {}
    written = output.read_bytes()
    whole = written[: written.rfind(b"\n") + 1]
    if whole != written:
        output.write_bytes(whole)
    lines = map(json.loads, whole.splitlines())  # Of bytes: a text may have other ends of lines than these.
    return {line["line"]: line["question"] for line in lines if "answer" in line}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--output", type=Path, default=Path("answers.jsonl"))
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--model", default="shapes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
