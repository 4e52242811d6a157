"""Laws of the advantages, and the textbook formula of each."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor

from estr_lite.advantages import Advantage, GroupCentered, GroupNormalized, LeaveOneOut

ADVANTAGES: list[Advantage] = [GroupNormalized(), GroupNormalized(epsilon=0.5), GroupCentered(), LeaveOneOut()]
every_advantage = pytest.mark.parametrize("advantage", ADVANTAGES, ids=repr)


def rewards(prompts: int = 5, group: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(prompts, group, generator=generator, dtype=torch.float64)


def normalized(row: list[float], epsilon: float) -> list[float]:
    return [(r - statistics.fmean(row)) / (statistics.stdev(row) + epsilon) for r in row]


def centered(row: list[float]) -> list[float]:
    return [r - statistics.fmean(row) for r in row]


def left_out(row: list[float]) -> list[float]:
    return [r - statistics.fmean(row[:i] + row[i + 1 :]) for i, r in enumerate(row)]


@pytest.mark.parametrize(
    ("advantage", "formula"),
    [
        (GroupNormalized(epsilon=1e-4), lambda row: normalized(row, 1e-4)),
        (GroupCentered(), centered),
        (LeaveOneOut(), left_out),
    ],
    ids=repr,
)
def test_value_is_the_published_formula(advantage: Advantage, formula) -> None:
    expected = torch.tensor([formula(row) for row in rewards().tolist()], dtype=torch.float64)
    torch.testing.assert_close(advantage(rewards()), expected, rtol=0, atol=1e-12)


@every_advantage
def test_every_group_sums_to_zero(advantage: Advantage) -> None:
    torch.testing.assert_close(advantage(rewards()).sum(1), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-12)


@every_advantage
def test_a_group_of_equal_rewards_teaches_nothing(advantage: Advantage) -> None:
    assert torch.equal(advantage(torch.ones(2, 4)), torch.zeros(2, 4))


@every_advantage
def test_a_constant_added_to_all_rewards_changes_nothing(advantage: Advantage) -> None:
    torch.testing.assert_close(advantage(rewards() + 3), advantage(rewards()), rtol=0, atol=1e-12)


@every_advantage
def test_groups_do_not_see_each_other(advantage: Advantage) -> None:
    alone = torch.cat([advantage(row[None]) for row in rewards()])
    torch.testing.assert_close(advantage(rewards()), alone, rtol=0, atol=1e-12)


@every_advantage
def test_order_within_a_group_does_not_matter(advantage: Advantage) -> None:
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(advantage(rewards()[:, order]), advantage(rewards())[:, order], rtol=0, atol=1e-12)


@every_advantage
def test_a_better_rollout_never_gets_a_smaller_advantage(advantage: Advantage) -> None:
    for row, values in zip(rewards(), advantage(rewards()), strict=True):
        assert torch.equal(row.argsort(), values.argsort())


@pytest.mark.parametrize("group", [2, 3, 8])
def test_leave_one_out_is_centered_stretched_by_g_over_g_minus_one(group: int) -> None:
    r = rewards(group=group)
    torch.testing.assert_close(LeaveOneOut()(r), GroupCentered()(r) * group / (group - 1), rtol=0, atol=1e-12)


def test_normalized_advantages_have_sample_deviation_one_as_epsilon_vanishes() -> None:
    deviation = GroupNormalized(epsilon=1e-12)(rewards()).std(1, unbiased=True)
    torch.testing.assert_close(deviation, torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-10)


@every_advantage
def test_a_group_smaller_than_the_minimum_is_refused_by_name(advantage: Advantage) -> None:
    too_small = torch.zeros(3, advantage.min_group - 1)
    with pytest.raises(ValueError, match=rf"{type(advantage).__name__}.*at least {advantage.min_group} rollouts"):
        advantage(too_small)
    assert advantage(torch.zeros(3, advantage.min_group)).shape == (3, advantage.min_group)


@every_advantage
@pytest.mark.parametrize("bad", [torch.zeros(4), torch.tensor([[0.0, float("nan")]]), torch.tensor([[0.0, torch.inf]])])
def test_rewards_without_groups_or_not_finite_are_refused(advantage: Advantage, bad: Tensor) -> None:
    with pytest.raises(ValueError, match=type(advantage).__name__):
        advantage(bad)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_epsilon_is_refused_by_name(epsilon: float) -> None:
    with pytest.raises(ValueError, match=rf"GroupNormalized\.epsilon must be above 0 .*{epsilon}"):
        GroupNormalized(epsilon=epsilon)
