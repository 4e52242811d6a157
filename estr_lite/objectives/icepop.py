"""IcePop: a token whose ratio leaves a fixed band is popped, on either side and for either sign of A."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from torch import Tensor

from estr_lite.checks import require_at_least, require_positive, require_within
from estr_lite.objectives.base import Objective, accept, ratio, weigh
from estr_lite.objectives.clipped import Rule
from estr_lite.objectives.grpo import update_clip
from estr_lite.types import Correction, Evidence


def within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """low ≤ exp(log_ratio) ≤ high, compared in nats so that nothing overflows; bool, shape kept, False for NaN."""
    return (log_ratio >= log(low)) & (log_ratio <= log(high))


@dataclass(frozen=True)
class IcePopRule(Rule):
    """IcePop's band as a rule for two policies, where the sampler is compared with the policy now.

        M = 1[low ≤ E ≤ high],   E = π_θ / μ        (after arXiv 2510.18855)

    Raises ValueError unless 0 < low ≤ 1 ≤ high.
    """

    low: float = 0.5
    """Smallest ratio that is kept, inclusive."""
    high: float = 5.0
    """Largest ratio that is kept, inclusive."""

    reference = "arXiv 2510.18855"
    edge = "direct"

    def __post_init__(self) -> None:
        require_positive(self, low=self.low)
        require_within(self, 0, 1, low=self.low)
        require_at_least(self, 1, high=self.high)

    def __call__(self, evidence: Evidence) -> Correction:
        return accept(within(evidence.log_ratio, self.low, self.high))


@dataclass(frozen=True)
class IcePop(Objective):
    """IcePop as published, with three policies: the band and its weight on one edge, the PPO clip on the other.

        sg[B · 1[low ≤ B ≤ high]] · min(U·A, clip(U, 1 - clip_low, 1 + clip_high)·A)        (arXiv 2510.18855)

    B = π_proximal / μ is the engine's and the lag's share, U = π_θ / π_proximal this step's. The paper averages within
    each sequence first; here Z is the token count, as for every objective. Raises ValueError unless
    0 < low ≤ 1 ≤ high, or for a clip out of range.
    """

    low: float = 0.5
    """Smallest B that is kept, a ratio, inclusive."""
    high: float = 5.0
    """Largest B that is kept, a ratio, inclusive."""
    clip_low: float = 0.2
    """Clip of U below 1, a ratio within [0, 1]."""
    clip_high: float = 0.2
    """Clip of U above 1, a ratio of at least 0."""

    reference = "arXiv 2510.18855"
    edge = "behavior, update"

    def __post_init__(self) -> None:
        require_positive(self, low=self.low)
        require_within(self, 0, 1, low=self.low, clip_low=self.clip_low)
        require_at_least(self, 1, high=self.high)
        require_at_least(self, 0, clip_high=self.clip_high)

    def __call__(self, evidence: Evidence) -> Correction:
        behavior = evidence.behavior_log_ratio  # (B, T)
        weighted = accept(within(behavior, self.low, self.high)) * weigh(ratio(behavior))
        return weighted * update_clip(evidence, self.clip_low, self.clip_high)
