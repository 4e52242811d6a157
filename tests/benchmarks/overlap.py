"""What engine and trainer lose to each other: the speed of each side while both run, over its speed alone.

The trainer takes real steps of Lightning on one batch of the default configuration; the engine decodes such batches
back to back, all of one version, so that neither side ever waits for the other. The turns alternate: trainer alone,
engine alone, both. Every engine has a process of its own, as by default; `shared` is the embedded engine in a thread of
the trainer's process, for comparison.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from estr_lite.build import divide_cores
from estr_lite.config import Config, Resources
from estr_lite.module import PolicyModule
from estr_lite.rollout.engine import Engine
from estr_lite.types import Batch
from tests.benchmarks.objective_cost import decode
from tests.benchmarks.report import parser, quiet, report, spread
from tests.lab import Lab, fit, open_lab

SIDES = (("transformers", True), ("vllm", True), ("transformers", False))
"""Engines, and whether they have a process of their own."""


class Clock(Callback):
    """When each step began and the last one ended."""

    def __init__(self) -> None:
        self.began = list[float]()
        self.ended = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.began.append(time.monotonic())

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.ended = time.monotonic()


@dataclass(frozen=True)
class Window:
    """A stretch of time in which a side was busy, and the tokens that it did."""

    began: float
    ended: float
    tokens: float

    @property
    def speed(self) -> float:
        return self.tokens / (self.ended - self.began)


def train(lab: Lab, batch: Batch, seconds: float, step_seconds: float) -> Window:
    """Steps for about that long; the first one, which warms up, does not count."""
    module, clock = PolicyModule(lab.parts.model, lab.config.objective, lab.config.optim, 1.0, 10**6), Clock()
    steps = max(3, round(seconds / step_seconds))
    fit(module, [batch] * steps, clock)
    return Window(clock.began[1], clock.ended, (steps - 1) * float(batch.token_mask.sum()))


class Decoder:
    """Decodes until it is told to stop, and knows how far it was when."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self._stop, self._turn = lab, threading.Event(), 0
        self._marks = list[tuple[float, int]]()

    def start(self) -> None:
        self._stop.clear()
        self._marks = []
        self._job = self._lab.thread.submit(self._run)

    def stop(self) -> None:
        self._stop.set()
        self._job.result()

    def window(self, began: float, ended: float) -> Window:
        """What was decoded between two moments, to an engine step."""
        inside = [(at, tokens) for at, tokens in self._marks if began <= at <= ended]
        return Window(inside[0][0], inside[-1][0], sum(tokens for _, tokens in inside[1:]))

    def _run(self, engine: Engine) -> None:
        rows = self._lab.config.prompts * self._lab.config.sampling.rollouts
        while not self._stop.is_set():
            while engine.room(rows, 0):
                self._turn += 1
                tickets = [self._lab.ticket(i, [(0, 0)], self._turn) for i in range(self._lab.config.prompts)]
                engine.admit(tickets, self._lab.config.sampling)
            self._marks.append((time.monotonic(), sum(engine.step(0).sampled.values())))
        while engine.needs <= 0:
            engine.step(0)


def measure(engine: str, own: bool, turns: int, seconds: float) -> dict[str, Any]:
    """Each side alone and both, in turns."""
    config = Config()
    trainer_cores, engine_cores = divide_cores(Resources(), phases=False)
    found: dict[str, list[float]] = {"trainer_ratio": [], "engine_ratio": []}
    speeds: dict[str, list[float]] = {"trainer_alone": [], "engine_alone": [], "trainer_both": [], "engine_both": []}
    with open_lab(engine, config, versions=1, core=engine_cores[0], own_process=own) as lab:
        torch.set_num_threads(len(trainer_cores))
        batch, decoder = decode(lab, 0), Decoder(lab)
        first = train(lab, batch, 0, 1.0)
        one = (first.ended - first.began) / 2
        for turn in range(1, turns + 1):
            alone = train(lab, batch, seconds, one)
            decoder.start()
            time.sleep(seconds)
            decoder.stop()
            idle = decoder.window(0, float("inf"))
            decoder.start()
            both = train(lab, batch, seconds, one)
            decoder.stop()
            busy = decoder.window(both.began, both.ended)
            found["trainer_ratio"].append(both.speed / alone.speed)
            found["engine_ratio"].append(busy.speed / idle.speed)
            for name, window in zip(speeds, (alone, idle, both, busy), strict=True):
                speeds[name].append(window.speed)
            print(
                f"{engine}, {'own process' if own else 'shared'}, turn {turn} of {turns}: "
                f"trainer {alone.speed:.0f} alone, {both.speed:.0f} beside the engine; "
                f"engine {idle.speed:.0f} alone, {busy.speed:.0f} beside the trainer",
                flush=True,
            )
    ratios = {key: value for name, values in found.items() for key, value in spread(name, values).items()}
    return {**ratios, "tokens_per_second": {name: median(values) for name, values in speeds.items()}}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--engines", nargs="*", choices=("transformers", "vllm"), default=["transformers", "vllm"])
    args = arguments.parse_args()
    quiet()
    turns, seconds = (1, 2.0) if args.quick else (5, 8.0)
    sides = [side for side in SIDES if side[0] in args.engines and (side[1] or not args.quick)]
    per_engine = {engine if own else f"{engine} shared": measure(engine, own, turns, seconds) for engine, own in sides}
    default = [one for name, one in per_engine.items() if "shared" not in name]
    report(
        args.quick,
        trainer_ratio=min(one["trainer_ratio"] for one in default),
        engine_ratio=min(one["engine_ratio"] for one in default),
        per_engine=per_engine,
        turns=turns,
    )


if __name__ == "__main__":
    main()
