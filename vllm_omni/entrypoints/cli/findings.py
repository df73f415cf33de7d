# SPDX-License-Identifier: Apache-2.0
"""What the checks of `vllm-omni doctor` find, and how it is printed. Imports nothing that may be missing."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TextIO

Level = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        remedy: How to fix it.
    """

    level: Level
    subject: str
    message: str
    remedy: str = ""

    def print(self, file: TextIO | None = None) -> None:
        """Prints it, further lines of the message and of the remedy indented; to stdout by default."""
        print(f"{self.level:<4}  {self.subject:<14}  {_indented(self.message.splitlines())}", file=file, flush=True)
        if self.remedy:
            print(f"{'':22}-> {_indented(self.remedy.splitlines(), 25)}", file=file, flush=True)


@dataclass(frozen=True)
class Platform:
    """vLLM's platform.

    Attributes:
        device_type: `cpu`, `cuda`, ...; empty if vLLM found no usable device.
        devices: Name and bytes of memory of each accelerator.
    """

    device_type: str
    devices: list[tuple[str, int]]


def _indented(lines: Iterable[str], width: int = 22) -> str:
    return f"\n{'':{width}}".join(lines)
