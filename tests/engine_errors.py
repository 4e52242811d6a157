"""How far an engine is from the trainer, token by token: the figures of its contract."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from estr_lite.config import Config
from estr_lite.rollout.engine import Finished, Sampling, version_at
from estr_lite.types import Ticket
from tests.lab import Lab, open_lab, rescore

VERSIONS = 6
SAMPLING = Sampling(max_tokens=24, rollouts=4)


@dataclass
class Errors:
    """Differences of many rollouts, of each token."""

    logp: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    tags: int = 0

    def add(self, lab: Lab, finished: Sequence[Finished], kv: str, temperature: float) -> None:
        for done in finished:
            for rollout in done.rollouts:
                logp, spread = rescore(lab, done.ticket.prompt, rollout, kv, temperature)
                self.logp.append((rollout.logp - logp).abs())
                self.entropy.append((rollout.entropy - spread).abs())
                named = [version_at(done.ticket.segments, t) for t in range(len(rollout))]
                self.tags += sum(a != b for a, b in zip(rollout.version.tolist(), named, strict=True))

    @property
    def tokens(self) -> int:
        return sum(map(len, self.logp))


def largest(values: Sequence[Tensor]) -> float:
    return float(torch.cat(list(values)).max())


def plain(lab: Lab, prompts: int) -> list[Ticket]:
    """A cohort of every version, without a swap."""
    return [lab.ticket(i, [(0, i // prompts)]) for i in range(prompts * VERSIONS)]


def swapped(lab: Lab, prompts: int) -> list[Ticket]:
    """As many cohorts, with swaps at random tokens to random later versions."""
    rng, found = random.Random(0), list[Ticket]()
    for cohort in range(VERSIONS):
        hops = rng.randint(1, 3)
        versions = sorted(rng.sample(range(VERSIONS), hops + 1))
        starts = [0, *sorted(rng.sample(range(1, 12), hops))]
        segments = list(zip(starts, versions, strict=True))
        found += [lab.ticket(cohort * prompts + i, segments) for i in range(prompts)]
    return found


def measure(engine: str, prompts: int, temperatures: Sequence[float]) -> dict[str, float]:
    """All figures of one engine, from cohorts of that many prompts at each temperature."""
    still, keep, recompute = Errors(), Errors(), Errors()
    moved = list[Tensor]()
    with open_lab(engine, Config(), VERSIONS, core=max(os.sched_getaffinity(0))) as lab:
        for temperature in temperatures:
            sampling = replace(SAMPLING, temperature=temperature)
            lab.set_kv("keep")
            still.add(lab, lab.run(plain(lab, prompts), sampling), "keep", temperature)
            finished = lab.run(swapped(lab, prompts), sampling)
            keep.add(lab, finished, "keep", temperature)
            moved += kept_versus_recomputed(lab, finished, temperature)
            lab.set_kv("recompute")
            recompute.add(lab, lab.run(swapped(lab, prompts), sampling), "recompute", temperature)
            print(f"{engine}: {still.tokens + keep.tokens + recompute.tokens} tokens compared", flush=True)
    return {
        "logp_max_error": largest(still.logp + keep.logp),
        "entropy_max_error": largest(still.entropy + keep.entropy + recompute.entropy),
        "recompute_max_error": largest(recompute.logp),
        "keep_max_error": largest(keep.logp),
        "keep_vs_recompute_mean": float(torch.cat(moved).mean()),
        "version_tag_errors": still.tags + keep.tags + recompute.tags,
        "rollouts": len(still.logp + keep.logp + recompute.logp),
        "tokens": still.tokens + keep.tokens + recompute.tokens,
    }


def kept_versus_recomputed(lab: Lab, finished: Sequence[Finished], temperature: float) -> list[Tensor]:
    """Of every rollout the tokens after its first swap: how far they are from what a recomputed cache would give."""
    found = list[Tensor]()
    for done in finished:
        first = done.ticket.segments[1].start
        for rollout in done.rollouts:
            logp, _ = rescore(lab, done.ticket.prompt, rollout, "recompute", temperature)
            found.append((rollout.logp - logp).abs()[first:])
    return found
