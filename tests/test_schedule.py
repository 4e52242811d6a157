"""The schedule is a pure function of (seed, step, slot), and cohorts are a pure function of tickets."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estr_lite.schedule import Schedule, cohorts, fit
from estr_lite.staleness import SYNCHRONOUS, Every, Geometric, Staleness, Uniform
from estr_lite.tasks import Countdown
from estr_lite.types import Prompt, Segment, Ticket
from tests.builders import Characters, make_ticket

STALE = Staleness(Uniform(0, 6), Geometric(1.5, 4), Every(3))


def make_schedule(staleness: Staleness = STALE, prompts: int = 4, size: int = 10, seed: int = 0) -> Schedule:
    return Schedule(Countdown(train_size=size), Characters(), staleness, prompts, seed, longest=64)


def test_tickets_are_the_same_in_whatever_order_they_are_asked_for() -> None:
    steps = list(range(30))
    straight = {step: make_schedule().tickets(step) for step in steps}
    random.Random(0).shuffle(steps)
    asked = make_schedule()
    assert {step: asked.tickets(step) for step in steps} == straight
    assert [asked.tickets(7) for _ in range(3)] == [straight[7]] * 3


def test_a_ticket_depends_on_the_seed_and_on_nothing_but_what_the_schedule_is_given() -> None:
    assert make_schedule(seed=0).tickets(3) != make_schedule(seed=1).tickets(3)
    assert set(inspect.signature(Schedule).parameters) == {
        *("task", "tokenizer", "staleness", "prompts", "seed", "longest")
    }  # no objective, no engine, no clock


def test_runs_that_differ_in_staleness_get_the_same_problems_and_the_same_sampling_seeds() -> None:
    for step in range(12):
        one, other = make_schedule().tickets(step), make_schedule(SYNCHRONOUS).tickets(step)
        assert [(t.prompt, t.seed) for t in one] == [(t.prompt, t.seed) for t in other]


@pytest.mark.parametrize(("prompts", "size"), [(4, 10), (3, 7), (8, 5), (5, 5)])
def test_every_problem_comes_once_an_epoch_and_in_another_order_in_the_next(prompts: int, size: int) -> None:
    schedule = make_schedule(prompts=prompts, size=size)
    drawn = [t.prompt.uid for step in range(3 * size) for t in schedule.tickets(step)]
    epochs = [drawn[i * size : (i + 1) * size] for i in range(len(drawn) // size)]
    everything = Counter(schedule.task.problem("train", i).uid for i in range(size))
    assert all(Counter(epoch) == everything for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_zero_staleness_tickets_have_one_segment_of_their_step() -> None:
    for step in range(5):
        assert {t.segments for t in make_schedule(SYNCHRONOUS).tickets(step)} == {(Segment(0, step),)}


def test_versions_that_tickets_name_lie_within_the_horizon() -> None:
    oldest = min(
        s.version - t.step for step in range(20, 60) for t in make_schedule().tickets(step) for s in t.segments
    )
    assert -STALE.horizon <= oldest < 0


# Prompts and the context


def test_a_prompt_that_leaves_no_room_for_its_completion_is_refused_by_name() -> None:
    prompt = Prompt("countdown:1,2>3", tuple(range(8)), "3")
    assert fit(prompt, 8) is prompt
    with pytest.raises(ValueError, match="Prompt countdown:1,2>3 has 8 tokens, but only 7 fit beside the completion"):
        fit(prompt, 7)


def test_a_schedule_refuses_its_tickets_when_a_prompt_is_too_long() -> None:
    with pytest.raises(ValueError, match=r"Prompt countdown:.* tokens, but only 3 fit"):
        replace(make_schedule(), longest=3).tickets(0)


# Cohorts

PLANS = [(Segment(0, 3),), (Segment(0, 1), Segment(4, 3)), (Segment(0, 1), Segment(2, 2)), (Segment(0, 2),)]
steps = st.lists(st.sampled_from(PLANS), min_size=1, max_size=12).map(
    lambda plans: tuple(make_ticket(slot=slot, segments=plan) for slot, plan in enumerate(plans))
)


@given(steps, st.integers(1, 5))
def test_cohorts_partition_a_step_into_sets_that_share_their_segments(tickets: tuple[Ticket, ...], most: int) -> None:
    found = cohorts(tickets, most)
    assert sorted(t.slot for cohort in found for t in cohort) == list(range(len(tickets)))
    assert all(1 <= len(cohort) <= most for cohort in found)
    assert all(len({t.segments for t in cohort}) == 1 for cohort in found)
    assert found == cohorts(tickets, most)


@given(steps, st.integers(1, 5))
def test_cohorts_start_with_the_oldest_first_version_and_keep_slots_in_order(
    tickets: tuple[Ticket, ...], most: int
) -> None:
    found = cohorts(tickets, most)
    firsts = [cohort[0].segments[0].version for cohort in found]
    assert firsts == sorted(firsts)
    for plan in PLANS:
        slots = [t.slot for cohort in found for t in cohort if t.segments == plan]
        assert slots == sorted(slots)


@given(steps, st.integers(1, 5), st.randoms(use_true_random=False))
def test_which_sets_of_segments_decode_when_does_not_depend_on_the_order_of_the_tickets(
    tickets: tuple[Ticket, ...], most: int, rng: random.Random
) -> None:
    shuffled = list(tickets)
    rng.shuffle(shuffled)
    plans = [[cohort[0].segments for cohort in cohorts(order, most)] for order in (tickets, tuple(shuffled))]
    assert plans[0] == plans[1]
