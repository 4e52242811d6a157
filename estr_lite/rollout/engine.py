"""What an engine is: it decodes cohorts of tickets, each token under the adapter that its ticket names.

Two implementations keep this protocol, and one contract test (tests/test_engine_contract.py) runs on both. An engine
has one caller: the thread that built it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from estr_lite.checks import require_at_least, require_positive
from estr_lite.types import Rollout, Segment, Ticket


class EngineError(RuntimeError):
    """The engine cannot go on; the message says why and what would help."""


@dataclass(frozen=True)
class Vllm:
    """Options of the vLLM engine.

    Args:
        memory: share of the GPU's memory that vLLM may take; on CPU see `kv_gib`.
        kv_gib: size of the KV cache on CPU, in GiB.
        max_rows: most completions in flight.
        eager: no CUDA graphs and no compilation; slower, starts at once.
    """

    memory: float = 0.45
    kv_gib: float = 1.0
    max_rows: int = 256
    eager: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.memory < 1:
            raise ValueError(f"Vllm.memory must be between 0 and 1, got {self.memory}.")
        require_positive(self, kv_gib=self.kv_gib)
        require_at_least(self, 1, max_rows=self.max_rows)


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


@dataclass(frozen=True, eq=False)
class Advance:
    """What one engine step did, for the ledger too."""

    finished: Sequence[Finished] = ()
    sampled: Mapping[int, int] = field(default_factory=dict)  # version -> tokens sampled in this step
    flying: Mapping[int, int] = field(default_factory=dict)  # version -> tokens of all unfinished completions
    segments: Sequence[tuple[Ticket, Segment]] = ()  # that began in this step, with the first ticket of their cohort
    lost: str = ""  # why all that was in flight before the step was lost and started again; "" if it was not


class Engine(Protocol):
    """Decodes cohorts. `latest` is always the newest version announced to the caller."""

    max_rows: int
    """Most completions that a cohort may have."""
    lanes: int
    """Cohorts that decode side by side."""
    patience: float
    """Seconds that a call may take beyond its caller's bound, where an engine watches and mends itself; 0 elsewhere."""

    def room(self, rows: int, latest: int) -> bool:
        """Whether a cohort of that many completions should start now."""
        ...

    def admit(self, tickets: Sequence[Ticket], sampling: Sampling) -> None:
        """Start a cohort: tickets that share their segments."""
        ...

    @property
    def needs(self) -> float:
        """The version that must exist for any cohort in hand to go on; infinite without cohorts."""
        ...

    def step(self, latest: int) -> Advance:
        """Decode some tokens of the cohorts that can go on; cohorts whose next version is above `latest` wait."""
        ...

    def swap(self, version: int) -> None:
        """Live: from its next token on, `version` samples every cohort in flight, for as far as is known."""
        ...

    def score(self, version: int, token_ids: Tensor) -> Tensor:
        """(N) ids of one sequence to the (N-1) log-probabilities at temperature 1 of all but the first."""
        ...

    def close(self) -> None:
        """Give back everything that the engine holds."""
        ...


def version_at(segments: Sequence[Segment], token: int) -> int:
    """The version that samples completion token `token`."""
    return next(s.version for s in reversed(segments) if s.start <= token)


def next_switch(segments: Sequence[Segment], token: int) -> int | None:
    """The first token position after `token` at which the adapter changes; None if it stays."""
    return next((s.start for s in segments if s.start > token), None)


def turn(segments: Sequence[Segment], token: int, version: int) -> tuple[Segment, ...]:
    """The segments where `version` takes over at `token` and stays."""
    return (*(s for s in segments if s.start < token), Segment(token, version))
