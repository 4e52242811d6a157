"""Laws of staleness are what their formulas say, and a ticket's segments follow from its step, slot and seed."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from estr_lite.staleness import (
    LAWS,
    SWITCHES,
    SYNCHRONOUS,
    At,
    Every,
    Fixed,
    Geometric,
    HeavyTail,
    Law,
    Staleness,
    Switch,
    Uniform,
    ticket,
)
from estr_lite.types import Prompt, Segment

PROMPT = Prompt("p", (1, 2), "3")
DRAWS = 40_000

counts = st.integers(0, 12)
laws = st.one_of(
    st.builds(Fixed, counts),
    st.builds(lambda low, more: Uniform(low, low + more), counts, counts),
    st.builds(Geometric, st.floats(0, exclude_min=True, allow_infinity=False), st.integers(1, 12)),
    st.builds(
        HeavyTail,
        st.floats(0, exclude_min=True, allow_infinity=False),
        st.floats(0, exclude_min=True, allow_infinity=False),
        st.integers(1, 12),
    ),
)
switches = st.one_of(
    st.builds(Every, st.integers(1, 9)),
    st.builds(lambda found: At(tuple(sorted(found))), st.sets(st.integers(1, 40), min_size=1, max_size=5)),
)
plans = st.builds(Staleness, laws, laws, switches)
seeds = st.integers(0, 2**32)


def draws(law: Law, count: int = DRAWS) -> list[int]:
    rng = random.Random(1)
    return [law.draw(rng) for _ in range(count)]


# Laws


@given(laws, seeds)
@example(Geometric(1e308, 5), 0)
@example(Geometric(5e-324, 5), 0)
@example(HeavyTail(5e-324, 1.7e308, 5), 0)
@example(HeavyTail(1e308, 5e-324, 5), 0)
def test_every_law_stays_within_0_and_its_largest_and_is_deterministic_by_its_generator(law: Law, seed: int) -> None:
    rng, again = random.Random(seed), random.Random(seed)
    for _ in range(20):
        drawn = law.draw(rng)
        assert isinstance(drawn, int) and 0 <= drawn <= law.largest
        assert drawn == law.draw(again)


@pytest.mark.parametrize("kind", LAWS)
def test_every_law_of_the_catalogue_has_defaults_that_work(kind: type[Law]) -> None:
    assert max(draws(kind(), 1000)) <= kind().largest


def test_uniform_draws_every_number_equally_often() -> None:
    found = draws(Uniform(2, 6))
    for value in range(2, 7):
        assert found.count(value) / DRAWS == pytest.approx(1 / 5, abs=0.01)  # five standard errors


@pytest.mark.parametrize("mean", [0.5, 4.0, 12.0])
def test_geometric_has_its_mean_and_its_tail(mean: float) -> None:
    found = draws(Geometric(mean, cut=10_000))
    assert sum(found) / DRAWS == pytest.approx(mean, rel=0.03)
    for k in (1, 3, 8):
        tail = (mean / (1 + mean)) ** k
        assert sum(x >= k for x in found) / DRAWS == pytest.approx(tail, abs=5 * math.sqrt(tail / DRAWS))


@pytest.mark.parametrize(("alpha", "scale"), [(1.5, 2.0), (0.8, 1.0), (3.0, 10.0)])
def test_heavy_tail_has_its_tail(alpha: float, scale: float) -> None:
    found = draws(HeavyTail(alpha, scale, cut=10_000))
    for k in (1, 4, 16, 64):
        tail = (1 + k / scale) ** -alpha
        assert sum(x >= k for x in found) / DRAWS == pytest.approx(tail, abs=5 * math.sqrt(tail / DRAWS))


def test_draws_above_the_cut_become_the_cut() -> None:
    for long, short in ((Geometric(9, 10_000), Geometric(9, 6)), (HeavyTail(cut=10_000), HeavyTail(cut=6))):
        assert draws(short, 500) == [min(6, x) for x in draws(long, 500)]


@pytest.mark.parametrize(
    ("kind", "parameters", "field"),
    [
        (Fixed, {"steps": -1}, "steps"),
        (Uniform, {"low": -1}, "low"),
        (Uniform, {"low": 3, "high": 2}, "high"),
        (Geometric, {"mean": 0.0}, "mean"),
        (Geometric, {"mean": math.nan}, "mean"),
        (Geometric, {"cut": 0}, "cut"),
        (HeavyTail, {"alpha": 0.0}, "alpha"),
        (HeavyTail, {"scale": -1.0}, "scale"),
        (HeavyTail, {"alpha": math.inf}, "alpha"),
        (HeavyTail, {"cut": 0}, "cut"),
        (Every, {"tokens": 0}, "tokens"),
        (At, {"positions": ()}, "positions"),
        (At, {"positions": (0, 4)}, "positions"),
        (At, {"positions": (4, 4)}, "positions"),
    ],
)
def test_a_bad_parameter_is_refused_by_class_and_field(
    kind: type[Law] | type[Switch], parameters: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{kind.__name__}\.{field} must be .*, got "):
        kind(**parameters)


# Switches


def test_every_moves_one_version_each_so_many_tokens_until_the_last() -> None:
    assert Every(4).segments(3, 5) == (Segment(0, 3), Segment(4, 4), Segment(8, 5))
    assert Every(4).segments(3, 3) == (Segment(0, 3),)


def test_at_shares_the_versions_out_over_its_positions() -> None:
    assert At((8,)).segments(1, 4) == (Segment(0, 1), Segment(8, 4))
    assert At((5, 9)).segments(0, 4) == (Segment(0, 0), Segment(5, 2), Segment(9, 4))
    assert At((5, 9)).segments(0, 1) == (Segment(0, 0), Segment(9, 1))  # the first half of one version is none
    assert At((5, 9)).segments(2, 2) == (Segment(0, 2),)


@given(switches, counts, counts)
def test_every_switch_leads_from_the_first_version_to_the_last(switch: Switch, first: int, intra: int) -> None:
    found = switch.segments(first, first + intra)
    assert (found[0], found[-1].version) == (Segment(0, first), first + intra)
    assert all(a.start < b.start and a.version < b.version for a, b in pairwise(found))


def test_the_switches_under_test_are_the_catalogue() -> None:
    assert set(SWITCHES) == {Every, At}


# Tickets


@given(plans, seeds, st.integers(0, 40), st.integers(0, 3))
def test_versions_lie_between_the_horizon_and_the_step(plan: Staleness, seed: int, step: int, slot: int) -> None:
    found = ticket(plan, seed, step, slot, PROMPT)
    versions = [segment.version for segment in found.segments]
    assert max(0, step - plan.horizon) <= versions[0] and versions[-1] <= step
    assert all(a < b for a, b in pairwise(versions))  # neighbours of one version are one segment
    assert found == ticket(plan, seed, step, slot, PROMPT)


@given(plans, seeds, st.integers(0, 3))
def test_past_the_horizon_no_ticket_is_a_warm_up_ticket(plan: Staleness, seed: int, slot: int) -> None:
    assert not ticket(plan, seed, plan.horizon, slot, PROMPT).clamped


@given(seeds, st.integers(0, 40), st.integers(0, 3))
def test_without_staleness_a_ticket_is_one_segment_of_its_own_step(seed: int, step: int, slot: int) -> None:
    found = ticket(SYNCHRONOUS, seed, step, slot, PROMPT)
    assert (found.segments, found.clamped) == ((Segment(0, step),), False)


def test_versions_before_the_first_are_clamped_and_the_ticket_is_marked() -> None:
    plan = Staleness(Fixed(2), Fixed(2), Every(4))
    found = [ticket(plan, 0, step, 0, PROMPT) for step in range(5)]
    assert [t.clamped for t in found] == [True, True, True, True, False]
    assert found[1].segments == (Segment(0, 0),)
    assert found[3].segments == (Segment(0, 0), Segment(8, 1))  # -1, 0, 1: the first two are one segment
    assert found[4].segments == (Segment(0, 0), Segment(4, 1), Segment(8, 2))


@given(st.builds(Staleness, laws, laws), seeds, laws)
def test_the_two_laws_draw_from_streams_of_their_own(plan: Staleness, seed: int, other: Law) -> None:
    """Changing one law leaves what the other draws alone, so one thing is swapped at a time."""
    step = 100
    swapped = replace(plan, intra=other)
    last = [ticket(p, seed, step, 0, PROMPT).segments[-1].version for p in (plan, swapped)]
    assert last[0] == last[1]


def test_one_law_twice_does_not_draw_the_same_twice() -> None:
    plan = Staleness(Uniform(0, 9), Uniform(0, 9), Every(1))
    spans = [[s.version for s in ticket(plan, 0, step, 0, PROMPT).segments] for step in range(100, 120)]
    assert any(step - versions[-1] != versions[-1] - versions[0] for step, versions in enumerate(spans, start=100))


@pytest.mark.parametrize("plan", [SYNCHRONOUS, Staleness(Uniform(0, 8), Geometric(2.0))], ids=str)
def test_a_rollout_seed_depends_on_neither_the_staleness_nor_the_neighbours(plan: Staleness) -> None:
    found = {ticket(plan, 3, step, slot, PROMPT).seed for step in range(20) for slot in range(5)}
    assert len(found) == 100
    assert ticket(plan, 3, 4, 2, PROMPT).seed == ticket(Staleness(), 3, 4, 2, PROMPT).seed
