"""What an objective is: a detached coefficient for every token.

    gradient = Σ keep · weight · A · ∇logp / Z

A surrogate f(r)·A states the weight f′(r)·r; an acceptance rule states weight 1 and what it keeps. One loss
(`estr_lite.loss`) serves them all, so a page here never touches autograd.
"""

# Annotations are not postponed here: jsonargparse resolves a base's in the module of its subclass.
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from estr_lite.types import Correction, Evidence

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before exp, as verl, TRL, slime and SkyRL do: e^20 is finite in float32."""


class Objective(ABC):
    """A pure function from `Evidence` to `Correction`.

    Class attributes say what a table of methods needs to say:
    `reference` the source, `edge` the ratios it looks at (behavior, update, direct or none; two are joined by a comma),
    and `rejected_in_z` whether rejected tokens stay in the denominator Z of the token mean.
    """

    reference: ClassVar[str]
    edge: ClassVar[str]
    rejected_in_z: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, evidence: Evidence) -> Correction:
        """(B, T) evidence to (B, T) coefficients."""


def ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to ±`MAX_LOG_RATIO`, shape kept; a NaN log-ratio is unknown and gives 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().nan_to_num(nan=0.0)


def finite_trace(values: Tensor) -> Tensor:
    """`values` with NaN and +inf raised to the largest float, shape kept: the worst score rather than no score."""
    return values.nan_to_num(nan=torch.finfo(values.dtype).max)


def keep_all(evidence: Evidence) -> Tensor:
    """(B, T) bool, all True."""
    return torch.ones_like(evidence.mask)


def weigh(weight: Tensor) -> Correction:
    """The correction of a surrogate: (B, T) weights, every token kept."""
    return Correction(weight, torch.ones_like(weight, dtype=torch.bool), {})


def accept(keep: Tensor, **traces: Tensor) -> Correction:
    """The correction of an acceptance rule: (B, T) bool, every weight 1."""
    return Correction(torch.ones_like(keep, dtype=torch.float32), keep, traces)
