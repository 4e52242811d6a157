"""Corrections multiply: an acceptance rule times a surrogate is an objective."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import mul

from estr_lite.checks import require_at_least, require_within
from estr_lite.objectives.base import Objective, accept, keep_all
from estr_lite.objectives.grpo import Grpo
from estr_lite.types import Correction, Evidence


class Rule(Objective):
    """An objective that only decides which tokens count: its weight is 1 everywhere."""


@dataclass(frozen=True)
class KeepAll(Rule):
    """The rule that rejects nothing, M = 1: the uncorrected baseline of the ESTR comparison (arXiv 2607.22186)."""

    reference = "arXiv 2607.22186"
    edge = "none"

    def __call__(self, evidence: Evidence) -> Correction:
        return accept(keep_all(evidence))


@dataclass(frozen=True)
class Clipped(Objective):
    """One clipped surrogate under any acceptance rule, so that two runs can differ in the rule alone.

        M · min(E·A, clip(E, 1 - clip_low, 1 + clip_high)·A),   E = π_θ / μ        (the comparison of arXiv 2607.22186)

    Z counts rejected tokens whatever the rule, since Z is part of what the comparison shares. The rivals as their own
    authors publish them are `IcePop` and `KPop`. Raises ValueError for a bound out of range, TypeError if `rule` is
    an objective with weights of its own.
    """

    rule: Rule = KeepAll()
    """M, which tokens count."""
    clip_low: float = 0.2
    """Clip below 1, a ratio within [0, 1]; assumed, since we could not read the paper's."""
    clip_high: float = 0.28
    """Clip above 1, a ratio of at least 0; assumed likewise, after DAPO."""

    reference = "arXiv 2607.22186"
    edge = "direct"

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Clipped.rule must be a Rule, such as EstrRule(tau=2.0), got {self.rule!r}.")
        require_within(self, 0, 1, clip_low=self.clip_low)
        require_at_least(self, 0, clip_high=self.clip_high)

    def __call__(self, evidence: Evidence) -> Correction:
        return self.rule(evidence) * Grpo(self.clip_low, self.clip_high)(evidence)


@dataclass(frozen=True)
class Product(Objective):
    """Any objectives as one: weights multiply, keeps and, as `Correction` does.

    Raises ValueError without factors, or with one that takes rejected tokens out of Z, where no common Z exists.
    """

    factors: tuple[Objective, ...]

    reference = "its factors"
    edge = "its factors"

    def __post_init__(self) -> None:
        if not self.factors or not all(factor.rejected_in_z for factor in self.factors):
            raise ValueError(f"Product.factors must be objectives that leave rejected tokens in Z, got {self.factors}.")

    def __call__(self, evidence: Evidence) -> Correction:
        return reduce(mul, (factor(evidence) for factor in self.factors))
