"""Staleness as an input: laws for Δinter and Δintra, and the schedule that turns them into tickets.

A schedule is a pure function of (seed, step, slot). Nothing in it depends on timing or on the objective, so two runs
with one seed get the same tickets, whatever else differs between them.

For step s a ticket's last version is v_last = s - Δinter and its first v_first = v_last - Δintra (arXiv 2607.22186);
versions below 0 are clamped to 0 and the ticket is marked `clamped`, a warm-up ticket.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from estr_lite.checks import require_at_least, require_positive
from estr_lite.seeds import derive
from estr_lite.types import Prompt, Segment, Ticket

KvCache = Literal["keep", "recompute"]
"""In-flight swaps keep the old keys and values (as PipelineRL does) or recompute them (as AReaL does)."""


class Law(ABC):
    """A law of staleness: how many versions, as a random draw."""

    @property
    @abstractmethod
    def largest(self) -> int:
        """The most versions that a draw can give."""

    @abstractmethod
    def draw(self, rng: random.Random) -> int:
        """A number of versions, 0 to `largest`."""


@dataclass(frozen=True)
class Fixed(Law):
    """Always `steps` versions."""

    steps: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, 0, steps=self.steps)

    @property
    def largest(self) -> int:
        return self.steps

    def draw(self, rng: random.Random) -> int:
        return self.steps


@dataclass(frozen=True)
class Uniform(Law):
    """Every number from `low` to `high` versions, both included, equally often."""

    low: int = 0
    high: int = 8

    def __post_init__(self) -> None:
        require_at_least(self, 0, low=self.low)
        require_at_least(self, self.low, high=self.high)

    @property
    def largest(self) -> int:
        return self.high

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True)
class Geometric(Law):
    """P(X ≥ k) = (1 + 1 / `mean`)^-k, cut at `cut`: what a queue that is served at random gives.

    `mean` is that of the uncut law; draws above `cut` become `cut`.
    """

    mean: float = 4.0
    cut: int = 32

    def __post_init__(self) -> None:
        require_at_least(self, 1, cut=self.cut)
        require_positive(self, mean=self.mean)

    @property
    def largest(self) -> int:
        return self.cut

    def draw(self, rng: random.Random) -> int:
        return int(min(self.cut, -math.log(1.0 - rng.random()) / math.log1p(1 / self.mean)))


@dataclass(frozen=True)
class HeavyTail(Law):
    """A discrete Pareto law: P(X ≥ k) = (1 + k / `scale`)^-`alpha`, cut at `cut`: a few very old trajectories.

    Draws above `cut` become `cut`.
    """

    alpha: float = 1.5
    scale: float = 2.0
    cut: int = 64

    def __post_init__(self) -> None:
        require_at_least(self, 1, cut=self.cut)
        require_positive(self, alpha=self.alpha, scale=self.scale)

    @property
    def largest(self) -> int:
        return self.cut

    def draw(self, rng: random.Random) -> int:
        exponent = min(700.0, -math.log(1.0 - rng.random()) / self.alpha)  # e^700 is about the largest float
        return int(min(self.cut, self.scale * math.expm1(exponent)))


class Switch(ABC):
    """Where in a completion the adapter changes."""

    @abstractmethod
    def segments(self, first: int, last: int) -> tuple[Segment, ...]:
        """The segments that lead from version `first` to version `last`."""


@dataclass(frozen=True)
class Every(Switch):
    """One version further every `tokens` tokens, until the last version is reached."""

    tokens: int = 4

    def __post_init__(self) -> None:
        require_at_least(self, 1, tokens=self.tokens)

    def segments(self, first: int, last: int) -> tuple[Segment, ...]:
        return tuple(Segment(i * self.tokens, version) for i, version in enumerate(range(first, last + 1)))


@dataclass(frozen=True)
class At(Switch):
    """Switches at the given token positions; Δintra is shared out over them as evenly as it goes."""

    positions: tuple[int, ...] = (8,)

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise((0, *self.positions)))
        if not self.positions or not rising:
            raise ValueError(f"At.positions must be token positions above 0 that rise, got {list(self.positions)}.")

    def segments(self, first: int, last: int) -> tuple[Segment, ...]:
        hops, found = len(self.positions), [Segment(0, first)]
        for i, start in enumerate(self.positions, start=1):
            version = first + (last - first) * i // hops
            if version > found[-1].version:
                found.append(Segment(start, version))
        return tuple(found)


@dataclass(frozen=True)
class Staleness:
    """How stale the rollouts are.

    Args:
        inter: law of Δinter, versions between a trajectory's last token and the step that trains on it.
        intra: law of Δintra, versions that pass within one trajectory.
        switch: at which tokens the adapter changes within a trajectory. A completion that ends before a switch never
            meets the later versions: its Δintra is smaller and its Δinter larger than drawn, and its tags say so.
        kv: what an in-flight swap does with the keys and values computed so far.
    """

    inter: Law = Fixed(4)
    intra: Law = Fixed(2)
    switch: Switch = Every(4)
    kv: KvCache = "keep"

    @property
    def horizon(self) -> int:
        """The oldest version that step s can need is s - horizon."""
        return self.inter.largest + self.intra.largest


SYNCHRONOUS = Staleness(Fixed(0), Fixed(0))


def ticket(staleness: Staleness, seed: int, step: int, slot: int, prompt: Prompt) -> Ticket:
    """The ticket of (step, slot) under `seed`."""
    inter = staleness.inter.draw(random.Random(derive(seed, "inter", step, slot)))
    intra = staleness.intra.draw(random.Random(derive(seed, "intra", step, slot)))
    last, first = step - inter, step - inter - intra
    segments = _clamp(staleness.switch.segments(first, last))
    return Ticket(step, slot, prompt, segments, rollout_seed(seed, step, slot), clamped=first < 0)


def rollout_seed(seed: int, step: int, slot: int) -> int:
    """What the rollouts of (step, slot) are sampled with, whatever their versions."""
    return derive(seed, "rollout", step, slot)


def _clamp(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Versions below 0 become 0; neighbours of one version become one segment."""
    kept = list[Segment]()
    for segment in segments:
        version = max(0, segment.version)
        if not kept or version > kept[-1].version:
            kept.append(Segment(segment.start, version))
    return tuple(kept)


LAWS: tuple[type[Law], ...] = (Fixed, Uniform, Geometric, HeavyTail)
SWITCHES: tuple[type[Switch], ...] = (Every, At)
