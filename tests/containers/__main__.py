# SPDX-License-Identifier: Apache-2.0
"""Pipelines of two containers with one /dev/shm, started and killed at random:  python -m tests.containers --seconds 60

Needs root, for the namespaces. Exits with 1 if a living pipeline lost its directory, or if anything is left at the end.
"""

import argparse
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.containers.campaign import run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    summary = run(args.seconds, args.seed)
    print(
        f"{summary.starts} starts, {summary.opened} opened, {summary.kills} killed, {summary.closed} closed in order, "
        f"{summary.requests} requests\n"
        f"directories of living pipelines removed: {summary.removed}\n"
        f"left by the killed when all processes were gone: {summary.num_left}; after one more start: "
        f"{summary.left_at_end or 0}\n"
        f"other faults: {len(summary.faults)}"
    )
    for fault in summary.faults[:10]:
        print(fault)
    return int(not summary.is_good)


if __name__ == "__main__":
    sys.exit(main())
