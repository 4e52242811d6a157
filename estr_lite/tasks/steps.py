"""The grammar that both generated tasks share: steps `a+b=c`, joined by `;`, over non-negative integers.

Parsing is a full match of a bounded regular expression and exact integer arithmetic; text is never evaluated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_CHARACTERS = 256
_STEP = re.compile(r"(\d{1,6})([+\-*/])(\d{1,6})=(\d{1,6})", re.ASCII)


@dataclass(frozen=True)
class Step:
    """`left operator right = result`, where the result is what was written, right or wrong."""

    left: int
    operator: str
    right: int
    result: int

    @property
    def exact(self) -> bool:
        return apply(self.left, self.operator, self.right) == self.result

    def __str__(self) -> str:
        return f"{self.left}{self.operator}{self.right}={self.result}"


def apply(left: int, operator: str, right: int) -> int | None:
    """The exact result, or None where it is no integer or falls below 0."""
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right if left >= right else None
        case "*":
            return left * right
        case "/":
            return left // right if right and left % right == 0 else None
        case _:
            return None


def parse(text: str) -> tuple[Step, ...]:
    """The steps of a completion, or () if any part of it is not a step."""
    if len(text) > MAX_CHARACTERS:
        return ()
    matches = [_STEP.fullmatch(part) for part in text.strip().split(";")]
    found = [match for match in matches if match]
    if len(found) < len(matches):
        return ()
    return tuple(Step(int(m[1]), m[2], int(m[3]), int(m[4])) for m in found)
