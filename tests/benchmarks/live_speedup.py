"""What live asynchrony is worth: trained tokens a second, live over synchronous, on the same prompts, cores and engine.

The task is agentic in its timing: a "tool" judges every completion and takes its time, log-normal with the given median
and spread σ, and the numbers of a problem follow a heavy tail, so that lengths do. A latency is a function of the
completion, so that both sides meet the same law. Tools of a step run at once; only their slowest holds a synchronous
step up. Each run trains the same number of steps; its time is that of training, the live pipeline's filling included.

The synchronous rival has all cores in each phase. Where one core a side is quicker for it (two OpenMP threads cost more
than they bring on a tiny model), that is what it gets; the runs without latency decide, and are printed.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from estr_lite.config import Config, Evaluation, Log, Resources
from estr_lite.modes import Live, Mode, Synchronous
from estr_lite.rollout.engine import Sampling
from estr_lite.seeds import derive
from estr_lite.tasks import Countdown, Task
from estr_lite.tasks.base import Problem, Split
from estr_lite.train import train
from tests.benchmarks.report import parser, quiet, report, spread

TAILS = (0.0, 0.5, 1.0)
"""σ of the logarithm of a latency; the last one is the headline's."""


@dataclass(frozen=True)
class Tools(Task):
    """Countdown with a heavy tail of numbers to use, judged by a tool that takes its time.

    Args:
        median: seconds that half of the calls stay below; 0 for none.
        sigma: standard deviation of the latency's logarithm.
    """

    median: float = 1.0
    sigma: float = 1.0
    tasks: Any = field(init=False, repr=False, compare=False)

    waits = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", [Countdown(numbers=n) for n in range(2, 7)])

    def size(self, split: Split) -> int:
        return self.tasks[0].size(split)

    def problem(self, split: Split, index: int) -> Problem:
        draw = random.Random(derive(0, "numbers", split, index)).paretovariate(1.1)
        return self.tasks[min(4, int(draw) - 1)].problem(split, index)

    def grade(self, reference: str, completion: str) -> float:
        if self.median:
            rng = random.Random(derive(0, "latency", reference, completion))
            time.sleep(self.median * math.exp(rng.gauss(0, self.sigma)))
        return self.tasks[0].grade(reference, completion)


@dataclass(frozen=True)
class Run:
    """How a run went."""

    tokens: int
    seconds: float
    lag: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def run(base: Config, mode: Mode, resources: Resources, task: Tools, steps: int) -> Run:
    """Train, and count."""
    with tempfile.TemporaryDirectory(prefix="estr-lite-speedup-") as folder:
        config = replace(base, mode=mode, resources=resources, task=task, steps=steps, run=str(Path(folder) / "run"))
        result = train(config, Console(quiet=True))
        events = [json.loads(line) for line in (result.run / "events.jsonl").read_text("utf-8").splitlines()]
    lags = [
        int(lag) for event in events if event["event"] == "step" for lag, n in event["inter"].items() for _ in range(n)
    ]
    tokens = result.tokens["trained"] + result.tokens["masked"]
    return Run(tokens, result.train_seconds, sum(lags) / len(lags))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    arguments.add_argument("--max-lag", type=int, default=4)
    args = arguments.parse_args()
    quiet()
    prompts, steps, plain, turns = (4, 3, 3, 1) if args.quick else (16, 6, 12, 3)
    base = Config(
        engine=args.engine,
        prompts=prompts,
        sampling=Sampling(max_tokens=64),
        evaluation=Evaluation(problems=0),
        log=Log(tensorboard=False, rollouts_groups=0),
    )
    live, tool = Live(max_lag=args.max_lag), Tools(median=0.2 if args.quick else 1.0)
    half = Resources(trainer_cores=1, engine_cores=1)

    def show(name: str, found: Run) -> Run:
        print(f"{name}: {found.tokens} tokens in {found.seconds:.1f} s, {found.speed:.0f} a second", flush=True)
        return found

    def pair(rival: Resources, task: Tools, steps: int, name: str) -> tuple[Run, Run]:
        a = show(f"{name}, synchronous", run(base, Synchronous(), rival, task, steps))
        return a, show(f"{name}, live", run(base, live, Resources(), task, steps))

    none = replace(tool, median=0.0)
    whole, single, lives = list[Run](), list[Run](), list[Run]()
    for _ in range(turns):
        a, b = pair(Resources(), none, plain, "no latency, all cores")
        whole.append(a)
        lives.append(b)
        single.append(show("no latency, one core a side, synchronous", run(base, Synchronous(), half, none, plain)))
    best = max((whole, single), key=lambda runs: median(one.speed for one in runs))
    rival = Resources() if best is whole else half
    tails = dict[str, Any]()
    pairs = list[tuple[Run, Run]]()
    for sigma in TAILS[-1:] if args.quick else TAILS:
        headline = sigma == TAILS[-1]
        task = replace(tool, sigma=sigma)
        pairs = [pair(rival, task, steps, f"σ {sigma:g}") for _ in range(turns if headline else 1)]
        tails[f"{sigma:g}"] = ratios(pairs)
    report(
        args.quick,
        engine=args.engine,
        **spread("ratio", ratios(pairs)),
        **spread("ratio_no_latency", [b.speed / a.speed for a, b in zip(best, lives, strict=True)]),
        synchronous_cores="all" if best is whole else "one a side",
        tail={"median_seconds": tool.median, "ratio_by_sigma": tails},
        sync_tokens=[a.tokens for a, _ in pairs],
        live_tokens=[b.tokens for _, b in pairs],
        live_lag=[b.lag for _, b in pairs],
        max_lag=args.max_lag,
        steps=steps,
    )


def ratios(pairs: Sequence[tuple[Run, Run]]) -> list[float]:
    """Live over synchronous, turn by turn."""
    return [b.speed / a.speed for a, b in pairs]


if __name__ == "__main__":
    main()
