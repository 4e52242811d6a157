"""Two thousand publishes in one live run: does memory grow, do steps slow down?

Steps are as small as can be, so that versions, adapters on the RAM disk, the ledger and the logs turn over quickly.
Resident memory is that of the trainer and of the engine's process together, read twice a second. Both figures compare
medians: the last tenth of the run against its second tenth, since the first still fills caches.
"""

from __future__ import annotations

import csv
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console

from estr_lite.config import Config, Evaluation, Log
from estr_lite.modes import Live
from estr_lite.rollout.engine import Sampling
from estr_lite.train import train
from tests.benchmarks.report import parser, quiet, report

MEGABYTE = 1 << 20


class Resident:
    """Reads the resident memory of this process and its children until it is stopped."""

    def __init__(self, every: float) -> None:
        self.samples = list[tuple[float, float]]()
        """(monotonic seconds, MB)."""
        self._every, self._stop = every, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Resident:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def between(self, began: float, ended: float) -> float:
        """The median of a stretch."""
        return median(mb for at, mb in self.samples if began <= at <= ended)

    def _run(self) -> None:
        me = psutil.Process()
        while not self._stop.wait(self._every):
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.samples.append((time.monotonic(), total / MEGABYTE))


def tenth(values: Sequence[float], which: int) -> Sequence[float]:
    """The tenth of a list with that number, from 0."""
    n = len(values)
    return values[which * n // 10 : (which + 1) * n // 10]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    arguments.add_argument("--publishes", type=int)
    args = arguments.parse_args()
    quiet()
    publishes = args.publishes or (80 if args.quick else 2000)
    with tempfile.TemporaryDirectory(prefix="estr-lite-endurance-") as folder:
        base = Config(
            mode=Live(max_lag=2),
            engine=args.engine,
            prompts=1,
            steps=publishes,
            sampling=Sampling(rollouts=2, max_tokens=12),
            evaluation=Evaluation(problems=0),
            log=Log(tensorboard=False, adapters_every=10**6, rollouts_every=50),
        )
        with Resident(0.1 if args.quick else 0.5) as resident:
            began = time.monotonic()
            result = train(replace(base, run=str(Path(folder) / "run")), Console(quiet=True))
            over = time.monotonic()
        with (result.run / "metrics.csv").open() as file:
            seconds = [float(row["time/step_seconds"]) for row in csv.DictReader(file)]
    ended = [over - sum(seconds[i:]) for i in range(len(seconds))]  # nothing follows the last step but its checkpoint
    first, last = (resident.between(tenth(ended, i)[0], tenth(ended, i)[-1]) for i in (1, 9))
    report(
        args.quick,
        engine=args.engine,
        publishes=result.steps,
        rss_growth_mb=round(last - first, 1),
        rss_mb=round(last, 1),
        speed_drift=median(tenth(seconds, 9)) / median(tenth(seconds, 1)) - 1,
        step_ms=1000 * median(seconds),
        seconds=round(over - began, 1),
        cores=os.cpu_count(),
    )


if __name__ == "__main__":
    main()
