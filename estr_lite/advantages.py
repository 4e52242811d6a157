"""What a rollout's reward is worth: its distance from what the same prompt's other rollouts got."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from estr_lite.checks import require_positive


class Advantage(ABC):
    """A pure function from rewards (N, G), one row a prompt, to advantages (N, G).

    `min_group` is the smallest G that means anything, so that a configuration can refuse less before any rollout is
    made. Calls raise ValueError for another shape, a smaller G, or a reward that is not finite.
    """

    min_group: ClassVar[int]

    @abstractmethod
    def __call__(self, rewards: Tensor) -> Tensor:
        """(N, G) float rewards to (N, G) advantages."""


@dataclass(frozen=True)
class GroupNormalized(Advantage):
    """GRPO's advantage: distance from the group's mean in the group's standard deviations.

        A_i = (R_i - mean(R)) / (std(R) + epsilon)        (arXiv 2402.03300)

    std is the sample's (divided by G - 1), as in verl and TRL. Raises ValueError for epsilon not above 0.
    """

    epsilon: float = 1e-4
    """Floor under std, in rewards (TRL 1e-4, verl 1e-6): a group of equal rewards gets 0."""

    min_group = 2

    def __post_init__(self) -> None:
        require_positive(self, epsilon=self.epsilon)

    def __call__(self, rewards: Tensor) -> Tensor:
        _require_groups(self, rewards)
        return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + self.epsilon)


@dataclass(frozen=True)
class GroupCentered(Advantage):
    """Dr. GRPO's advantage: distance from the group's mean, in rewards.

    A_i = R_i - mean(R)        (arXiv 2503.20783)
    """

    min_group = 2

    def __call__(self, rewards: Tensor) -> Tensor:
        _require_groups(self, rewards)
        return rewards - rewards.mean(1, keepdim=True)


@dataclass(frozen=True)
class LeaveOneOut(Advantage):
    """RLOO's advantage: distance from the mean of the others, in rewards, so that a baseline never sees its own reward.

    A_i = R_i - Σ_{j≠i} R_j / (G - 1) = G / (G - 1) · (R_i - mean(R))        (arXiv 2402.14740)
    """

    min_group = 2

    def __call__(self, rewards: Tensor) -> Tensor:
        _require_groups(self, rewards)
        return rewards - (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


def _require_groups(owner: Advantage, rewards: Tensor) -> None:
    if rewards.dim() != 2 or rewards.shape[1] < owner.min_group or not rewards.isfinite().all():
        need = f"finite rewards of shape (N, G) with at least {owner.min_group} rollouts a prompt"
        raise ValueError(f"{type(owner).__name__} needs {need}, got {tuple(rewards.shape)}: {rewards}.")


CATALOGUE: tuple[type[Advantage], ...] = (GroupNormalized, GroupCentered, LeaveOneOut)
