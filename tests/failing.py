"""Parts that do something awkward at a chosen moment: real ones, chosen by their import path."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from estr_lite.objectives import KeepAll
from estr_lite.tasks import Countdown
from estr_lite.types import Correction, Evidence


@dataclass(frozen=True)
class GradingTask(Countdown):
    """Countdown, but grading number `call` (from 1) has an `effect`; `when` says at what time it was."""

    call: int = 1
    calls: Any = field(init=False, repr=False, compare=False)
    when: list[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "calls", count(1))
        object.__setattr__(self, "when", [])

    def grade(self, reference: str, completion: str) -> float:
        if next(self.calls) == self.call:
            self.when.append(time.monotonic())
            self.effect()
        return super().grade(reference, completion)

    def effect(self) -> None: ...


class FailingTask(GradingTask):
    """The grader falls over."""

    def effect(self) -> None:
        raise RuntimeError("the grader ran out of ink")


class InterruptingTask(GradingTask):
    """Somebody presses Ctrl-C."""

    def effect(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


class FullDiskTask(GradingTask):
    """The disk under the event log is full from here on: the kernel itself says so, by /dev/full."""

    def effect(self) -> None:
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if entry.readlink().name == "events.jsonl":
                    full = os.open("/dev/full", os.O_WRONLY)
                    os.dup2(full, int(entry.name))
                    os.close(full)


class HangingTask(GradingTask):
    """The grader does not return for longer than anybody waits."""

    def effect(self) -> None:
        time.sleep(25)  # the thread that is given up ends with the tests


class HangingTool(HangingTask):
    """The same, in a thread of its own."""

    waits = True


@dataclass(frozen=True)
class InterruptingObjective(KeepAll):
    """Somebody presses Ctrl-C twice while the trainer computes step `step`."""

    step: int = 1
    calls: Any = field(init=False, repr=False, compare=False)

    sent = (signal.SIGINT, signal.SIGINT)

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", count())

    def __call__(self, evidence: Evidence) -> Correction:
        if next(self.calls) == self.step:
            for one in self.sent:
                os.kill(os.getpid(), one)
                time.sleep(0)  # the handler runs between two bytecodes
        return super().__call__(evidence)


class TerminatingObjective(InterruptingObjective):
    """The machine goes down: SIGTERM, once."""

    sent = (signal.SIGTERM,)
