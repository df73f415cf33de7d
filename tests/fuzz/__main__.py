# SPDX-License-Identifier: Apache-2.0
"""Sends many bad requests to servers that it starts:  python -m tests.fuzz --requests 10000 [--kinds omni ...]

Exits with 1 if a request was answered wrongly or not at all, or if something leaked.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.bad_requests import MAKERS
from tests.fuzz.campaign import Campaign, Summary
from tests.servers import SMALL_CSM, SMALL_VLLM, RunningServer

MODELS = {"omni": "qwen3_omni_moe", "voice": "csm", "image": "z_image", "video": "wan"}
FLAGS = {
    "omni": (*SMALL_VLLM, "--mm-processor-cache-gb=0.1"),  # It would grow by 4 GiB, and hide what leaks.
    "voice": SMALL_CSM,
}
NUM_OPERATIONS = 12  # about the number of operations of a server that have parameters
MAX_GROWTH = 256 << 20


def fuzz(kind: str, count: int, seed: int, folder: Path, described: float, model: Path | str | None = None) -> Summary:
    from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint  # imports torch

    if model is None:
        model = write_tiny_checkpoint(MODELS[kind], folder / kind)
    server = RunningServer(model, *FLAGS.get(kind, ()), log=folder / f"{kind}.log")
    try:
        num_described = round(count * described)
        campaign = Campaign(kind, server.port, server.process.pid, seed)
        return campaign.run(count - num_described, num_described // (2 * NUM_OPERATIONS))
    finally:
        code = server.stop(timeout=120)
        print(f"{kind}: the server ended with {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1000, help="approximate total for all servers (1000)")
    parser.add_argument("--kinds", nargs="+", choices=list(MAKERS), default=list(MAKERS), help="servers to test")
    parser.add_argument("--model", help="of the only kind, such as shapes; default: a tiny one with random weights")
    parser.add_argument(
        "--described", type=float, default=0.5, help="share that schemathesis makes, which takes minutes (0.5)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="keep the servers' output in this folder")
    args = parser.parse_args()
    if args.model is not None and len(args.kinds) != 1:
        parser.error("--model is that of one kind: name the kind with --kinds")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # It would keep the compiled kernels of 1,024 shapes, up to 100 MiB in a stage, and hide what leaks.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for kind in args.kinds:
            started = time.monotonic()
            summary = fuzz(kind, args.requests // len(args.kinds), args.seed, folder, args.described, args.model)
            growth = summary.after.memory - summary.before.memory
            print(f"== {kind}, {time.monotonic() - started:.0f} s\n{summary}", flush=True)
            failed |= bool(summary.faults) or growth > MAX_GROWTH or summary.after.files > summary.before.files + 8
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
