"""Countdown: reach the target with every number once, writing each step.

`18,3,12>42:` is answered by `18*3=54;54-12=42`. Choosing a number or an operator is a decision (entropy about one nat
in the shipped model); copying and computing digits is not (entropy near none): the split that ESTR is about.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from estr_lite.checks import require_at_least, require_within
from estr_lite.seeds import derive
from estr_lite.tasks.base import MAX_TRIES, Problem, Split, Task, check_index
from estr_lite.tasks.steps import Step, apply, parse

LARGEST_RESULT = 400


@dataclass(frozen=True)
class Countdown(Task):
    """Generated countdown problems; a problem's key decides its split, so train and test never share one.

    Args:
        numbers: how many numbers a problem gives, 2 to 6.
        largest: the largest number given; 2 to 100.
        largest_target: the largest target; 2 to 400.
        train_size: problems of the train split.
        test_size: problems of the test split.
        seed: which problems.

    Raises ValueError for a value out of range, or where so few problems exist that a split is empty.
    """

    numbers: int = 3
    largest: int = 20
    largest_target: int = 99
    train_size: int = 100_000
    test_size: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        require_within(self, 2, 6, numbers=self.numbers)
        require_within(self, 2, 100, largest=self.largest)
        require_within(self, 2, LARGEST_RESULT, largest_target=self.largest_target)
        require_at_least(self, 1, train_size=self.train_size, test_size=self.test_size)
        make(self, "test", 0)  # raises where so few problems exist that none falls to the test split

    def size(self, split: Split) -> int:
        return self.train_size if split == "train" else self.test_size

    def problem(self, split: Split, index: int) -> Problem:
        check_index(self, split, index)
        return make(self, split, index)[0]

    def grade(self, reference: str, completion: str) -> float:
        given, target = reference.split(">")
        left = Counter(int(number) for number in given.split(","))
        steps = parse(completion)
        for step in steps:
            used = Counter((step.left, step.right))
            if not step.exact or used - left:
                return 0.0
            left = left - used + Counter((step.result,))
        return float(bool(steps) and left == Counter((int(target),)))


def make(task: Countdown, split: Split, index: int) -> tuple[Problem, tuple[Step, ...]]:
    """A problem and the walk that made it, which solves it."""
    rng = random.Random(derive(task.seed, "countdown", split, index))
    for _ in range(MAX_TRIES):
        numbers = [rng.randint(1, task.largest) for _ in range(task.numbers)]
        steps = walk(numbers, rng)
        target = steps[-1].result if steps else 0
        key = f"{','.join(map(str, sorted(numbers)))}>{target}"
        in_test = derive(0, "split", key) % 10 == 0
        if 1 <= target <= task.largest_target and in_test == (split == "test"):
            reference = f"{','.join(map(str, numbers))}>{target}"
            return Problem(f"countdown:{key}", f"{reference}:", reference), steps
    raise ValueError(f"Countdown.largest = {task.largest} gives too few problems, none of them for the {split} split.")


def walk(numbers: list[int], rng: random.Random) -> tuple[Step, ...]:
    """Random but correct arithmetic that uses every number once; () where it ran into a dead end."""
    left: list[int] = numbers
    steps = list[Step]()
    while len(left) > 1:
        a, b = rng.sample(range(len(left)), 2)
        operator = rng.choice("+-*/")
        result = apply(left[a], operator, left[b])
        if result is None or not 1 <= result <= LARGEST_RESULT:
            operator = "+" if left[a] < left[b] else rng.choice("+-")
            result = apply(left[a], operator, left[b])
        if result is None or not 1 <= result <= LARGEST_RESULT:
            return ()
        steps.append(Step(left[a], operator, left[b], result))
        left = [n for i, n in enumerate(left) if i not in (a, b)] + [result]
    return tuple(steps)
