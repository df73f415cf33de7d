# SPDX-License-Identifier: Apache-2.0
"""The memory of a program and its children, by process: what each has alone, and its share of what several have.

    python benchmarks/process_memory.py PID [--mappings N]

The proportional set size (PSS) of all processes together is what the program takes of the machine. `--mappings` lists
the largest ones of each process, with what it has written to them. Linux only.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+\s*(.*)")
_LARGE_KB = 8 << 10
"""Of anonymous memory: larger mappings are listed by their size, all others as one."""


@dataclass(frozen=True)
class Mapping:
    """Sizes in kB: `pss` is proportional, `written` what this process alone has and has written to."""

    name: str
    pss: int
    written: int


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def pss_of(pid: int) -> float:
    """The memory of a process and its descendants, in GB."""
    return sum(process.memory_full_info().pss for process in tree(pid)) / 1e9


def mappings_of(pid: int) -> Iterator[Mapping]:
    """Those of one process, joined by name."""
    pss, written, name = Counter[str](), Counter[str](), ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := _MAPPING.fullmatch(line):
            start, stop, path = match.groups()
            size_kb = (int(stop, 16) - int(start, 16)) >> 10
            name = Path(path).name or (f"[anon of {size_kb >> 10} MiB]" if size_kb > _LARGE_KB else "[anon]")
            continue
        key, _, value = line.partition(":")
        if key == "Pss":
            pss[name] += int(value.split()[0])
        elif key == "Private_Dirty":
            written[name] += int(value.split()[0])
    return (Mapping(name, size, written[name]) for name, size in pss.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pid", type=int)
    parser.add_argument("--mappings", type=int, default=0, metavar="N", help="list the largest ones of each process")
    args = parser.parse_args()
    print("  PSS MiB  alone MiB")
    for process in tree(args.pid):
        memory = process.memory_full_info()
        print(f"{memory.pss / 2**20:9.0f}  {memory.uss / 2**20:9.0f}  {' '.join(process.cmdline()).strip()[:90]}")
        for mapping in list(mappings_of(process.pid))[: args.mappings]:
            print(f"{mapping.pss / 1024:9.1f}  {mapping.written / 1024:9.1f}      {mapping.name}")
    print(f"{pss_of(args.pid) * 1e9 / 2**20:9.0f}             together")


if __name__ == "__main__":
    main()
