# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni demo`: a sentence is answered in text and speech, and small trained models hear, see, speak and paint.

Its parts are in the packages whose models they show (`ModelPackage.demos`). A part is left out where its packages are
not installed. Every result is checked.
"""

import argparse
import io
import pkgutil
import sys
from collections import Counter
from pathlib import Path

from vllm_omni.config.utils import find_checkpoint
from vllm_omni.entrypoints.cli.demo_results import QUESTION, DemoRun, write_page
from vllm_omni.errors import MissingPackageError
from vllm_omni.model_packages import PACKAGES_OF_REPOSITORY, find_models


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
    demos = find_models().demos
    run = DemoRun(args.say.strip() or QUESTION, args.output, args.seed, sum(demos.values()))
    for path in demos:
        pkgutil.resolve_name(path)(run)
    _name_missing_packages()
    if not run.results:
        sys.exit("\nnothing was run: the packages of all steps are missing")
    page = write_page(args.output, run.results)
    counts = Counter(result.verdict for result in run.results)
    print(f"\n{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}; see {page}")
    sys.exit(1 if counts["wrong"] else 0)


def _name_missing_packages() -> None:
    """Prints how to install the first package of this repository that is not."""
    try:
        for name in PACKAGES_OF_REPOSITORY:
            find_checkpoint(name)
    except MissingPackageError as error:
        print(f"\nleft out: {error}")
