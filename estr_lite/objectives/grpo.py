"""GRPO without a proximal policy: the PPO clip, straight on policy over sampler."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from estr_lite.checks import require_at_least, require_within
from estr_lite.objectives.base import Objective, ratio, weigh
from estr_lite.types import Correction, Evidence


def ppo_clip_weight(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """The weight of the clipped surrogate: r while a step can still gain by it, else 0.

        f(r)·A = min(r·A, clip(r, 1 - low, 1 + high)·A)        (PPO, arXiv 1707.06347, eq. 7)

    The gradient dies where A > 0 and r > 1 + high, or A < 0 and r < 1 - low; on the bounds it lives. `log_ratio` (B, T)
    in nats on any edge, `advantage` (B) in rewards; returns (B, T). A = 0 gets r, which its A makes irrelevant.
    """
    r = ratio(log_ratio)  # (B, T)
    sign = advantage.sign().unsqueeze(-1)  # (B, 1)
    spent = ((sign > 0) & (r > 1 + high)) | ((sign < 0) & (r < 1 - low))  # (B, T)
    return r.masked_fill(spent, 0.0)


def update_clip(evidence: Evidence, low: float, high: float) -> Correction:
    """The clipped surrogate on the update edge U = π_θ / π_proximal, which three-policy objectives multiply."""
    return weigh(ppo_clip_weight(evidence.update_log_ratio, evidence.advantage, low, high))


@dataclass(frozen=True)
class Grpo(Objective):
    """Asynchronous GRPO: the sampler stands where PPO has its old policy.

        min(E·A, clip(E, 1 - clip_low, 1 + clip_high)·A),   E = π_θ / μ        (arXiv 2402.03300)

    clip_high above clip_low is DAPO's clip-higher (arXiv 2503.14476). Every token is kept; a clipped one has weight 0,
    which is how a diagnostic tells clipping from rejection. Raises ValueError for a bound out of range.
    """

    clip_low: float = 0.2
    """How far E may fall below 1 before a negative advantage stops pushing, a ratio within [0, 1]; 1 turns it off."""
    clip_high: float = 0.2
    """How far E may rise above 1 before a positive advantage stops pushing, a ratio of at least 0."""

    reference = "arXiv 2402.03300"
    edge = "direct"

    def __post_init__(self) -> None:
        require_within(self, 0, 1, clip_low=self.clip_low)
        require_at_least(self, 0, clip_high=self.clip_high)

    def __call__(self, evidence: Evidence) -> Correction:
        return weigh(ppo_clip_weight(evidence.log_ratio, evidence.advantage, self.clip_low, self.clip_high))
