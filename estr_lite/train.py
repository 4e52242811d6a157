"""The main job, and the test of an adapter: evaluate, train under controlled staleness, evaluate again."""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from rich.console import Console

from estr_lite.build import Parts, adapter_lora, choose_engine, divide_cores, open_engine, prepare
from estr_lite.callbacks import Publish, Record, Show, publish, show_test
from estr_lite.config import Config
from estr_lite.data import Stream
from estr_lite.evaluate import Scores, evaluate
from estr_lite.module import PolicyModule
from estr_lite.policy.adapter import (
    load,
    peft_config,
    read_tensors,
    save,
)
from estr_lite.policy.base import check_folder
from estr_lite.rollout.engine import Sampling
from estr_lite.rollout.mailbox import Mailbox, Stopped
from estr_lite.rollout.worker import Canary, EngineThread, Producer
from estr_lite.run_folder import RunFolder, to_yaml
from estr_lite.schedule import Schedule
from estr_lite.types import Group

CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
"""Nats. Two engines in float32 agree to about 1e-5; in bfloat16 rounding alone moves a log-probability by 0.1."""


@dataclass(frozen=True)
class Result:
    """How a run went."""

    run: Path
    engine: str
    steps: int
    interrupted: bool
    before: Scores | None
    after: Scores | None
    train_seconds: float
    canary: float


def train(config: Config, console: Console, resolved: str = "", delay: Callable[[], None] = lambda: None) -> Result:
    """The main job: evaluate, train under controlled staleness, evaluate again; everything into the run's folder.

    Args:
        config: the run.
        console: where progress goes.
        resolved: the configuration as YAML, for the folder; without it, `config` is written out.
        delay: called in the worker before each engine step; a test puts random sleeps here.

    Raises:
        RolloutError: if the engine or the worker failed; `__cause__` says of what.
        NonFiniteError: if numbers that are not finite came up; what was trained before them is kept.
        KeyboardInterrupt: if Ctrl-C came before the first step, or a second time.
    """
    name = choose_engine(config.engine, config.model, config.lora)
    run = RunFolder(run_path(config))
    try:
        parts = prepare(config.model, config.lora, config.task, config.sampling, config.seed)
        run.write_config(resolved or to_yaml(config))
        run.write_environment(engine=name, cores_of=dict(zip(("trainer", "engine"), divide_cores(), strict=True)))
        console.print(f"run {run.path}: {describe(config, name)}", highlight=False)
        with open_engine(name, config, parts, config.staleness.kv) as engine:
            result = _train(config, console, run, name, parts, engine, delay)
    except BaseException:
        if run.started:
            console.print(f"run folder {run.path} holds what was done so far", highlight=False)
        else:
            run.discard()
        raise
    finally:
        run.close()
    run.write_json("summary.json", asdict(result) | {"run": str(result.run)})
    return result


def score_adapter(config: Config, adapter: Path | None, console: Console) -> Scores:
    """Evaluate a PEFT folder, or the base without one, as `config.evaluation` says."""
    if config.evaluation.problems == 0:
        raise ValueError("evaluation.problems must be at least 1 to evaluate, got 0.")
    check_folder(config.model)
    if adapter:
        load(adapter, config.model.source)  # refuses a folder that is none before its shape is read
        config = replace(config, lora=adapter_lora(adapter))
    name = choose_engine(config.engine, config.model, config.lora)
    parts = prepare(config.model, config.lora, config.task, config.sampling, config.seed, adapter)
    mailbox = Mailbox()
    label = str(adapter or config.model.path)
    with open_engine(name, config, parts, config.staleness.kv) as engine, _stop_on_interrupt(mailbox) as interrupted:
        publish(parts.model, 0, parts.store, mailbox, parts.probe)
        scores = _evaluate(config, console, parts, engine, 0, label, interrupted)
    if scores is None:
        raise KeyboardInterrupt
    return scores


def _train(
    config: Config, console: Console, run: RunFolder, name: str, parts: Parts, engine: EngineThread,
    delay: Callable[[], None],
) -> Result:  # fmt: skip
    mailbox = Mailbox()
    horizon = config.staleness.horizon
    schedule = Schedule(config.task, parts.tokenizer, config.staleness, config.prompts, config.seed, parts.longest)
    canary = Canary(parts.store, parts.probe, CANARY_TOLERANCE[config.model.dtype])
    producer = Producer(schedule, range(config.steps), config.sampling, mailbox, canary, delay)
    stream = Stream(range(config.steps), lambda step: _take(mailbox, step, config.prompts), config.advantage)
    module = PolicyModule(parts.model, config.objective, config.optim, config.sampling.temperature, config.steps)
    publish(parts.model, 0, parts.store, mailbox, parts.probe)
    save(run.path / "adapters" / "0", read_tensors(parts.model), peft_config(parts.model))
    show = Show(console, config.steps)
    callbacks = [
        Publish(parts.store, mailbox, parts.probe, horizon, run),
        Record(run, stream, mailbox, parts.tokenizer, config.log),
        show,
    ]
    with _stop_on_interrupt(mailbox) as interrupted:
        engine.submit(lambda engine: None).result()  # an engine that cannot start says so here
        before = _evaluate(config, console, parts, engine, 0, "before training", interrupted)
        if interrupted():
            raise KeyboardInterrupt  # nothing was trained, so there is nothing to keep
        run.event("start", engine=name, steps=config.steps, prompts=config.prompts, seed=config.seed)
        produced = engine.submit(producer)
        produced.add_done_callback(lambda done: _deliver(done, mailbox))
        started = time.monotonic()
        try:
            _fit(config, run, callbacks, module, stream)
        finally:
            mailbox.stop()
            show.close()
            _keep(run, parts, mailbox.latest)
        seconds = time.monotonic() - started
        produced.result()
        version = mailbox.latest
        after = _evaluate(config, console, parts, engine, version, "after training", interrupted)
    return Result(run.path, name, version, interrupted(), before, after, seconds, canary.worst)


def _deliver(done: Future[None], mailbox: Mailbox) -> None:
    """Whatever ended the worker reaches the trainer, also where it never came to run."""
    if (failure := done.exception()) is not None:
        mailbox.fail(failure)


def _take(mailbox: Mailbox, step: int, count: int) -> list[Group]:
    """The step's groups; a run that was asked to end takes none of those that lie ready."""
    if mailbox.stopped:
        raise Stopped
    return mailbox.take(step, count)


def _fit(config: Config, run: RunFolder, callbacks: list[L.Callback], module: PolicyModule, stream: Stream) -> None:
    """Train, without the warnings of Lightning that are about what we do on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(num_workers|many workers|IterableDataset|Experiment logs|eval mode).*")
        try:
            _trainer(config, run, callbacks).fit(module, train_dataloaders=stream)
        except SystemExit as end:  # what Lightning makes of a second Ctrl-C, and of SIGTERM
            raise KeyboardInterrupt from end


def _keep(run: RunFolder, parts: Parts, version: int) -> None:
    """The newest adapter into the run's folder, also where the run failed."""
    folder = run.path / "adapters" / str(version)
    if not folder.is_dir():
        save(folder, parts.store[version].tensors, parts.store.config)


def _evaluate(
    config: Config, console: Console, parts: Parts, engine: EngineThread, version: int, label: str,
    interrupted: Callable[[], bool],
) -> Scores | None:  # fmt: skip
    """The test's scores; None without a test, or where Ctrl-C ended it."""
    count = config.evaluation.problems
    if not count or interrupted():
        return None
    sampling = Sampling(config.sampling.temperature, config.sampling.max_tokens, config.evaluation.samples)
    with show_test(console, label) as progress:
        job = engine.submit(
            lambda e: evaluate(
                e, config.task, parts.tokenizer, sampling, version, count, parts.longest, config.seed,
                progress=progress, stopped=interrupted,
            )
        )  # fmt: skip
        try:
            return job.result()
        except Stopped:
            return None


def _trainer(config: Config, run: RunFolder, callbacks: list[L.Callback]) -> L.Trainer:
    loggers: list[Logger] = [CSVLogger(run.path, name="", version="", flush_logs_every_n_steps=10)]
    if config.log.tensorboard:
        loggers.append(TensorBoardLogger(run.path, name="tensorboard", version=""))
    return L.Trainer(
        max_epochs=1,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        logger=loggers,
        callbacks=callbacks,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )


@contextmanager
def _stop_on_interrupt(mailbox: Mailbox) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C ends the run after its current step; a second one is an ordinary KeyboardInterrupt."""
    seen = False

    def handle(signum: int, frame: Any) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True
        mailbox.stop()

    try:
        before = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread: a notebook's or a test's own
        yield lambda: seen
        return
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)


def describe(config: Config, engine: str) -> str:
    """The run in one line."""
    law = config.staleness
    return (
        f"{config.model.path} on {type(config.task).__name__}, {config.objective}, Δinter {law.inter}, "
        f"Δintra {law.intra} ({law.switch}, kv {law.kv}), {config.prompts} prompts × {config.sampling.rollouts}, "
        f"{config.steps} steps, {engine} engine, seed {config.seed}"
    )


def run_path(config: Config) -> Path:
    if config.run != "auto":
        return Path(config.run)
    names = (type(config.task).__name__, type(config.objective).__name__, time.strftime("%Y%m%d-%H%M%S"))
    return Path("runs") / "-".join(names).lower()
