"""Where the worker's cohorts come from: a plan, whose versions are fixed, or the newest version, paced by a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from estr_lite.types import Segment, Ticket

Cohort = tuple[Ticket, ...]
"""Tickets that share their segments and decode together."""


class Source(Protocol):
    """Offers cohorts in order. Its state changes in `admitted` alone, which is called under the mailbox's lock."""

    @property
    def done(self) -> bool:
        """Whether no cohort will ever be offered again."""
        ...

    def offer(self, latest: int) -> Cohort:
        """The cohort to start next, () where none may start while `latest` is the newest version."""
        ...

    def admitted(self) -> None:
        """The cohort that was offered last has been started."""
        ...


class Planned:
    """Cohorts in a fixed order, each offered as soon as its first version exists."""

    def __init__(self, cohorts: Iterable[Cohort]) -> None:
        self._rest = iter(cohorts)
        self._next = next(self._rest, ())

    @property
    def done(self) -> bool:
        return not self._next

    def offer(self, latest: int) -> Cohort:
        return self._next if self._next and self._next[0].segments[0].version <= latest else ()

    def admitted(self) -> None:
        self._next = next(self._rest, ())


class Paced:
    """Tickets by number, begun on the newest version, as many as the bound allows.

    Args:
        ticket: makes ticket number n, to be begun on a version.
        unfinished: numbers below `cursor` to start again first, those that a killed run had in flight.
        cursor: the first number that was never started.
        most: most tickets in a cohort.
        allowed: the first number that may not start yet while a version is the newest.
        end: the first number that is never needed.
    """

    def __init__(
        self,
        ticket: Callable[[int, tuple[Segment, ...]], Ticket],
        unfinished: Sequence[int],
        cursor: int,
        most: int,
        allowed: Callable[[int], int],
        end: int,
    ) -> None:
        self._ticket, self._again, self.cursor = ticket, list(unfinished), cursor
        self._most, self._allowed, self._end = most, allowed, end
        self._offered, self._cohort, self._at = list[int](), (), -1

    @property
    def unfinished(self) -> list[int]:
        """Numbers below `cursor` that are still to be started again."""
        return list(self._again)

    @property
    def done(self) -> bool:
        return not self._again and self.cursor >= self._end

    def offer(self, latest: int) -> Cohort:
        fresh = range(self.cursor, min(self._end, self._allowed(latest), self.cursor + self._most))
        numbers = [*self._again, *fresh][: self._most]
        if (numbers, latest) != (self._offered, self._at):  # it is asked again and again while there is no room
            self._offered, self._at = numbers, latest
            self._cohort = tuple(self._ticket(number, (Segment(0, latest),)) for number in numbers)
        return self._cohort

    def admitted(self) -> None:
        self._again = self._again[len(self._offered) :]
        self.cursor = max(self.cursor, *(number + 1 for number in self._offered))
