"""REINFORCE: the plain policy gradient, which believes every token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from estr_lite.objectives.base import Objective, weigh
from estr_lite.types import Correction, Evidence


@dataclass(frozen=True)
class Reinforce(Objective):
    """Stale tokens count as if the policy had sampled them now.

        gradient = Σ A · ∇logp / Z        (Williams 1992, Machine Learning 8)

    The point where every other objective meets it is the on-policy one, r = 1; away from there it is biased.
    """

    reference = "Williams 1992"
    edge = "none"

    def __call__(self, evidence: Evidence) -> Correction:
        return weigh(torch.ones_like(evidence.logp))  # (B, T)
