"""How generation and training share the time: one switch, so that the same run can be compared with itself.

All modes train on the same prompts with the same seeds and as many rollouts a step. `Controlled` and `Replay` fix every
version before anything runs; `Synchronous` and `OneStepOff` are two laws with a name; in `Live` lag emerges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from estr_lite.checks import require_at_least
from estr_lite.staleness import SYNCHRONOUS, Fixed, KvCache, Staleness

Swap = Literal["keep", "recompute", "drain"]
"""What a publish does to trajectories in flight: they go on under the new version with the old keys and values
(`keep`) or with new ones (`recompute`), or end under the version that began them (`drain`)."""


class Mode:
    """When what is generated."""

    phases = False
    """Whether engine and trainer take turns, each with all cores."""

    def laws(self, configured: Staleness) -> Staleness:
        """The laws that the tickets follow."""
        return configured

    def horizon(self, configured: Staleness) -> int:
        """Step s can need versions back to s - horizon."""
        return self.laws(configured).horizon

    def kv(self, configured: Staleness) -> KvCache:
        """What a swap does with keys and values."""
        return configured.kv


@dataclass(frozen=True)
class Controlled(Mode):
    """The laws of `staleness`, fixed before anything runs; both sides overlap as far as the versions allow."""


@dataclass(frozen=True)
class Synchronous(Mode):
    """Generate a step, then train on it; each side has all cores in its turn."""

    phases = True

    def laws(self, configured: Staleness) -> Staleness:
        return SYNCHRONOUS


@dataclass(frozen=True)
class OneStepOff(Mode):
    """Generate the next step while this one is trained: every rollout is one version old."""

    def laws(self, configured: Staleness) -> Staleness:
        return Staleness(Fixed(1), Fixed(0))


@dataclass(frozen=True)
class Live(Mode):
    """Generate without end on the newest version; lag emerges, is bounded, and is logged per token.

    Args:
        max_lag: the most versions between any token and the step that trains on it; no batch is ever beyond it.
        swap: what a new version does to trajectories in flight.
        at_bound: `wait` trains groups in the order of their prompts and starts none that could come too late, so
            nothing is dropped and long completions are trained as often as short ones; `drop` trains whatever is
            finished first and drops what has become too old, which is mostly long.
        buffer: with `drop`, most groups in flight and waiting together; 0 stands for (max_lag + 1) steps' worth, which
            is the bound that `wait` has by construction.
    """

    max_lag: int = 4
    swap: Swap = "keep"
    at_bound: Literal["wait", "drop"] = "wait"
    buffer: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, 0, max_lag=self.max_lag, buffer=self.buffer)

    def horizon(self, configured: Staleness) -> int:
        return self.max_lag

    def kv(self, configured: Staleness) -> KvCache:
        return "recompute" if self.swap == "recompute" else "keep"


@dataclass(frozen=True)
class Replay(Mode):
    """The schedule of another run as its event log has it: every version at the token where it took over.

    Args:
        run: the folder of that run, live or controlled.
        lag: the most versions between a token and its step in that log; `estr-lite replay` reads it.
        caches: what that run did with keys and values at a swap; `estr-lite replay` reads it.
    """

    run: str
    lag: int
    caches: KvCache = "keep"

    def horizon(self, configured: Staleness) -> int:
        return self.lag

    def kv(self, configured: Staleness) -> KvCache:
        return self.caches


CATALOGUE: tuple[type[Mode], ...] = (Controlled, Synchronous, OneStepOff, Live, Replay)
