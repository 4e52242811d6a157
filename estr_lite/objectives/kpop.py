"""KPop: a token is judged by how far its probability moved, not its ratio."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from estr_lite.checks import require_at_least, require_positive, require_within
from estr_lite.objectives.base import Objective, accept, finite_trace, ratio, weigh
from estr_lite.objectives.clipped import Rule
from estr_lite.objectives.grpo import update_clip
from estr_lite.types import Correction, Evidence

MAX_LOG_PROBABILITY = -1e-8
"""Probabilities stay 1e-8 below 1, as in AReaL: D_B(p‖1) is infinite, so this bound decides on saturated tokens."""


def binary_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """D_B(p‖q) = p·log(p/q) + (1-p)·log((1-p)/(1-q)) in nats, shape kept; float32 keeps 1-p near p = 1 by expm1."""
    logp, logq = (x.clamp(torch.finfo(x.dtype).min, MAX_LOG_PROBABILITY) for x in (logp, logq))  # finite
    rest, rest_q = -logp.expm1(), -logq.expm1()  # 1 - p, 1 - q
    return logp.exp() * (logp - logq) + rest * (rest.log() - rest_q.log())


def region(logp: Tensor, logq: Tensor, phi: float) -> Correction:
    """Accept (B, T) tokens by max(D_B(p‖q), D_B(q‖p)) ≤ φ in nats, traced as "binary_kl"; NaN counts as too far."""
    divergence = finite_trace(torch.maximum(binary_kl(logp, logq), binary_kl(logq, logp)))  # (B, T)
    return accept(divergence <= phi, binary_kl=divergence)


@dataclass(frozen=True)
class KPopRule(Rule):
    """KPop's region as a rule for two policies, where the sampler is compared with the policy now.

        M = 1[max(D_B(p‖q), D_B(q‖p)) ≤ φ],   p = π_θ,   q = μ        (after arXiv 2606.15079, section 3.2)

    Raises ValueError for φ not above 0.
    """

    phi: float
    """Largest divergence that is kept, in nats, inclusive; none is authoritative (0.1 prime-rl, 2.0 AReaL)."""

    reference = "arXiv 2606.15079"
    edge = "direct"

    def __post_init__(self) -> None:
        require_positive(self, phi=self.phi)

    def __call__(self, evidence: Evidence) -> Correction:
        return region(evidence.logp, evidence.behavior_logp, self.phi)


@dataclass(frozen=True)
class KPop(Objective):
    """KPop as published: IcePop with its band replaced; p = π_proximal, B = p/q, U = π_θ/p.

        sg[B·M] · min(U·A, clip(U, 1 - clip_low, 1 + clip_high)·A)        (arXiv 2606.15079, section 3.2)

    Raises ValueError for φ not above 0 or a clip out of range.
    """

    phi: float = 0.1
    """Largest divergence that is kept, in nats, inclusive; none is authoritative (0.1 prime-rl, 2.0 AReaL)."""
    clip_low: float = 0.2
    """Clip of U below 1, a ratio within [0, 1]."""
    clip_high: float = 0.2
    """Clip of U above 1, a ratio of at least 0."""

    reference = "arXiv 2606.15079"
    edge = "behavior, update"

    def __post_init__(self) -> None:
        require_positive(self, phi=self.phi)
        require_within(self, 0, 1, clip_low=self.clip_low)
        require_at_least(self, 0, clip_high=self.clip_high)

    def __call__(self, evidence: Evidence) -> Correction:
        kept = region(evidence.proximal_logp, evidence.behavior_logp, self.phi)
        return kept * weigh(ratio(evidence.behavior_log_ratio)) * update_clip(evidence, self.clip_low, self.clip_high)
