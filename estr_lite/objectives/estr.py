"""ESTR, the entropy-scaled trust region: how far a token may drift grows with how undecided its sampler was."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from estr_lite.checks import require_at_least, require_positive, require_within
from estr_lite.objectives.base import Objective, accept, finite_trace
from estr_lite.objectives.clipped import Clipped, Rule
from estr_lite.types import Correction, Evidence

DEFAULT_TAU = 0.7
"""τ in nats. The paper's is unpublished as far as we could read. This is what `estr-lite calibrate` gives on the tiny
model: one token in 10 000 of those sampled one version ago scores higher."""


def score(log_ratio: Tensor, entropy: Tensor, epsilon: float) -> Tensor:
    """S = δ²/(H + ε) in nats, shape kept, finite: a token that cannot be scored gets the largest float."""
    return finite_trace(log_ratio.square() / (entropy.clamp_min(0.0) + epsilon))


@dataclass(frozen=True)
class EstrRule(Rule):
    """Keep a token while its squared log-ratio is small for its entropy, whatever the sign of δ or A.

        M = 1[δ²/(H + ε) ≤ τ]  ⇔  |δ| ≤ √(τ·(H + ε)),   δ = log π_θ - log μ,   H = H(μ)        (arXiv 2607.22186)

    δ²/2 estimates KL(μ‖π_θ) to second order, so τ bounds a token's divergence in units of its entropy. The score is
    traced as "score". Raises ValueError for a parameter that is not above 0.
    """

    tau: float
    """Largest score that is kept, in nats, inclusive."""
    epsilon: float = 0.01
    """Floor under H in nats: where H = 0, |δ| may still reach √(τ·ε). 0.01 is from one secondary source."""

    reference = "arXiv 2607.22186"
    edge = "direct"

    def __post_init__(self) -> None:
        require_positive(self, tau=self.tau, epsilon=self.epsilon)

    def __call__(self, evidence: Evidence) -> Correction:
        scores = score(evidence.log_ratio, evidence.behavior_entropy, self.epsilon)  # (B, T)
        return accept(scores <= self.tau, score=scores)


@dataclass(frozen=True)
class Estr(Objective):
    """ESTR as published: the rule times the clipped surrogate on the same direct edge.

        (1/Z) Σ M · min(E·A, clip(E, 1 - clip_low, 1 + clip_high)·A),  E = e^δ,  Z = all tokens      (arXiv 2607.22186)

    Known: the equation, from agreeing secondary sources. Unpublished as far as we could read: τ, whose default is a
    matter of calibration (`estr-lite calibrate`), and the clip range, where .2/.28 is assumed. ε rests on one source.
    Raises ValueError for a parameter out of range.
    """

    tau: float = DEFAULT_TAU
    """Largest score δ²/(H + ε) that is kept, in nats, inclusive."""
    epsilon: float = 0.01
    """Floor under H, in nats; from one secondary source."""
    clip_low: float = 0.2
    """Clip below 1, a ratio within [0, 1]."""
    clip_high: float = 0.28
    """Clip above 1, a ratio of at least 0."""

    reference = "arXiv 2607.22186"
    edge = "direct"

    def __post_init__(self) -> None:
        require_positive(self, tau=self.tau, epsilon=self.epsilon)
        require_within(self, 0, 1, clip_low=self.clip_low)
        require_at_least(self, 0, clip_high=self.clip_high)

    def __call__(self, evidence: Evidence) -> Correction:
        return Clipped(EstrRule(self.tau, self.epsilon), self.clip_low, self.clip_high)(evidence)
