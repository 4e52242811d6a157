"""Paced admission: no ticket starts that could be trained beyond the bound, and none is lost or started twice."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from estr_lite.rollout.mailbox import FirstCome, oldest
from estr_lite.rollout.source import Paced
from estr_lite.types import Group, Segment, Ticket
from tests.builders import make_group


def ticket(number: int, segments: tuple[Segment, ...], prompts: int) -> Ticket:
    made = make_group(number // prompts, number % prompts).ticket
    return replace(made, segments=segments, seed=number)


@given(
    prompts=st.integers(1, 5),
    max_lag=st.integers(0, 4),
    most=st.integers(1, 7),
    steps=st.integers(1, 6),
    again=st.sets(st.integers(0, 3)),
)
def test_every_number_starts_once_and_never_before_the_bound_allows(
    prompts: int, max_lag: int, most: int, steps: int, again: set[int]
) -> None:
    cursor, end = max(again, default=-1) + 1, steps * prompts
    again, cursor = {n for n in again if n < end}, min(cursor, end)
    source = Paced(
        lambda number, segments: ticket(number, segments, prompts),
        sorted(again),
        cursor,
        most,
        lambda latest: (latest + max_lag + 1) * prompts,
        end,
    )
    started = list[int]()
    for latest in range(steps):
        while cohort := source.offer(latest):
            assert 0 < len(cohort) <= most
            assert source.offer(latest) == cohort  # an offer changes nothing
            source.admitted()
            started += [one.seed for one in cohort]
            fresh = [one for one in cohort if one.seed not in again]
            assert all(one.step - one.segments[0].version <= max_lag for one in fresh)
    assert source.done
    assert sorted(started) == [*sorted(again), *range(cursor, end)]


def aged(version: int, step: int = 9) -> Group:
    group = make_group(step)
    rollouts = tuple(replace(r, version=r.version * 0 + version) for r in group.rollouts)
    return Group(group.ticket, rollouts)


def test_first_come_trains_in_order_of_arrival_and_drops_only_what_is_too_old() -> None:
    dropped = list[tuple[int, int]]()
    buffer = FirstCome(2, lambda group, step: dropped.append((oldest(group), step)))
    for version in (5, 2, 4, 3):
        buffer.put(aged(version))
    assert buffer.ready(5, 4) == [] and dropped == [(2, 5)]  # a lag of 3; then three of four
    taken = buffer.ready(5, 2)
    assert [oldest(group) for group in taken] == [5, 4]
    assert [(g.ticket.step, g.ticket.slot) for g in taken] == [(5, 0), (5, 1)]
    assert [oldest(group) for group in buffer.groups()] == [3]
