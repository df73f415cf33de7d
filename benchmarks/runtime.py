# SPDX-License-Identifier: Apache-2.0
"""What the runtime costs: hops, starts, idle pipelines, requests that do nothing, and a storm of aborts.

    python benchmarks/runtime.py [--only hop start ...] [--output FILE.json] [--quick]

Everything that we are compared with is measured in the same run. What each ratio is, and which way is better, is said
below the table; most are costs, so that, unlike in the other benchmarks, less is better.
"""

from collections.abc import Callable

from report import Report, make_parser
from runtime_parts.hop import measure_hops
from runtime_parts.idle import measure_idle
from runtime_parts.start import measure_start
from runtime_parts.storm import measure_storm
from runtime_parts.throughput import measure_throughput
from transformers.utils import logging

PARTS: dict[str, Callable[[Report, bool], None]] = {
    "hop": measure_hops,
    "throughput": measure_throughput,
    "idle": measure_idle,
    "start": measure_start,
    "storm": measure_storm,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure; default: all")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    report = Report("runtime", {"quick": str(args.quick), "parts": " ".join(args.only)})
    for name in args.only:
        PARTS[name](report, args.quick)
    report.finish(args.output)


if __name__ == "__main__":
    main()
