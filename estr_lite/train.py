"""The main job, and the test of an adapter: evaluate, train under controlled staleness, evaluate again."""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console

from estr_lite.build import (
    Parts,
    adapter_lora,
    choose_engine,
    divide_cores,
    has_own_process,
    make_source,
    open_engine,
    prepare,
)
from estr_lite.callbacks import Account, Publish, Record, Save, Show, publish, show_test
from estr_lite.checkpoint import Checkpoint, Checkpoints
from estr_lite.config import Config
from estr_lite.data import Stream
from estr_lite.evaluate import Scores, evaluate
from estr_lite.ledger import Ledger
from estr_lite.metrics_file import MetricsFile, rewind
from estr_lite.modes import Controlled, Live, Mode
from estr_lite.module import PolicyModule
from estr_lite.policy.adapter import load, peft_config, read_tensors, save
from estr_lite.policy.base import check_folder
from estr_lite.rollout.engine import Sampling
from estr_lite.rollout.mailbox import PULSE, Buffer, ByStep, FirstCome, Mailbox, RolloutError, Stopped
from estr_lite.rollout.worker import Canary, EngineThread, Producer, Rules
from estr_lite.run_folder import RunFolder, to_yaml
from estr_lite.schedule import Schedule
from estr_lite.session import Session, identity
from estr_lite.types import Group

R = TypeVar("R")
CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
"""Nats. Two engines in float32 agree to about 1e-5; in bfloat16 rounding alone moves a log-probability by 0.1."""


@dataclass(frozen=True)
class Result:
    """How a run went."""

    run: Path
    engine: str
    steps: int
    interrupted: str
    """The name of the signal that ended the run early, SIGINT or SIGTERM; empty where none did."""
    before: Scores | None
    after: Scores | None
    train_seconds: float
    canary: float
    tokens: dict[str, int]
    """The ledger's accounts at the end."""


def train(
    config: Config,
    console: Console,
    resolved: str = "",
    delay: Callable[[], None] = lambda: None,
    again: bool = False,
) -> Result:
    """The main job: evaluate, train in the configured mode, evaluate again; everything into the run's folder.

    Args:
        config: the run.
        console: where progress goes.
        resolved: the configuration as YAML, for the folder; without it, `config` is written out.
        delay: called in the worker before each engine step; a test puts random sleeps here.
        again: go on with the run in the folder `config.run`, from its newest checkpoint.

    Raises:
        RolloutError: if the engine or the worker failed; `__cause__` says of what.
        NonFiniteError: if numbers that are not finite came up; what was trained before them is kept.
        LedgerError: if a token was lost or trained twice.
        KeyboardInterrupt: if Ctrl-C came before the first step, or a second time.
    """
    name = choose_engine(config.engine, config.model, config.lora)
    trainer_cores, engine_cores = divide_cores(config.resources, config.mode.phases)
    own = has_own_process(config.resources)
    run = RunFolder(run_path(config), again)

    def tell(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)  # a path that is cut cannot be copied

    try:
        checkpoints = Checkpoints(run.path / "checkpoints", config.checkpoint.keep, identity(config), tell)
        found = checkpoints.newest() if again else None
        parts = prepare(config.model, config.lora, config.task, config.sampling, config.seed)
        if not again:
            run.write_config(resolved or to_yaml(config))
        run.write_environment(engine=name, engine_process=own, trainer_cores=trainer_cores, engine_cores=engine_cores)
        tell(f"run {run.path}: {describe(config, name)}")
        tell(
            f"trainer on {_cores(trainer_cores)}, engine on {_cores(engine_cores)}, "
            + ("in turns, " if config.mode.phases else "")
            + ("each a process of its own" if own else "threads of one process")
        )
        if again:
            tell(f"going on from the checkpoint of step {found.step}" if found else "no checkpoint: starting anew")
        with open_engine(name, config, parts, tell) as engine:
            result = _train(config, console, run, name, parts, engine, checkpoints, found, delay)
    except BaseException:
        if run.started:
            tell(f"run folder {run.path} holds what was done so far")
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
    with open_engine(name, config, parts) as engine, _stop_on_signal(mailbox) as interrupted:
        publish(parts.model, 0, parts.store, mailbox, parts.probe)
        scores = _evaluate(config, console, parts, engine, 0, label, interrupted)
    if scores is None:
        raise KeyboardInterrupt
    return scores


def _train(
    config: Config, console: Console, run: RunFolder, name: str, parts: Parts, engine: EngineThread,
    checkpoints: Checkpoints, found: Checkpoint | None, delay: Callable[[], None],
) -> Result:  # fmt: skip
    ledger = Ledger()
    mailbox = Mailbox(_buffer(config, ledger, run), config.watch.heartbeat)
    laws, horizon, tolerance = (
        config.mode.laws(config.staleness),
        config.mode.horizon(config.staleness),
        CANARY_TOLERANCE[config.model.dtype],
    )
    schedule = Schedule(config.task, parts.tokenizer, laws, config.prompts, config.seed, parts.longest)
    canary = Canary(parts.store, parts.probe, tolerance)
    module = PolicyModule(parts.model, config.objective, config.optim, config.sampling.temperature, config.steps)
    session = Session(config, run, parts, mailbox, ledger, module, checkpoints)
    if found is None:
        run.rewind((0, 0.0))
        rewind(run.path / "metrics.csv", 0)
        publish(parts.model, 0, parts.store, mailbox, parts.probe)
        save(run.path / "adapters" / "0", read_tensors(parts.model), peft_config(parts.model))
    else:
        session.restore(found, tolerance)
    stream = Stream(
        range(session.start, config.steps),
        lambda step: _take(mailbox, step, config.prompts),
        config.advantage,
        lambda step, groups: run.event("pop", step=step, tickets=[_popped(group) for group in groups]),
    )
    show = Show(console, config.steps, session.start)
    callbacks = [
        Publish(parts.store, mailbox, parts.probe, horizon, run),
        Account(ledger, stream, mailbox),
        Record(run, stream, mailbox, ledger, parts.tokenizer, config.log),
        show,
        Save(session, config.checkpoint.every),
    ]
    with _stop_on_signal(mailbox) as interrupted:
        ready = engine.submit(lambda e: (e.max_rows, e.lanes))  # an engine that cannot start says so here
        deadline = time.monotonic() + config.watch.start
        size = _wait(ready, lambda: deadline - time.monotonic(), "starting")
        if found is None:
            before = _evaluate(config, console, parts, engine, 0, "before training", interrupted)
            if interrupted():
                raise KeyboardInterrupt  # nothing was trained, so there is nothing to keep
            session.before = asdict(before) if before else None
            run.event("start", **_start_event(config, name))
            session.save(0)
        else:
            run.event("resume", step=session.start)
        source, session.pending = make_source(
            config, schedule, mailbox, session.start, session.cursor, session.unfinished, *size
        )
        rules = Rules(source, config.sampling, _swaps(config.mode), config.watch.heartbeat)
        producer = Producer(rules, config.task, parts.tokenizer, mailbox, ledger, parts.store, canary, run.event, delay)
        produced = engine.submit(producer)
        produced.add_done_callback(lambda done: _deliver(done, mailbox))
        session.begin()
        try:
            _fit(config, run, callbacks, module, stream, session.start)
        except RolloutError:  # it comes between two steps, so the trainer's state is whole
            with suppress(OSError):
                session.save(mailbox.latest)
            raise
        finally:
            mailbox.stop()
            show.close()
            _keep(run, parts, mailbox.latest)
        seconds = session.elapsed()
        deadline = time.monotonic() + _patience(config)
        _wait(produced, lambda: deadline - time.monotonic(), "ending its last step")
        session.save(mailbox.latest)
        with mailbox.lock:
            ledger.check(mailbox.waiting())
            books = ledger.totals(mailbox.waiting())
        run.write_json("ledger.json", books | ledger.table())
        version = mailbox.latest
        after = _evaluate(config, console, parts, engine, version, "after training", interrupted)
    scores = Scores(**session.before) if session.before else None
    return Result(run.path, name, version, interrupted(), scores, after, seconds, canary.worst, books)


def _buffer(config: Config, ledger: Ledger, run: RunFolder) -> Buffer:
    """Which groups a step takes."""

    def drop(group: Group, step: int) -> None:
        ledger.drop(group.rollouts, "max_lag")
        lengths = [len(rollout) for rollout in group.rollouts]
        run.event("drop", step=step, uid=group.ticket.prompt.uid, seed=group.ticket.seed, lengths=lengths)

    mode = config.mode
    return FirstCome(mode.max_lag, drop) if isinstance(mode, Live) and mode.at_bound == "drop" else ByStep()


def _swaps(mode: Mode) -> bool:
    """Whether a new version takes over trajectories in flight."""
    return isinstance(mode, Live) and mode.swap != "drain"


def _start_event(config: Config, engine: str) -> dict[str, Any]:
    return {
        "engine": engine,
        "mode": type(config.mode).__name__,
        "kv": config.mode.kv(config.staleness),
        "steps": config.steps,
        "prompts": config.prompts,
        "rollouts": config.sampling.rollouts,
        "seed": config.seed,
    }


def _popped(group: Group) -> list[Any]:
    """A group as `pop` logs it: slot, prompt, seed, segments, and the lengths of its rollouts are in `rollouts`."""
    ticket = group.ticket
    return [ticket.slot, ticket.prompt.uid, ticket.seed, [[s.start, s.version] for s in ticket.segments]]


def _cores(cores: Sequence[int]) -> str:
    return f"{len(cores)} core{'s' if len(cores) > 1 else ''} ({', '.join(map(str, cores))})"


def _deliver(done: Future[None], mailbox: Mailbox) -> None:
    """Whatever ended the worker reaches the trainer, also where it never came to run."""
    if (failure := done.exception()) is not None:
        mailbox.fail(failure)


def _take(mailbox: Mailbox, step: int, count: int) -> list[Group]:
    """The step's groups; a run that was asked to end takes none of those that lie ready."""
    if mailbox.stopped:
        raise Stopped
    return mailbox.take(step, count)


def _fit(
    config: Config, run: RunFolder, callbacks: list[L.Callback], module: PolicyModule, stream: Stream, start: int
) -> None:
    """Train, without the warnings of Lightning that are about what we do on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(num_workers|many workers|IterableDataset|Experiment logs|eval mode).*")
        try:
            _trainer(config, run, callbacks, start).fit(module, train_dataloaders=stream)
        except SIGTERMException:  # Lightning's own, between two steps; ours has asked the mailbox to stop
            pass
        except SystemExit as end:  # what Lightning makes of a second Ctrl-C
            raise KeyboardInterrupt from end


def _keep(run: RunFolder, parts: Parts, version: int) -> None:
    """The newest adapter into the run's folder, also where the run failed."""
    folder = run.path / "adapters" / str(version)
    if not folder.is_dir():
        save(folder, parts.store[version].tensors, parts.store.config)


def _evaluate(
    config: Config, console: Console, parts: Parts, engine: EngineThread, version: int, label: str,
    interrupted: Callable[[], str],
) -> Scores | None:  # fmt: skip
    """The test's scores; None without a test, or where Ctrl-C ended it."""
    count = config.evaluation.problems
    if not count or interrupted():
        return None
    sampling = Sampling(config.sampling.temperature, config.sampling.max_tokens, config.evaluation.samples)
    alive = time.monotonic()

    def go_on_or_stop() -> bool:
        nonlocal alive
        alive = time.monotonic()  # the engine asks before each of its steps
        return bool(interrupted())

    with show_test(console, label) as progress:
        job = engine.submit(
            lambda e: evaluate(
                e, config.task, parts.tokenizer, sampling, version, count, parts.longest, config.seed,
                progress=progress, stopped=go_on_or_stop,
            )
        )  # fmt: skip
        try:
            return _wait(job, lambda: alive + _patience(config) - time.monotonic(), "testing")
        except Stopped:
            return None


def _patience(config: Config) -> float:
    """Seconds that one step of the engine may take: one in a process is watched there, and started again."""
    own = has_own_process(config.resources)
    return config.watch.heartbeat + (config.watch.patience if own else 0)


def _wait(job: Future[R], left: Callable[[], float], doing: str) -> R:
    """The job's result; RolloutError once no time is left, of which a job that shows life gets more."""
    while True:
        try:
            return job.result(timeout=PULSE)
        except TimeoutError as silence:
            if job.done():
                raise
            if left() < 0:
                raise RolloutError(f"The engine hangs {doing}: no sign of life within watch.heartbeat.") from silence


def _trainer(config: Config, run: RunFolder, callbacks: list[L.Callback], start: int) -> L.Trainer:
    loggers: list[Logger] = [MetricsFile(run.path / "metrics.csv")]
    if config.log.tensorboard:
        loggers.append(TensorBoardLogger(run.path, name="tensorboard", version="", purge_step=start or None))
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
def _stop_on_signal(mailbox: Mailbox) -> Iterator[Callable[[], str]]:
    """The first Ctrl-C or SIGTERM ends the run after its current step; a second one is a KeyboardInterrupt.

    Yields what says which signal came, "" while none has.
    """
    seen = ""

    def handle(signum: int, frame: Any) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = signal.Signals(signum).name
        mailbox.stop()

    before = dict[int, Any]()
    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            before[signum] = signal.signal(signum, handle)
    except ValueError:  # not the main thread: a notebook's or a test's own
        pass
    try:
        yield lambda: seen
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def describe(config: Config, engine: str) -> str:
    """The run in one line."""
    law = config.staleness
    staleness = (
        f"Δinter {law.inter}, Δintra {law.intra} ({law.switch}, kv {law.kv})"
        if isinstance(config.mode, Controlled)
        else str(config.mode)
    )
    return (
        f"{config.model.path} on {type(config.task).__name__}, {config.objective}, {staleness}, "
        f"{config.prompts} prompts × {config.sampling.rollouts}, "
        f"{config.steps} steps, {engine} engine, seed {config.seed}"
    )


def run_path(config: Config) -> Path:
    if config.run != "auto":
        return Path(config.run)
    names = (type(config.task).__name__, type(config.objective).__name__, time.strftime("%Y%m%d-%H%M%S"))
    return Path("runs") / "-".join(names).lower()
