"""TIS, truncated importance sampling: correct for the sampler, but never by more than a cap."""

from __future__ import annotations

from dataclasses import dataclass

from estr_lite.checks import require_at_least, require_within
from estr_lite.objectives.base import Objective, ratio, weigh
from estr_lite.objectives.grpo import update_clip
from estr_lite.types import Correction, Evidence


@dataclass(frozen=True)
class Tis(Objective):
    """The behaviour edge becomes a weight cut off above; nothing is rejected, and the PPO clip sees only this step.

        sg[min(B, C)] · min(U·A, clip(U, 1 - clip_low, 1 + clip_high)·A),   B = π_proximal / μ,   U = π_θ / π_proximal

    (Yao et al. 2025, fengyao.notion.site/off-policy-rl; token level.) The cut trades the variance of a large B for a
    bias towards the sampler. Raises ValueError for a cap below 1 or a clip out of range.
    """

    cap: float = 2.0
    """C, the largest weight, a ratio of at least 1."""
    clip_low: float = 0.2
    """Clip of U below 1, a ratio within [0, 1]."""
    clip_high: float = 0.2
    """Clip of U above 1, a ratio of at least 0."""

    reference = "fengyao.notion.site/off-policy-rl"
    edge = "behavior, update"

    def __post_init__(self) -> None:
        require_at_least(self, 1, cap=self.cap)
        require_within(self, 0, 1, clip_low=self.clip_low)
        require_at_least(self, 0, clip_high=self.clip_high)

    def __call__(self, evidence: Evidence) -> Correction:
        capped = ratio(evidence.behavior_log_ratio).clamp_max(self.cap)  # (B, T)
        return weigh(capped) * update_clip(evidence, self.clip_low, self.clip_high)
