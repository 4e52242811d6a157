"""The promises of determinism as checks that tests and benchmark share: real short runs, compared byte by byte.

A run is what it leaves behind: the final adapter's file, metrics.csv and events.jsonl, these two without
what depends on timing.
"""

from __future__ import annotations

import csv
import json
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

from estr_lite.build import Parts, divide_cores, prepare
from estr_lite.config import Config, Evaluation, Log, Resources
from estr_lite.data import collate
from estr_lite.loss import policy_loss
from estr_lite.module import Optim
from estr_lite.objectives import Estr, Grpo, IcePop
from estr_lite.objectives.base import Objective
from estr_lite.policy.adapter import Adapter, causal_lm, known, read_tensors, save
from estr_lite.policy.base import stop_tokens
from estr_lite.policy.score import score
from estr_lite.rollout.engine import Sampling
from estr_lite.rollout.transformers_engine import TransformersEngine
from estr_lite.rollout.worker import grade
from estr_lite.schedule import Schedule, cohorts
from estr_lite.staleness import SYNCHRONOUS, Fixed, HeavyTail, Staleness, Uniform
from estr_lite.train import train
from estr_lite.types import Correction, Evidence, Group

SMALL = Config(
    engine="transformers",
    resources=Resources(engine_process="shared"),
    staleness=Staleness(Fixed(2), Fixed(1)),
    sampling=Sampling(max_tokens=24, rollouts=4),
    optim=Optim(lr=1e-2, micro_batch=6),  # a rate at which a few steps move the ratios beyond the clips
    evaluation=Evaluation(problems=0),
    log=Log(tensorboard=False),
    prompts=4,
)
MIXED = replace(SMALL, staleness=Staleness(HeavyTail(cut=4), Uniform(0, 2), kv="recompute"))


@dataclass(frozen=True)
class Verdict:
    """Whether a promise held, and over how many bytes."""

    holds: bool
    bytes_compared: int


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    adapter: bytes
    metrics: bytes
    events: bytes

    def __len__(self) -> int:
        return len(self.adapter) + len(self.metrics) + len(self.events)

    @property
    def tickets(self) -> list[object]:
        """The tickets of every step, as the event log has them."""
        events = map(json.loads, self.events.splitlines())
        return sorted((e["step"], e["tickets"]) for e in events if e["event"] == "pop")


def run(config: Config, folder: Path, delay: Callable[[], None] = lambda: None) -> Run:
    """Train, and read what the run's folder holds."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(lightning|transformers|torch)\b.*")
        train(replace(config, run=str(folder)), Console(quiet=True), "", delay)
    return Run(_adapter(folder / "adapters" / str(config.steps)), _metrics(folder), _events(folder))


def _adapter(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def _metrics(folder: Path) -> bytes:
    """The columns that hold no time."""
    with (folder / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]
    return json.dumps(rows).encode()


def _events(folder: Path) -> bytes:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in event.items() if k not in ("time", "ledger")} for event in events]
    return "\n".join(sorted(map(json.dumps, kept))).encode()  # two threads write: their lines mix as it comes


# jitter


def sleeper(seed: int, mean: float = 0.02) -> Callable[[], None]:
    """Sleeps of random length."""
    rng = random.Random(seed)
    return lambda: time.sleep(rng.expovariate(1 / mean))


@dataclass(frozen=True)
class Delayed(Objective):
    """Another objective, after a sleep of random length: jitter on the trainer's side."""

    inner: Objective
    sleep: Callable[[], None] = field(default_factory=lambda: sleeper(1))

    reference = edge = "none"

    def __call__(self, evidence: Evidence) -> Correction:
        self.sleep()
        return self.inner(evidence)


# a synchronous loop


def synchronous(config: Config, folder: Path) -> bytes:
    """The same training as a plain loop: no worker, no mailbox, no Lightning; the final adapter's file."""
    parts = prepare(config.model, config.lora, config.task, config.sampling, config.seed)
    try:
        _loop(config, parts)
        save(folder, read_tensors(parts.model), parts.store.config)
    finally:
        parts.store.close()
    return _adapter(folder)


def _loop(config: Config, parts: Parts) -> None:
    trainer_cores, engine_cores = map(len, divide_cores(config.resources, phases=False))
    model, optim, sampling = parts.model, config.optim, config.sampling
    schedule = Schedule(config.task, parts.tokenizer, config.staleness, config.prompts, config.seed, parts.longest)
    engine = TransformersEngine(model, parts.store, stop_tokens(config.model, parts.tokenizer), "keep", 256)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=optim.lr, weight_decay=optim.weight_decay)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / config.steps)
    for step in range(config.steps):
        torch.set_num_threads(engine_cores)
        parts.store.add(Adapter(step, read_tensors(model), known(torch.empty(0))))
        groups = list[Group]()
        for cohort in cohorts(schedule.tickets(step), engine.max_rows // sampling.rollouts):
            engine.admit(cohort, sampling)
            while engine.needs <= step:
                groups += [grade(done, config.task, parts.tokenizer) for done in engine.step(step).finished]
        batch = collate(sorted(groups, key=lambda group: group.ticket.slot), config.advantage).to(model.device)

        torch.set_num_threads(trainer_cores)
        optimizer.zero_grad()
        for rows in batch.token_mask.sum(1).argsort(stable=True).split(optim.micro_batch):
            part = batch.rows(rows)
            logp, entropy = score(causal_lm(model), part, sampling.temperature)
            evidence = Evidence(
                logp=logp.detach(),
                proximal_logp=logp.detach(),
                behavior_logp=part.behavior_logp,
                behavior_entropy=part.behavior_entropy,
                entropy=entropy,
                advantage=part.advantage,
                lag=step - part.version,
                mask=part.valid,
            )
            correction = config.objective(evidence)
            policy_loss(logp, correction, part.advantage, part.valid, float(batch.valid.sum())).backward()
        torch.nn.utils.clip_grad_norm_(trained, optim.max_grad_norm)
        optimizer.step()
        rate.step()


# the promises


def same_seed_identical(folder: Path, steps: int) -> Verdict:
    """Two runs of one seed are one run, and another seed is another."""
    config = replace(SMALL, steps=steps)
    first, second, other = (run(replace(config, seed=s), folder / f"{i}") for i, s in enumerate((0, 0, 1)))
    return Verdict(first == second and first.adapter != other.adapter, len(first))


def jitter_identical(folder: Path, steps: int) -> Verdict:
    """Random sleeps in the worker and in the trainer change nothing, whatever the laws."""
    verdicts = list[Verdict]()
    for i, config in enumerate((replace(SMALL, steps=steps), replace(MIXED, steps=steps))):
        calm = run(config, folder / f"{i}-calm")
        shaken = run(replace(config, objective=Delayed(config.objective)), folder / f"{i}-shaken", sleeper(0))
        verdicts.append(Verdict(calm == shaken, len(calm)))
    return Verdict(all(v.holds for v in verdicts), sum(v.bytes_compared for v in verdicts))


def own_process_identical(folder: Path, steps: int) -> Verdict:
    """An engine in a process of its own generates what one in a thread does."""
    config = replace(SMALL, steps=steps)
    thread = run(config, folder / "thread")
    process = run(replace(config, resources=Resources(engine_process="own")), folder / "process")
    return Verdict(thread == process, len(thread))


def zero_lag_equals_sync(folder: Path, steps: int) -> Verdict:
    """Without lag the worker, the mailbox and Lightning train as the plain loop does."""
    config = replace(SMALL, steps=steps, staleness=SYNCHRONOUS)
    found = run(config, folder / "run").adapter
    return Verdict(found == synchronous(config, folder / "loop"), len(found))


def tickets_independent_of_objective(folder: Path, steps: int) -> Verdict:
    """Runs that differ in the objective get the same tickets, while their adapters part."""
    config = replace(SMALL, steps=steps)
    runs = [run(replace(config, objective=o), folder / type(o).__name__) for o in (Estr(), Grpo(), IcePop())]
    tickets = [json.dumps(found.tickets).encode() for found in runs]
    part = len({found.adapter for found in runs}) == len(runs)
    return Verdict(part and len(set(tickets)) == 1, sum(map(len, tickets[1:])))


CHECKS: tuple[Callable[[Path, int], Verdict], ...] = (
    same_seed_identical,
    jitter_identical,
    own_process_identical,
    zero_lag_equals_sync,
    tickets_independent_of_objective,
)
"""Each takes a folder to work in and a number of training steps."""
