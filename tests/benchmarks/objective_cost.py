"""What an objective costs: its share of a training step, for every one of the catalogue.

A batch of the default configuration is decoded by the embedded engine and trained on again and again by Lightning,
scoring, backward pass and optimizer included. After every step each objective judges that step's own evidence.
"""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import median
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from estr_lite.config import Config
from estr_lite.data import collate
from estr_lite.module import PolicyModule
from estr_lite.objectives import CATALOGUE, EstrRule, KPopRule, Objective
from estr_lite.rollout.worker import grade
from estr_lite.schedule import Schedule
from estr_lite.types import Batch, Evidence
from tests.benchmarks.report import parser, quiet, report, spread
from tests.lab import Lab, fit, open_lab

CHOSEN: dict[type[Objective], Objective] = {EstrRule: EstrRule(tau=2.0), KPopRule: KPopRule(phi=0.1)}
"""Those that have no default."""
OBJECTIVES = [CHOSEN.get(kind) or kind() for kind in CATALOGUE]


class Watched(PolicyModule):
    """The module, with the evidence of its newest step kept."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.seen = list[Evidence]()
        super().training_step(batch, batch_idx)

    def evidence(self, batch: Batch, logp: Tensor, entropy: Tensor, proximal: Tensor | None) -> Evidence:
        self.seen.append(super().evidence(batch, logp, entropy, proximal))
        return self.seen[-1]


class Stopwatch(Callback):
    """Times every step, and after it every objective on the step's evidence."""

    def __init__(self) -> None:
        self.steps = list[float]()
        self.objectives = defaultdict[str, list[float]](list)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.steps.append(time.perf_counter() - self._started)
        assert isinstance(pl_module, Watched)
        for objective in OBJECTIVES:
            started = time.perf_counter()
            for evidence in pl_module.seen:
                objective(evidence)
            self.objectives[type(objective).__name__].append(time.perf_counter() - started)


def decode(lab: Lab, step: int) -> Batch:
    """The batch of a step that is past warm-up."""
    config, parts = lab.config, lab.parts
    schedule = Schedule(config.task, parts.tokenizer, config.staleness, config.prompts, config.seed, parts.longest)
    finished = lab.run(schedule.tickets(step), config.sampling)
    return collate([grade(done, config.task, parts.tokenizer) for done in finished], config.advantage)


def main() -> None:
    args = parser(__doc__).parse_args()
    quiet()
    config, steps = Config(), 12 if args.quick else 60
    horizon = config.staleness.horizon
    with open_lab("transformers", config, versions=horizon + 1, scale=0.002) as lab:
        batch = decode(lab, horizon)
        print(f"{len(batch)} rollouts, {int(batch.token_mask.sum())} tokens, {steps} steps", flush=True)
        module = Watched(lab.parts.model, config.objective, config.optim, config.sampling.temperature, steps)
        watch = Stopwatch()
        fit(module, [batch] * steps, watch)
    step = median(watch.steps)
    shares = {name: median(seconds) / step for name, seconds in watch.objectives.items()}
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        print(f"{name:12}  {1e6 * median(watch.objectives[name]):7.0f} µs  {share:7.3%} of a step")
    report(
        args.quick,
        share_of_step=max(shares.values()),
        worst=max(shares, key=shares.__getitem__),
        per_objective=shares,
        **spread("step_seconds", watch.steps),
        tokens=int(batch.token_mask.sum()),
    )


if __name__ == "__main__":
    main()
