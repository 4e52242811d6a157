"""What happens around a training step: publish the new version, record the step, show it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from peft import PeftModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from estr_lite.config import Log
from estr_lite.data import Stream
from estr_lite.diagnostics import histogram, trajectory_staleness
from estr_lite.ledger import Ledger
from estr_lite.module import PolicyModule
from estr_lite.policy.adapter import Adapter, AdapterStore, causal_lm, peft_config, read_tensors, save
from estr_lite.policy.score import score_sequence
from estr_lite.rollout.mailbox import Mailbox
from estr_lite.run_folder import RunFolder
from estr_lite.session import Session
from estr_lite.tasks.base import Tokenizer
from estr_lite.types import Batch

PLAIN_EVERY = 10.0  # seconds between progress lines where there is no terminal


def publish(model: PeftModel, version: int, store: AdapterStore, mailbox: Mailbox, probe: Tensor) -> None:
    """Put the adapter as it is into the store as `version` and announce it; then score the canary's probe."""
    scored = Future[Tensor]()
    store.add(Adapter(version, read_tensors(model), scored))
    mailbox.announce(version)
    if store.files:
        store.write(version)  # while the engine ends the step that it is in
    try:
        scored.set_result(score_sequence(causal_lm(model), probe.to(model.device)).cpu())
    except BaseException as failure:
        scored.set_exception(failure)  # a canary may be waiting for it
        raise


class Publish(Callback):
    """After step s the adapter is version s + 1; versions that no later ticket can name are forgotten."""

    def __init__(self, store: AdapterStore, mailbox: Mailbox, probe: Tensor, horizon: int, run: RunFolder) -> None:
        self._store, self._mailbox, self._probe, self._horizon, self._run = store, mailbox, probe, horizon, run

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PolicyModule)
        version = batch.step + 1
        self._run.event("publish", version=version)
        publish(pl_module.model, version, self._store, self._mailbox, self._probe)
        self._store.discard_below(max(0, version - self._horizon))


class Account(Callback):
    """Every trained token into the ledger, and the books checked after every step."""

    def __init__(self, ledger: Ledger, stream: Stream, mailbox: Mailbox) -> None:
        self._ledger, self._stream, self._mailbox = ledger, stream, mailbox

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PolicyModule)
        rollouts = [rollout for group in self._stream.groups for rollout in group.rollouts]
        self._ledger.train(rollouts, [pl_module.keep[row, : len(r)] for row, r in enumerate(rollouts)])
        with self._mailbox.lock:
            self._ledger.check(self._mailbox.waiting())


class Record(Callback):
    """Timing metrics, the event log, sampled rollouts and kept adapters."""

    def __init__(
        self, run: RunFolder, stream: Stream, mailbox: Mailbox, ledger: Ledger, tokenizer: Tokenizer, log: Log
    ) -> None:
        self._run, self._stream, self._mailbox, self._ledger = run, stream, mailbox, ledger
        self._tokenizer, self._log = tokenizer, log
        self._mark = (time.monotonic(), 0.0, 0.0)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._mark = (time.monotonic(), self._stream.waited, self._mailbox.waited)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PolicyModule)
        now = (time.monotonic(), self._stream.waited, self._mailbox.waited)
        seconds, starved, idle = (b - a for a, b in zip(self._mark, now, strict=True))
        self._mark = now
        pl_module.log_dict(
            {
                "step": float(batch.step),  # Lightning takes it for the row's step, in a resumed run too
                "time/step_seconds": seconds,
                "time/trainer_wait_share": min(1.0, starved / seconds),
                "time/engine_wait_share": min(1.0, idle / seconds),
                "time/trained_tokens_per_second": float(batch.token_mask.sum()) / seconds,
            }
        )
        intra, inter = trajectory_staleness(batch)
        with self._mailbox.lock:
            books = self._ledger.totals(self._mailbox.waiting())
        self._run.event("step", step=batch.step, inter=histogram(inter), intra=histogram(intra), ledger=books)
        if (batch.step + 1) % self._log.adapters_every == 0:
            folder = self._run.path / "adapters" / str(batch.step + 1)
            save(folder, read_tensors(pl_module.model), peft_config(pl_module.model))
        if batch.step % self._log.rollouts_every == 0 and self._log.rollouts_groups:
            self._run.write_rollouts(batch.step, self._rows(batch, pl_module.keep))
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_histogram("staleness/intra", intra, batch.step)
                logger.experiment.add_histogram("staleness/inter", inter, batch.step)

    def _rows(self, batch: Batch, keep: Tensor) -> list[dict[str, Any]]:
        rows = list[dict[str, Any]]()
        size = len(self._stream.groups[0].rollouts)
        for i, group in enumerate(self._stream.groups[: self._log.rollouts_groups]):
            for j, rollout in enumerate(group.rollouts):
                row, n = i * size + j, len(rollout)
                rows.append(
                    {
                        "uid": group.ticket.prompt.uid,
                        "prompt": self._tokenizer.decode(
                            list(group.ticket.prompt.token_ids), skip_special_tokens=False
                        ),
                        "completion": self._tokenizer.decode(rollout.token_ids.tolist(), skip_special_tokens=False),
                        "reward": rollout.reward,
                        "advantage": float(batch.advantage[row]),
                        "finish": rollout.finish,
                        "token_ids": rollout.token_ids.tolist(),
                        "logp": _finite(rollout.logp),
                        "entropy": _finite(rollout.entropy),
                        "version": rollout.version.tolist(),
                        "keep": keep[row, :n].tolist(),
                    }
                )
        return rows


def _finite(values: Tensor) -> list[float | None]:
    """JSON has no NaN: it becomes null."""
    return [round(v, 6) if ok else None for v, ok in zip(values.tolist(), torch.isfinite(values).tolist(), strict=True)]


class Save(Callback):
    """A checkpoint every so many steps; and an optimizer that goes on where an earlier process left it."""

    def __init__(self, session: Session, every: int) -> None:
        self._session, self._every = session, every

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._session.optimizer = trainer.optimizers[0]
        self._session.scheduler = trainer.lr_scheduler_configs[0].scheduler  # pyright: ignore[reportAttributeAccessIssue]
        self._session.restore_optimizer()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if (batch.step + 1) % self._every == 0:
            self._session.save(batch.step + 1)


class Show(Callback):
    """Live progress: a bar in a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, steps: int, done: int = 0) -> None:
        self._console, self._steps, self._before = console, steps, done
        columns = ("step", "reward", "kept", "lag", "H", "k3")
        fields = [TextColumn(f"{name} [bold]{{task.fields[{name}]}}") for name in columns[1:]]
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), *fields, TimeRemainingColumn(),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("train", total=steps, completed=done, **dict.fromkeys(columns[1:], "-"))
        self._started = self._last = time.monotonic()
        self._done = done

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = self._last = time.monotonic()
        self._bar.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        found = trainer.callback_metrics
        fields: dict[str, Any] = {
            "reward": f"{float(found['reward/mean']):.3f}",
            "kept": f"{float(found['keep/fraction']):.1%}",
            "lag": f"{float(found['staleness/lag_mean']):.1f}",
            "H": f"{float(found['entropy/policy']):.3f}",
            "k3": f"{float(found['ratio/k3']):.4f}",
        }
        self._done += 1
        self._bar.update(self._task, advance=1, **fields)
        now = time.monotonic()
        if not self._console.is_terminal and (now - self._last > PLAIN_EVERY or self._done == self._steps):
            self._last = now
            left = (now - self._started) / (self._done - self._before) * (self._steps - self._done)
            text = "  ".join(f"{name} {value}" for name, value in fields.items())
            self._console.print(f"step {self._done}/{self._steps}  {text}  ETA {left:.0f} s", highlight=False)

    def close(self) -> None:
        self._bar.stop()


@contextmanager
def show_test(console: Console, label: str) -> Iterator[Callable[[int, int], None]]:
    """Progress of a test: a bar in a terminal, one line elsewhere."""
    bar = Progress(
        TextColumn(f"test {label}"), MofNCompleteColumn(), BarColumn(bar_width=20), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal, transient=True,
    )  # fmt: skip
    task = bar.add_task("test", total=None)

    def show(done: int, total: int) -> None:
        if done == 1 and not console.is_terminal:
            console.print(f"test {label}: {total} groups to decode …", highlight=False)
        bar.update(task, completed=done, total=total)

    with bar:
        yield show
