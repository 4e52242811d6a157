"""Scores are what their definitions say: unbiased pass@k, the average of a known policy, repeatable by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from estr_lite.evaluate import Scores, evaluate, pass_at_k
from estr_lite.rollout.engine import Advance, Engine, EngineError, Finished, Sampling
from estr_lite.rollout.mailbox import Stopped
from estr_lite.tasks import Arithmetic, Countdown
from estr_lite.tasks.base import Problem, Split, Task
from estr_lite.types import Rollout, Ticket
from tests.builders import Characters
from tests.lab import Lab

COUNTDOWN, THREE = Countdown(), Sampling(rollouts=3)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    for samples in range(1, 9):
        for right in range(samples + 1):
            for k in range(1, samples + 1):
                subsets = list(combinations([i < right for i in range(samples)], k))
                assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


# a known policy


class Numbered(Task):
    """Problem i of a split is answered by `i` alone."""

    def size(self, split: Split) -> int:
        return 40

    def problem(self, split: Split, index: int) -> Problem:
        return Problem(f"{split}:{index}", f"{index}?", str(index))

    def grade(self, reference: str, completion: str) -> float:
        return float(completion == reference)


class Scripted(Engine):
    """Rollout j of problem i is right where `right(i, j)` says so; greedily, where i is even."""

    max_rows, lanes, patience = 12, 1, 0.0

    def __init__(self, right: Any) -> None:
        self._right, self._waiting = right, list[Finished]()
        self.cohorts = list[int]()

    def room(self, rows: int, latest: int) -> bool:
        return not self._waiting

    def admit(self, tickets: Sequence[Ticket], sampling: Sampling) -> None:
        self.cohorts.append(len(tickets) * sampling.rollouts)
        for ticket in reversed(tickets):  # no order is promised
            rollouts = [self._rollout(ticket, j, sampling) for j in range(sampling.rollouts)]
            self._waiting.append(Finished(ticket, tuple(rollouts)))

    def _rollout(self, ticket: Ticket, j: int, sampling: Sampling) -> Rollout:
        i = int(ticket.prompt.reference)
        right = i % 2 == 0 if sampling.temperature == 0 else self._right(i, j)
        text = str(i) if right else "x"
        n = len(text)
        return Rollout(
            token_ids=torch.tensor([ord(c) for c in text]),
            logp=torch.full((n,), -1.0 if right is not None else torch.nan),
            entropy=torch.ones(n),
            version=torch.zeros(n, dtype=torch.long),
            action=torch.ones(n, dtype=torch.bool),
            finish="stop" if right else "length",
            reward=float("nan"),
        )

    @property
    def needs(self) -> float:
        return 0 if self._waiting else math.inf

    def step(self, latest: int) -> Advance:
        return Advance([self._waiting.pop()])

    def swap(self, version: int) -> None: ...

    def score(self, version: int, token_ids: Tensor) -> Tensor:
        return torch.zeros(len(token_ids) - 1)

    def close(self) -> None: ...


def scored(engine: Engine, problems: int, rollouts: int, **more: Any) -> Scores:
    return evaluate(engine, Numbered(), Characters(), Sampling(rollouts=rollouts), 0, problems, 100, 0, **more)


def test_the_scores_of_a_known_policy_are_its_own() -> None:
    found = scored(Scripted(lambda i, j: j < i % 4), problems=8, rollouts=3)  # 0, 1, 2, 3 of 3 are right, in turns
    assert found == Scores(
        problems=8,
        k=3,
        greedy=0.5,
        avg=0.5,
        half_width=pytest.approx(1.96 * (40 / 9 / 7 / 4) ** 0.5 / 8**0.5),  # means 0, ⅓, ⅔, 1, twice each
        pass_at_k=0.75,
        truncated=0.5,
    )


@pytest.mark.parametrize(("right", "value"), [(lambda i, j: True, 1.0), (lambda i, j: False, 0.0)])
def test_a_policy_that_is_always_right_or_wrong_scores_so(right: Any, value: float) -> None:
    found = scored(Scripted(right), problems=5, rollouts=2)
    assert (found.avg, found.pass_at_k, found.half_width, found.truncated) == (value, value, 0.0, 1 - value)


def test_cohorts_fit_the_engine_and_the_split_bounds_the_problems() -> None:
    engine = Scripted(lambda i, j: True)
    assert scored(engine, problems=1000, rollouts=5).problems == 40
    assert max(engine.cohorts) <= engine.max_rows and sum(engine.cohorts) == 40 * 5 + 40


def test_progress_counts_every_group_once() -> None:
    seen = list[tuple[int, int]]()
    scored(Scripted(lambda i, j: True), problems=7, rollouts=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 14) for n in range(1, 15)]


def test_a_test_ends_where_it_is_stopped() -> None:
    engine, polls = Scripted(lambda i, j: True), iter([False] * 5 + [True] * 100)
    with pytest.raises(Stopped):
        scored(engine, problems=40, rollouts=2, stopped=lambda: next(polls))
    assert sum(engine.cohorts) < 40


def test_logits_that_are_not_finite_are_no_score_of_zero() -> None:
    with pytest.raises(EngineError, match="test:3 are not finite"):
        scored(Scripted(lambda i, j: None if i == 3 else True), problems=5, rollouts=2)


# the tiny model


def of_the_lab(lab: Lab, seed: int, version: int = 0, sampling: Sampling = THREE, task: Task = COUNTDOWN) -> Scores:
    parts = lab.parts
    job = lab.thread.submit(lambda e: evaluate(e, task, parts.tokenizer, sampling, version, 24, parts.longest, seed))
    return job.result()


def test_the_tiny_models_scores_repeat_by_seed(lab: Lab) -> None:
    first = of_the_lab(lab, 0)
    assert of_the_lab(lab, 0) == first
    assert 0 < first.avg < 1 and first.avg <= first.pass_at_k
    others = [of_the_lab(lab, seed) for seed in (1, 2)]
    assert {first.avg} != {other.avg for other in others}
    assert {first.greedy} == {other.greedy for other in others}  # the same problems, and no randomness


def test_another_version_is_another_policy(lab: Lab) -> None:
    assert of_the_lab(lab, 0, version=3).greedy != of_the_lab(lab, 0).greedy


def test_pass_at_k_and_avg_agree_at_one_sample(transformers_lab: Lab) -> None:
    found = of_the_lab(transformers_lab, 0, sampling=Sampling(rollouts=1))
    assert found.avg == pytest.approx(found.pass_at_k)


def test_completions_that_may_not_end_are_all_truncated(transformers_lab: Lab) -> None:
    short = replace(Sampling(rollouts=2), max_tokens=1)
    assert of_the_lab(transformers_lab, 0, sampling=short).truncated == 1.0
    found = of_the_lab(transformers_lab, 0, sampling=short, task=Arithmetic())
    assert (found.avg, found.greedy) == (0.0, 0.0)
