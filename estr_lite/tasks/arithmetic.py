"""Arithmetic: a chain of sums and differences, worked from left to right.

`7+12-3:` is answered by `7+12=19;19-3=16`, or by the bare number `16`.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from estr_lite.checks import require_at_least, require_within
from estr_lite.seeds import derive
from estr_lite.tasks.base import MAX_TRIES, Problem, Split, Task, check_index
from estr_lite.tasks.steps import Step, apply, parse

_BARE = re.compile(r"\d{1,6}", re.ASCII)


@dataclass(frozen=True)
class Arithmetic(Task):
    """Generated chains; a chain's text decides its split, so train and test never share one.

    Args:
        terms: numbers in a chain, 2 to 6.
        largest: the largest number; 2 to 100.
        train_size: problems of the train split.
        test_size: problems of the test split.
        seed: which problems.

    Raises ValueError for a value out of range, or where so few chains exist that a split is empty.
    """

    terms: int = 3
    largest: int = 20
    train_size: int = 100_000
    test_size: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        require_within(self, 2, 6, terms=self.terms)
        require_within(self, 2, 100, largest=self.largest)
        require_at_least(self, 1, train_size=self.train_size, test_size=self.test_size)
        make(self, "test", 0)  # raises where so few chains exist that none falls to the test split

    def size(self, split: Split) -> int:
        return self.train_size if split == "train" else self.test_size

    def problem(self, split: Split, index: int) -> Problem:
        check_index(self, split, index)
        return make(self, split, index)[0]

    def grade(self, reference: str, completion: str) -> float:
        if _BARE.fullmatch(completion.strip()):
            return float(int(completion) == int(reference))
        steps = parse(completion)
        return float(bool(steps) and all(step.exact for step in steps) and steps[-1].result == int(reference))


def make(task: Arithmetic, split: Split, index: int) -> tuple[Problem, tuple[Step, ...]]:
    """A problem and the steps that solve it."""
    rng = random.Random(derive(task.seed, "arithmetic", split, index))
    for _ in range(MAX_TRIES):
        total = rng.randint(1, task.largest)
        text, steps = str(total), list[Step]()
        for _ in range(task.terms - 1):
            term, operator = rng.randint(1, task.largest), rng.choice("+-")
            result = apply(total, operator, term)
            if result is None:
                operator, result = "+", total + term
            steps.append(Step(total, operator, term, result))
            text, total = f"{text}{operator}{term}", result
        if (derive(0, "split", text) % 10 == 0) == (split == "test"):
            return Problem(f"arithmetic:{text}", f"{text}:", str(total)), tuple(steps)
    raise ValueError(f"Arithmetic.largest = {task.largest} gives too few chains, none of them for the {split} split.")
