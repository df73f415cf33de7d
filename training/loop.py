# SPDX-License-Identifier: Apache-2.0
"""The loop of every training: optimizer steps, a schedule of the learning rate, checkpoints to resume from, a log."""

import math
import os
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

SAVE_EVERY = 200
LOG_EVERY = 50
_WARM_UP = 200


class Training:
    """AdamW with warm-up and cosine decay; resumes from `FOLDER/NAME.pt`, and logs to `FOLDER/NAME.log`.

    A resumed run equals an uninterrupted one: each step has a seed of its own, and the log continues from the
    checkpoint on.
    """

    def __init__(self, folder: Path, name: str, modules: Iterable[nn.Module], steps: int, rate: float) -> None:
        self._checkpoint, self._log = folder / f"{name}.pt", folder / f"{name}.log"
        self._name, self._steps, self._rate = name, steps, rate
        self._modules = list(modules)
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, rate, betas=(0.9, 0.98), weight_decay=0.01)
        self._step = 0
        self._sums: dict[str, float] = {}
        self._seconds = 0.0
        self._log_size = 0
        if self._checkpoint.exists():
            self._load()
        if self._log.exists():  # Without the steps after the checkpoint, which are done again.
            os.truncate(self._log, min(self._log_size, self._log.stat().st_size))

    def run(self, compute: Callable[[random.Random], tuple[torch.Tensor, dict[str, float]]]) -> None:
        """Calls `compute` for each step that is left.

        Args:
            compute: Returns the loss, and figures for the log. Its random numbers are those of its argument and of
                torch's own generator, which is seeded with it.
        """
        started = time.monotonic() - self._seconds
        while self._step < self._steps:
            rng = random.Random(f"{self._name} {self._step}")
            torch.manual_seed(rng.getrandbits(32))
            for group in self._optimizer.param_groups:
                decay = 0.5 * (1 + math.cos(math.pi * self._step / self._steps))
                group["lr"] = self._rate * min(1, (self._step + 1) / _WARM_UP) * decay
            loss, figures = compute(rng)
            self._optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self._parameters, 1.0)
            self._optimizer.step()
            self._step += 1
            self._seconds = time.monotonic() - started
            self._write_log(figures)
            if self._step % SAVE_EVERY == 0 or self._step == self._steps:
                self._save()

    def _write_log(self, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        if self._step % LOG_EVERY == 0:
            means = "  ".join(f"{name} {total / LOG_EVERY:.4f}" for name, total in self._sums.items())
            line = f"{self._name}: step {self._step}/{self._steps}  {means}  ({self._seconds:.0f} s)"
            print(line, flush=True)
            with self._log.open("a") as file:
                file.write(line + "\n")
                self._log_size = file.tell()
            self._sums = {}

    def _save(self) -> None:
        models = [module.state_dict() for module in self._modules]
        log = {"sums": self._sums, "seconds": self._seconds, "log_size": self._log_size}
        state = {"models": models, "optimizer": self._optimizer.state_dict(), "step": self._step, **log}
        torch.save(state, self._checkpoint.with_suffix(".new"))
        self._checkpoint.with_suffix(".new").replace(self._checkpoint)

    def _load(self) -> None:
        state = torch.load(self._checkpoint)
        for module, weights in zip(self._modules, state["models"], strict=True):
            module.load_state_dict(weights)
        self._optimizer.load_state_dict(state["optimizer"])
        self._step, self._sums = state["step"], state["sums"]
        self._seconds, self._log_size = state["seconds"], state["log_size"]
