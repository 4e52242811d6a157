"""Where the trainer's and the worker's thread meet: one lock, every failure delivered, no endless wait."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from estr_lite.rollout.engine import Finished
from estr_lite.types import Group, Rollout, Ticket

PULSE = 0.25
"""Seconds between two looks of a waiting trainer at the worker's sign of life."""


class RolloutError(RuntimeError):
    """The worker thread failed; `__cause__` is what it failed of."""


class Stopped(Exception):
    """The run was asked to end; whoever waits should end too."""


class Silence(RuntimeError):
    """The worker gave no sign of life within the time it had promised."""


class Buffer(Protocol):
    """Finished groups that wait to be trained, and the order in which they are."""

    def put(self, group: Group) -> None: ...

    def ready(self, step: int, count: int) -> list[Group]:
        """The step's groups, taken out, by slot; [] while they are not complete."""
        ...

    def groups(self) -> list[Group]:
        """All that wait."""
        ...


class ByStep:
    """Every group waits for the step that its ticket names: nothing is dropped, and no length is favoured."""

    def __init__(self) -> None:
        self._groups: dict[int, list[Group]] = {}

    def put(self, group: Group) -> None:
        self._groups.setdefault(group.ticket.step, []).append(group)

    def ready(self, step: int, count: int) -> list[Group]:
        if len(self._groups.get(step, [])) < count:
            return []
        return sorted(self._groups.pop(step), key=lambda group: group.ticket.slot)

    def groups(self) -> list[Group]:
        return [group for step in sorted(self._groups) for group in self._groups[step]]


class FirstCome:
    """Whatever is finished first is trained first; groups with a token beyond the bound are dropped.

    Args:
        max_lag: most versions between a token and the step.
        drop: told every group that is dropped, and the step that would have trained it.
    """

    def __init__(self, max_lag: int, drop: Callable[[Group, int], None]) -> None:
        self._max_lag, self._drop = max_lag, drop
        self._groups = deque[Group]()

    def put(self, group: Group) -> None:
        self._groups.append(group)

    def ready(self, step: int, count: int) -> list[Group]:
        for group in [g for g in self._groups if step - oldest(g) > self._max_lag]:
            self._groups.remove(group)
            self._drop(group, step)
        if len(self._groups) < count:
            return []
        taken = [self._groups.popleft() for _ in range(count)]
        return [Group(replace(g.ticket, step=step, slot=i), g.rollouts) for i, g in enumerate(taken)]

    def groups(self) -> list[Group]:
        return list(self._groups)


def oldest(group: Group) -> int:
    """The oldest version that sampled any of the group's tokens."""
    return min(int(rollout.version.min()) for rollout in group.rollouts)


class Mailbox:
    """Versions go one way, groups the other; a failure on the worker's side reaches whoever waits here.

    `waited` counts the seconds the worker stood idle for want of a version or of room in the buffer. A worker at work
    promises to be back within a time; one that stands idle promises nothing. `lock` guards all that a checkpoint holds.

    Args:
        buffer: which groups a step takes.
        patience: seconds that a grader may take.
    """

    def __init__(self, buffer: Buffer | None = None, patience: float = math.inf) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.buffer: Buffer = buffer or ByStep()
        self._patience = patience
        self.flying: dict[int, Ticket] = {}
        """Tickets that an engine decodes, by their seeds, which are their own."""
        self.grading: dict[int, tuple[Finished, float]] = {}
        """Tickets whose rollouts are with a grader that waits for something, and since when."""
        self._latest = -1
        self._stopped = False
        self._failure: BaseException | None = None
        self._promise: tuple[float, float, str] | None = None  # made when, for how long, to do what
        self.waited = 0.0

    # the trainer's side

    def announce(self, version: int) -> None:
        """A new adapter version is in the store."""
        with self._changed:
            self._latest = version
            self._changed.notify_all()

    def take(self, step: int, count: int) -> list[Group]:
        """Wait for the step's `count` groups, by slot.

        Raises:
            RolloutError: if the worker failed, at once, or broke its promise to be back, within `PULSE`.
            Stopped: if the run was asked to end.
        """
        with self._changed:
            while True:
                if self._failure is not None:
                    raise RolloutError(
                        f"The rollout worker failed before step {step}: {self._failure}"
                    ) from self._failure
                if groups := self.buffer.ready(step, count):
                    self._changed.notify_all()  # there is room again
                    return groups
                if self._stopped:
                    raise Stopped
                self._check_promise(step)
                self._changed.wait(timeout=PULSE)

    def _check_promise(self, step: int) -> None:
        promises = [(since, self._patience, f"grading {f.ticket.prompt.uid}") for f, since in self.grading.values()]
        for made, seconds, doing in promises + ([self._promise] if self._promise else []):
            if (silent := time.monotonic() - made) > seconds:
                silence = Silence(f"no sign of life for {silent:.1f} s while {doing}; the bound is {seconds:g} s")
                raise RolloutError(f"The rollout worker hangs before step {step}: {silence}.") from silence

    def waiting(self) -> list[Rollout]:
        """All rollouts between the engine and the trainer, those with a slow grader too."""
        with self.lock:
            groups = [*self.buffer.groups(), *(finished for finished, _ in self.grading.values())]
            return [rollout for group in groups for rollout in group.rollouts]

    def stop(self) -> None:
        """Ask the worker to end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    # the worker's side

    @property
    def latest(self) -> int:
        """The newest version announced, -1 before the first."""
        with self._changed:
            return self._latest

    @property
    def stopped(self) -> bool:
        with self._changed:
            return self._stopped

    def wait_beyond(self, version: int, may_go_on: Callable[[], bool] = lambda: False) -> int:
        """Sleep until a version above `version` is announced, a stop is asked for, or something else lets one go on.

        Returns the newest version.
        """
        started = time.monotonic()
        with self._changed:
            self._promise = None
            self._changed.wait_for(lambda: self._latest > version or self._stopped or may_go_on())
            self.waited += time.monotonic() - started
            return self._latest

    @contextmanager
    def promise(self, seconds: float, doing: str) -> Generator[None]:
        """What is done here takes no longer than that; if it does, whoever waits is told what hangs."""
        self._promise = (time.monotonic(), seconds, doing)
        try:
            yield
        finally:
            self._promise = None

    def put(self, group: Group) -> None:
        with self._changed:
            self.buffer.put(group)
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()
