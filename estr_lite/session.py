"""What a run is between two steps: all that a checkpoint holds of it, taken and put back."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from estr_lite.build import Parts
from estr_lite.checkpoint import Checkpoint, Checkpoints
from estr_lite.config import Checkpointing, Config, Log, Resources
from estr_lite.ledger import Ledger
from estr_lite.metrics_file import rewind
from estr_lite.module import PolicyModule
from estr_lite.policy.adapter import causal_lm, write_tensors
from estr_lite.policy.score import score_sequence
from estr_lite.rollout.mailbox import Mailbox
from estr_lite.rollout.remote import Watch
from estr_lite.run_folder import RunFolder, to_yaml

SCHEDULER = ("base_lrs", "last_epoch", "_step_count", "_last_lr")
"""What a learning-rate scheduler is made of; the rate itself is a function of the step."""


@dataclass(eq=False)
class Session:
    """The parts of a run that change from step to step.

    `unfinished` are numbers of tickets below `cursor` whose rollouts were neither trained nor waiting when the
    checkpoint was written; `cursor` is the first number that was never started.
    """

    config: Config
    run: RunFolder
    parts: Parts
    mailbox: Mailbox
    ledger: Ledger
    module: PolicyModule
    checkpoints: Checkpoints
    pending: Callable[[], tuple[int, list[int]]] = lambda: (0, [])  # cursor and numbers to start again, of the source
    start: int = 0
    cursor: int = 0
    unfinished: tuple[int, ...] = ()
    before: dict[str, Any] | None = None
    seconds: float = 0.0  # of training in earlier processes
    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None
    saved: int = -1  # step of the newest checkpoint that this process wrote or began with

    def __post_init__(self) -> None:
        self._found: Checkpoint | None = None
        self._began = time.monotonic()

    # taking it

    def save(self, step: int) -> None:
        """Write a checkpoint, unless this step has one."""
        if step == self.saved:
            return
        with self.mailbox.lock:
            checkpoint = Checkpoint(
                step, self._state(), self._tensors(), self.mailbox.buffer.groups(), self.parts.store.versions
            )
        self.checkpoints.write(checkpoint)
        self.saved = step

    def elapsed(self) -> float:
        """Seconds of training, in earlier processes too."""
        return self.seconds + time.monotonic() - self._began

    def begin(self) -> None:
        """The clock of training starts."""
        self._began = time.monotonic()

    def _state(self) -> dict[str, Any]:
        books = Ledger()
        books.load(self.ledger.table())
        books.lose("killed")  # a process that is resumed from here has nothing in flight
        books.drop([r for finished, _ in self.mailbox.grading.values() for r in finished.rollouts], "killed")
        cursor, again = self.pending()
        begun = [*self.mailbox.flying.values(), *(finished.ticket for finished, _ in self.mailbox.grading.values())]
        numbers = sorted({*again, *(t.step * self.config.prompts + t.slot for t in begun)})
        scheduler = self.scheduler.state_dict() if self.scheduler else {}
        return {
            "ledger": books.table(),
            "cursor": cursor,
            "unfinished": numbers,
            "events": self.run.mark(),
            "before": self.before,
            "seconds": self.elapsed(),
            "nonfinite_steps": self.module.nonfinite_steps,
            "scheduler": {name: scheduler[name] for name in SCHEDULER} if scheduler else {},
            "groups": self.optimizer.state_dict()["param_groups"] if self.optimizer else [],
        }

    def _tensors(self) -> dict[str, Tensor]:
        found = {"rng": torch.get_rng_state()}
        for index, state in (self.optimizer.state_dict()["state"] if self.optimizer else {}).items():
            found |= {f"optimizer/{index}/{name}": value.clone() for name, value in state.items()}
        return found

    # putting it back

    def restore(self, found: Checkpoint, tolerance: float) -> None:
        """Go on from a checkpoint: adapters, buffer, ledger and counters now, the optimizer when there is one.

        Raises:
            ValueError: where the base model does not score the probe as the checkpoint's did.
        """
        state = found.state
        self._found, self.start, self.saved = found, found.step, found.step
        self.cursor, self.unfinished = state["cursor"], tuple(state["unfinished"])
        self.before, self.seconds = state["before"], state["seconds"]
        self.ledger.load(state["ledger"])
        self.module.nonfinite_steps = state["nonfinite_steps"]
        newest = found.adapters[found.step]
        write_tensors(self.parts.model, newest.tensors)
        scored = score_sequence(causal_lm(self.parts.model), self.parts.probe.to(self.parts.model.device)).cpu()
        error = float((scored - newest.probe_logp).abs().max())
        if not error <= tolerance:
            raise ValueError(
                f"The checkpoint of step {found.step} was written with another base model than "
                f"{self.config.model.path!r}: with its adapter the probe scores {error:.3g} nats differently."
            )
        for adapter in found.adapters.values():
            self.parts.store.add(adapter)
        for group in found.groups:
            self.mailbox.put(group)
        self.run.rewind(tuple(state["events"]))
        rewind(self.run.path / "metrics.csv", found.step)
        self.mailbox.announce(found.step)

    def restore_optimizer(self) -> None:
        """The optimizer's moments and the learning rate, once Lightning has made them."""
        found = self._found
        if found is None or self.optimizer is None or self.scheduler is None or not found.state["groups"]:
            return
        torch.set_rng_state(found.tensors["rng"])
        state = dict[int, dict[str, Tensor]]()
        for name, value in found.tensors.items():
            if name.startswith("optimizer/"):
                _, index, field = name.split("/")
                state.setdefault(int(index), {})[field] = value
        self.optimizer.load_state_dict({"state": state, "param_groups": found.state["groups"]})
        self.scheduler.load_state_dict({**found.state["scheduler"], "lr_lambdas": [None]})


def identity(config: Config) -> str:
    """What two runs must share to be one: weights and configuration, but for where it runs and what it keeps."""
    same = replace(config, run="", resources=Resources(), watch=Watch(), log=Log(), checkpoint=Checkpointing())
    folder = Path(config.model.source)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    weights = [(file.name, file.stat().st_size) for file in files]
    return hashlib.sha256(f"{to_yaml(same)}{weights}".encode()).hexdigest()
