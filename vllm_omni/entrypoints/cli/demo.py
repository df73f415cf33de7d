# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni demo`: a sentence is answered in text and speech, and small trained models hear, see, speak and paint.

The first step is `talk`'s (`demo_talk.py`), the others are in the package coloured-shapes (`coloured_shapes.demo`).
Either part is left out where its packages are not installed. Every result is checked.
"""

import argparse
import io
import sys
from collections import Counter
from pathlib import Path

from vllm_omni.config.utils import find_checkpoint
from vllm_omni.entrypoints.cli.demo_results import DemoResult, write_page
from vllm_omni.entrypoints.cli.demo_talk import QUESTION, TALK, answer_sentence
from vllm_omni.errors import MissingPackageError

SHAPES = "shapes"


def run_demo(arguments: list[str]) -> None:
    """Exits with 1 if a result is wrong, or if there is none."""
    parser = argparse.ArgumentParser(
        prog="vllm-omni demo",
        description="A sentence is answered in text and speech; then two small models hear, see, speak and paint. "
        "Writes a page with everything, OUTPUT/index.html; exits with 1 if a result is wrong.",
    )
    parser.add_argument("output", nargs="?", type=Path, default=Path("demo_output"), help="default: demo_output")
    parser.add_argument("--say", default="", metavar="SENTENCE", help=f"the sentence to answer; default: {QUESTION}")
    parser.add_argument("--seed", type=int, default=0, help="of the picture, the questions and the painting")
    args = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # A language model writes emoji.
    args.output.mkdir(parents=True, exist_ok=True)
    answers = answer_sentence(args.say.strip() or QUESTION, args.output)
    results = answers + _run_shapes(args.output, args.seed)
    if not results:
        sys.exit("\nnothing was run: the packages of all steps are missing")
    page = write_page(args.output, results, TALK if answers else SHAPES)
    counts = Counter(result.verdict for result in results)
    print(f"\n{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}; see {page}")
    sys.exit(1 if counts["wrong"] else 0)


def _run_shapes(folder: Path, seed: int) -> list[DemoResult]:
    try:
        find_checkpoint(SHAPES)
    except MissingPackageError as error:
        print(f"\n[2/6] left out: {error}")
        return []
    from coloured_shapes.demo import run_shapes

    return run_shapes(folder, seed)
