"""The one meeting point of the trainer's and the worker's thread: one lock, every failure delivered."""

from __future__ import annotations

import threading
import time

from estr_lite.types import Group


class RolloutError(RuntimeError):
    """The worker thread failed; `__cause__` is what it failed of."""


class Stopped(Exception):
    """The run was asked to end; whoever waits should end too."""


class Mailbox:
    """Versions go one way, groups the other; a failure on the worker's side reaches whoever waits here.

    `waited` counts the seconds the worker stood idle for a version.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._groups: dict[int, list[Group]] = {}
        self._latest = -1
        self._stopped = False
        self._failure: BaseException | None = None
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
            RolloutError: within a second, if the worker failed.
            Stopped: if the run was asked to end.
        """
        with self._changed:
            while True:
                if self._failure is not None:
                    raise RolloutError(
                        f"The rollout worker failed before step {step}: {self._failure}"
                    ) from self._failure
                if len(self._groups.get(step, [])) == count:
                    return sorted(self._groups.pop(step), key=lambda group: group.ticket.slot)
                if self._stopped:
                    raise Stopped
                self._changed.wait(timeout=1.0)

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

    def wait_beyond(self, version: int) -> int:
        """Sleep until a version above `version` is announced or a stop is asked for; the newest version."""
        started = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._latest > version or self._stopped)
            self.waited += time.monotonic() - started
            return self._latest

    def put(self, group: Group) -> None:
        with self._changed:
            self._groups.setdefault(group.ticket.step, []).append(group)
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
