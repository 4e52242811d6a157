"""What an engine is: it decodes cohorts of tickets, each token under the adapter that its ticket names.

Two implementations keep this protocol, and one contract test (tests/test_engine_contract.py) runs on both. An engine
has one caller: the thread that built it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from estr_lite.types import Rollout, Ticket


class EngineError(RuntimeError):
    """The engine cannot go on; the message says why and what would help."""


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled.

    Args:
        temperature: above 0 to sample; 0 takes the most likely token (for evaluation).
        max_tokens: longest completion.
        rollouts: completions a prompt, G.
        top_p: must be 1, see below.
        top_k: must be 0, see below.

    Raises:
        ValueError: for top-p or top-k. They cut the support of μ, while the trainer scores π over the whole
            vocabulary: every ratio would be wrong by the mass cut away.
    """

    temperature: float = 1.0
    max_tokens: int = 32
    rollouts: int = 8
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"sampling.temperature must be 0 or above and finite, got {self.temperature}.")
        for name in ("max_tokens", "rollouts"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampling.{name} must be at least 1, got {getattr(self, name)}.")
        for name, neutral in (("top_p", 1.0), ("top_k", 0)):
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"sampling.{name} must be {neutral:g}, got {getattr(self, name):g}: it cuts the support of the "
                    "sampling distribution μ while the trainer scores π over the whole vocabulary, so every "
                    "importance ratio would be wrong. Use temperature instead."
                )


@dataclass(frozen=True, eq=False)
class Finished:
    """A ticket whose rollouts are complete; their rewards are still NaN, for the worker to grade."""

    ticket: Ticket
    rollouts: tuple[Rollout, ...]


class Engine(Protocol):
    """Decodes cohorts. `latest` is always the newest version announced to the caller."""

    max_rows: int
    """Most completions that a cohort may have."""

    def room(self, rows: int, latest: int) -> bool:
        """Whether a cohort of that many completions should start now."""
        ...

    def admit(self, tickets: Sequence[Ticket], sampling: Sampling) -> None:
        """Start a cohort: tickets that share their segments."""
        ...

    def runnable(self, latest: int) -> bool:
        """Whether any admitted cohort can decode another token."""
        ...

    def step(self, latest: int) -> list[Finished]:
        """Decode some tokens of the cohorts that can go on; cohorts whose next version is above `latest` wait."""
        ...

    def score(self, version: int, token_ids: Tensor) -> Tensor:
        """(N) ids of one sequence to the (N-1) log-probabilities at temperature 1 of all but the first."""
        ...

    def close(self) -> None:
        """Give back everything that the engine holds."""
        ...


def version_at(ticket: Ticket, token: int) -> int:
    """The version that samples completion token `token`."""
    return next(s.version for s in reversed(ticket.segments) if s.start <= token)


def next_switch(ticket: Ticket, token: int) -> int | None:
    """The first token position after `token` at which the adapter changes; None if it stays."""
    return next((s.start for s in ticket.segments if s.start > token), None)
