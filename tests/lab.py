"""Real parts for tests and benchmarks: the tiny model, versions of its adapter, an engine in its thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from transformers import DynamicCache

from estr_lite.build import Parts, engine_builder, prepare
from estr_lite.config import Config
from estr_lite.distribution import entropy, log_softmax
from estr_lite.module import PolicyModule
from estr_lite.policy.adapter import Adapter, known, lora_parameters, write_tensors
from estr_lite.policy.score import score_sequence
from estr_lite.rollout.engine import Engine, Finished, Sampling
from estr_lite.rollout.mailbox import Mailbox
from estr_lite.rollout.source import Planned
from estr_lite.rollout.worker import EngineThread, decode
from estr_lite.schedule import cohorts
from estr_lite.seeds import generator
from estr_lite.tasks.base import encode
from estr_lite.types import Batch, Prompt, Rollout, Segment, Ticket

SCRATCH: set[Path] = set()
"""Folders of labs that were opened in this process; a session's own outlive its tests."""


@dataclass(frozen=True, eq=False)
class Lab:
    """A policy with `versions` random adapters in its store, and an engine that serves them."""

    config: Config
    parts: Parts
    thread: EngineThread

    def run(self, tickets: Sequence[Ticket], sampling: Sampling) -> list[Finished]:
        """Decode the tickets, those that share their segments as one cohort, with every version published; by slot."""

        def job(engine: Engine) -> list[Finished]:
            ready = Mailbox()
            ready.announce(1 << 30)
            plan = cohorts(tuple(tickets), engine.max_rows // sampling.rollouts)
            advances = decode(engine, Planned(plan), sampling, ready)
            return sorted((f for a in advances for f in a.finished), key=lambda f: f.ticket.slot)

        return self.thread.submit(job).result()

    def set_kv(self, kv: str) -> None:
        self.thread.submit(lambda engine: setattr(engine, "kv", kv)).result()

    def ticket(self, slot: int, segments: Sequence[tuple[int, int]], seed: int = 0) -> Ticket:
        plan = tuple(Segment(start, version) for start, version in segments)
        return Ticket(1 << 30, slot, self.prompt(slot), plan, seed * 1000 + slot, clamped=False)

    def prompt(self, index: int) -> Prompt:
        return encode(self.config.task.problem("test", index), self.parts.tokenizer)  # pyright: ignore[reportArgumentType]

    def use(self, version: int) -> Any:
        """The trainer's own model with that version's weights."""
        write_tensors(self.parts.model, self.parts.store[version].tensors)
        return self.parts.model.get_base_model()


@contextmanager
def open_lab(
    engine: str, config: Config, versions: int, core: int = 0, scale: float = 0.02, own_process: bool = False
) -> Iterator[Lab]:
    """Version 0 is the base; the others are random, far enough apart that a wrong one would show."""
    torch.set_num_threads(1)
    parts = prepare(config.model, config.lora, config.task, config.sampling, config.seed)
    for version in range(versions):
        add_version(parts, version, scale if version else 0.0)
    SCRATCH.update((parts.store.scratch, parts.store.scratch.with_suffix(".lock")))
    thread = EngineThread(engine_builder(engine, config, parts, config.staleness.kv, (core,), own_process), 1)
    try:
        yield Lab(config, parts, thread)
    finally:
        thread.close()
        parts.store.close()


class _Batches:
    """Batches as Lightning takes them: in a plain list each would count as a dataloader."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def fit(module: PolicyModule, batches: Sequence[Batch], *callbacks: Callback) -> L.Trainer:
    """A training step for every batch, by a real Lightning trainer that writes nothing."""
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, train_dataloaders=_Batches(batches))
    return trainer


def add_version(parts: Parts, version: int, scale: float) -> None:
    """A random adapter, seeded by its version."""
    rng = generator(version, "random adapter")
    live = lora_parameters(parts.model)
    tensors = {name: p.detach() + scale * torch.randn(p.shape, generator=rng) for name, p in live.items()}
    base = {name: p.detach().clone() for name, p in live.items()}
    write_tensors(parts.model, tensors)
    probe = score_sequence(parts.model.get_base_model(), parts.probe)  # pyright: ignore[reportArgumentType]
    write_tensors(parts.model, base)
    parts.store.add(Adapter(version, tensors, known(probe)))


@torch.no_grad()
def rescore(lab: Lab, prompt: Prompt, rollout: Rollout, kv: str, temperature: float) -> tuple[Tensor, Tensor]:
    """What the trainer scores for every token under its tagged version: (T) log-probabilities and entropies.

    With `recompute` each version reads the whole sequence; with `keep` the keys and values of earlier segments stay as
    their own version made them, segment by segment.
    """
    ids = torch.cat([torch.tensor(prompt.token_ids), rollout.token_ids])
    before, n = len(prompt.token_ids), len(rollout)
    logits, cache, done = torch.zeros(n, 0), None, 0
    switches = [0, *(i for i in range(1, n) if rollout.version[i] != rollout.version[i - 1]), n]
    parts = list[Tensor]()
    for start, end in pairwise(switches):
        model = lab.use(int(rollout.version[start]))
        if cache is None or kv == "recompute":
            cache, done = DynamicCache(config=model.config), 0
        upto = before + end - 1  # the last token of the segment is predicted from the one before it
        out = model(input_ids=ids[None, done:upto], past_key_values=cache, use_cache=True).logits[0]
        parts.append(out[-(end - start) :])
        done = upto
    logits = torch.cat(parts)  # (T, V)
    log_probs = log_softmax(logits, temperature)
    return log_probs.gather(1, rollout.token_ids[:, None]).squeeze(1), entropy(log_probs)
